"""The episode buffer: whole episodes in, whole episodes out, bounded by episodes and by bytes.

    pools ──encoded episode──► put ──► take(n) ──► trainer
                                └──► drop_stale

In flows an episode's encoded bytes with the sequence number the episode log gave it; out flow decoded episodes, the
stalest first and otherwise in the order they came. Nothing is evicted to make room: a full buffer refuses, the sender
keeps the episode, and the refusal is counted. Only the encoded bytes are held (decoded tokens take about six times as
much), so ``num_bytes`` is what the buffer really costs.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from selfplay.errors import SelfplayError
from selfplay.types import Episode

_decoder = msgspec.msgpack.Decoder(Episode)


class BufferFull(SelfplayError):
    """There is no room now; the episode stays with its sender, who offers it again."""


class EpisodeTooBig(SelfplayError):
    """The episode alone is over ``buffer.max_bytes``: it will never fit."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One episode on its way out."""

    seq: int
    num_bytes: int
    staleness: int
    episode: Episode


class Stale(msgspec.Struct, frozen=True, kw_only=True):
    """One episode that was dropped because it was too old."""

    seq: int
    episode_id: str
    staleness: int


class _Held(msgspec.Struct, frozen=True, kw_only=True):
    seq: int
    data: bytes
    episode_id: str
    oldest: dict[str, int]
    """Trained agent → oldest version that sampled in the episode."""

    def staleness(self, current: Mapping[str, int]) -> int:
        return max([0, *(current[agent] - version for agent, version in self.oldest.items())])


