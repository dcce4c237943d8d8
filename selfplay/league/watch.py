"""The collapse watch: numbers of the last episodes of an agent that say that it is breaking, long before its reward does.

In: episodes, window by window. Out: alarms in words. Watched are the win share against anchors, answer length, entropy (the mean
surprise of what was sampled), the share of illegal answers, and repetition (the share of the most frequent answer).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable

import msgspec

from selfplay.types import Episode, Turn


class WatchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Alarm thresholds; 0 switches one off (1 for shares that may not rise above it)."""

    window: int = 200
    """Episodes looked at."""
    min_anchor_share: float = 0.0
    """Win share against anchors below which the agent has got worse than they are."""
    max_length_ratio: float = 0.0
    """Answer length against that of the first window."""
    min_entropy: float = 0.0
    """Nats per token."""
    max_illegal: float = 1.0
    max_repetition: float = 1.0


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """What the last window of an agent looks like; None where there is nothing to measure."""

    episodes: int
    anchor_share: float | None
    length: float | None
    entropy: float | None
    illegal: float | None
    repetition: float | None


class CollapseWatch:
    """Follows one agent."""

    def __init__(self, agent: str, limits: WatchLimits, anchors: Collection[str] = ()) -> None:
        self._agent, self._limits, self._anchors = agent, limits, frozenset(anchors)
        self._window: deque[Episode] = deque(maxlen=limits.window)
        self._first_length: float | None = None

    def add(self, episodes: Iterable[Episode]) -> None:
        """Episodes that the agent played in."""
        self._window.extend(e for e in episodes if any(s.agent == self._agent for s in e.match.seats))
        if self._first_length is None and len(self._window) == self._limits.window:
            self._first_length = self.health().length

    def health(self) -> Health:
        """The figures of the present window."""
        turns = [t for e in self._window for t in e.turns if t.agent == self._agent]
        sampled = [t for t in turns if t.sampled_ids]
        num_tokens = sum(len(t.sampled_ids) for t in sampled)
        texts = Counter(t.text for t in turns)
        return Health(
            episodes=len(self._window), anchor_share=self._anchor_share(),
            length=num_tokens / len(sampled) if sampled else None,
            entropy=-sum(map(_surprise, sampled)) / num_tokens if num_tokens else None,
            illegal=sum(not t.legal for t in turns) / len(turns) if turns else None,
            repetition=texts.most_common(1)[0][1] / len(turns) if turns else None,
        )  # fmt: skip

    @property
    def is_healthy(self) -> bool:
        """Whether a full window shows nothing wrong."""
        return len(self._window) == self._limits.window and not self.alarms()

    def reset(self) -> None:
        """The agent is another one now: look at what it plays from here on."""
        self._window.clear()

    def alarms(self) -> dict[str, str]:
        """Figure → why the agent seems to collapse; empty while it does not, or while the window is not full."""
        limits, now = self._limits, self.health()
        if now.episodes < limits.window:
            return {}
        out = {}
        if limits.min_anchor_share and now.anchor_share is not None and now.anchor_share < limits.min_anchor_share:
            out["anchor_share"] = (
                f"win share against anchors {now.anchor_share:.2f} is below {limits.min_anchor_share:.2f}"
            )
        if limits.max_length_ratio and self._first_length and now.length is not None:
            ratio = now.length / self._first_length
            if ratio > limits.max_length_ratio:
                out["length"] = (
                    f"answers are {ratio:.1f} times as long as at first, above {limits.max_length_ratio:.1f}"
                )
        if now.entropy is not None and now.entropy < limits.min_entropy:
            out["entropy"] = f"entropy {now.entropy:.4f} nats a token is below {limits.min_entropy:.4f}"
        if now.illegal is not None and now.illegal > limits.max_illegal:
            out["illegal"] = f"{now.illegal:.0%} of the answers are illegal, above {limits.max_illegal:.0%}"
        if now.repetition is not None and now.repetition > limits.max_repetition:
            out["repetition"] = f"{now.repetition:.0%} of the answers are the same, above {limits.max_repetition:.0%}"
        return {kind: f"{self._agent}: {why} (last {now.episodes} episodes)" for kind, why in out.items()}

    def _anchor_share(self) -> float | None:
        """Wins and half the draws against tables of anchors only."""
        points, games = 0.0, 0
        for episode in self._window:
            mine = [s.seat for s in episode.match.seats if s.agent == self._agent]
            others = [s.agent for s in episode.match.seats if s.agent != self._agent]
            if others and set(others) <= self._anchors and episode.ended != "truncated":
                won = any(seat in episode.winners for seat in mine)
                points += (
                    1.0 if won and len(episode.winners) < len(episode.match.seats) else 0.0 if episode.winners else 0.5
                )
                games += 1
        return points / games if games else None


def _surprise(turn: Turn) -> float:
    return sum(turn.logprobs)