class EpisodeBuffer:
    """Bounded store of whole episodes.

    >>> buffer.put(seq, data, episode)        # BufferFull: no room now.  EpisodeTooBig: never
    >>> if len(buffer) >= batch:
    ...     entries = buffer.take(batch, current={"pro": 3, "con": 2})
    """

    def __init__(self, *, max_episodes: int, max_bytes: int) -> None:
        if max_episodes < 1 or max_bytes < 1:
            raise ValueError(f"a buffer of {max_episodes} episodes and {max_bytes} bytes can hold nothing")
        self.max_episodes, self.max_bytes = max_episodes, max_bytes
        self.num_bytes = 0
        self.num_refused_full = 0
        self.num_refused_too_big = 0
        self._held: dict[int, _Held] = {}
        self._unready: set[int] = set()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def fill(self) -> float:
        """Share of the tighter of the two bounds that is in use."""
        return max(len(self) / self.max_episodes, self.num_bytes / self.max_bytes)

    @property
    def seqs(self) -> tuple[int, ...]:
        """Sequence numbers held, in order."""
        return tuple(sorted(self._held))

    @property
    def num_unready(self) -> int:
        """Episodes held that wait for their scores."""
        return len(self._unready)

    def unready(self) -> list[tuple[int, Episode]]:
        """Those episodes, by sequence number."""
        return [(seq, _decoder.decode(self._held[seq].data)) for seq in sorted(self._unready)]

    def has_room(self, num_bytes: int) -> bool:
        """Whether an episode of ``num_bytes`` would be taken now."""
        return len(self) < self.max_episodes and self.num_bytes + num_bytes <= self.max_bytes

    def check_room(self, num_bytes: int) -> None:
        """Raise what `put` would raise, and count it. For callers that make the episode durable before they put it."""
        if num_bytes > self.max_bytes:
            self.num_refused_too_big += 1
            raise EpisodeTooBig(
                f"an episode of {num_bytes} bytes is over buffer.max_bytes={self.max_bytes}: raise that, or lower rollout.max_episode_tokens"
            )
        if not self.has_room(num_bytes):
            self.num_refused_full += 1
            raise BufferFull(
                f"the buffer holds {len(self)} of {self.max_episodes} episodes and {self.num_bytes} of {self.max_bytes} bytes: no room for {num_bytes} more"
            )

    def put(self, seq: int, data: bytes, episode: Episode, *, ready: bool = True) -> None:
        """Store one episode whole. ``episode`` is what ``data`` decodes to. Not ``ready``: it is not taken before `make_ready`.

        Raises `BufferFull`, `EpisodeTooBig`, or ValueError for a sequence number that is already held.
        """
        if seq in self._held:
            raise ValueError(f"episode {episode.episode_id} (number {seq}) is in the buffer already")
        self.check_room(len(data))
        trained = set(episode.trained_agents())
        oldest = {agent: low for agent, (low, _) in episode.versions().items() if agent in trained}
        self._held[seq] = _Held(seq=seq, data=data, episode_id=episode.episode_id, oldest=oldest)
        self.num_bytes += len(data)
        if not ready:
            self._unready.add(seq)

    def make_ready(self, seq: int) -> bool:
        """The episode may be taken from now on; False when it is not held any more."""
        self._unready.discard(seq)
        return seq in self._held

    def discard(self, seq: int) -> bool:
        """Remove one episode; False when it is not held any more."""
        if seq not in self._held:
            return False
        self._remove(self._held[seq])
        return True

    def take(self, n: int, current: Mapping[str, int]) -> list[Entry]:
        """Remove and return exactly ``n`` episodes: the stalest under ``current`` first, then the first that came.

        Raises ValueError when fewer than ``n`` are held and ready.
        """
        ready = [held for held in self._held.values() if held.seq not in self._unready]
        if n > len(ready):
            raise ValueError(f"asked for {n} episodes, the buffer holds {len(ready)} that are ready")
        ranked = sorted(ready, key=lambda held: (-held.staleness(current), held.seq))
        return [self._release(held, current) for held in ranked[:n]]

    def drop_stale(self, current: Mapping[str, int], max_staleness: int) -> list[Stale]:
        """Remove the episodes staler than ``max_staleness`` under ``current`` and say which."""
        ages = [(held, held.staleness(current)) for held in self._held.values()]
        stale = [(held, age) for held, age in ages if age > max_staleness]
        for held, _ in stale:
            self._remove(held)
        return [Stale(seq=held.seq, episode_id=held.episode_id, staleness=age) for held, age in stale]

    def older_than(self, agent: str, version: int) -> list[int]:
        """Sequence numbers of episodes that ``agent`` learns from and in which it sampled by a version below ``version``."""
        return [seq for seq, held in self._held.items() if held.oldest.get(agent, version) < version]

    def staleness(self, current: Mapping[str, int]) -> dict[int, int]:
        """Sequence number → staleness of everything that is ready."""
        return {h.seq: h.staleness(current) for h in self._held.values() if h.seq not in self._unready}

    def unready_staleness(self, current: Mapping[str, int]) -> list[int]:
        """Staleness of what waits for its scores."""
        return [self._held[seq].staleness(current) for seq in self._unready]

    def why_stuck(self, batch: int, num_due_in_flight: int = 0) -> str | None:
        """Why no step can ever start although the buffer is refusing episodes; None while it can.

        A batch larger than what fits in ``max_bytes``, or a full buffer that waits for episodes still in flight.
        """
        if len(self) >= batch and num_due_in_flight == 0:
            return None
        missing = (
            f"{batch} episodes" if len(self) < batch else f"{num_due_in_flight} episodes that are due and in flight"
        )
        return (
            f"the buffer is full with {len(self)} episodes and {self.num_bytes} bytes, and the next step waits for {missing}: "
            f"raise buffer.max_bytes (now {self.max_bytes}) or buffer.max_episodes (now {self.max_episodes}), or lower train.batch"
        )

    def _release(self, held: _Held, current: Mapping[str, int]) -> Entry:
        self._remove(held)
        age = held.staleness(current)
        return Entry(seq=held.seq, num_bytes=len(held.data), staleness=age, episode=_decoder.decode(held.data))

    def _remove(self, held: _Held) -> None:
        del self._held[held.seq]
        self._unready.discard(held.seq)
        self.num_bytes -= len(held.data)
