"""The controller's working state, and how it is put together again after any kind of end.

A checkpoint holds a `RunState`; everything newer is read back from the episode log (`plan_resume`).
"""

from __future__ import annotations

import time

from selfplay.buffer import EpisodeBuffer, Ledger
from selfplay.controller.lengths import Lengths
from selfplay.scoring.scored import Weighted
from selfplay.store.adapters import AdapterStore
from selfplay.store.episode_log import EpisodeLog
from selfplay.store.state import Consumed, PendingMatch, ResumePlan, RunState, plan_resume
from selfplay.types import PolicyVersion

TOO_STALE = "too stale"
TAKEN_BACK = "version taken back"


class Memory:
    """Counts, versions, the buffer, and what is to be played again."""

    def __init__(
        self, *, state: RunState, buffer: EpisodeBuffer, log: EpisodeLog, store: AdapterStore, scored: bool = False
    ) -> None:
        """``scored``: what is restored waits for its scores again."""
        plan = plan_resume(state, log.episodes(state.consumed_below), log.next_seq)
        self.buffer, self.ledger = buffer, Ledger(plan.ledger)
        self.step = self.published_step = self.first_step = state.step
        self.versions = dict(state.versions)
        """Agent → version of the trainer's weights."""
        self.published = dict(state.versions)
        """Agent → version that is current on every engine."""
        self.valid_from = dict(state.valid_from)
        self.began_with: dict[PendingMatch, dict[str, int]] = {}
        """What is being played → the versions that were current when it began."""
        self.scores: dict[int, Weighted] = {}
        """Number of an episode that waits → what its scorers said."""
        self.generated, self.trained = Lengths(), Lengths()
        """Sampled tokens of the episodes this process collected, and of those it trained on."""
        self.replays: list[PendingMatch] = list(plan.replay)
        self.next_match = plan.next_match
        self.averages = state.averages
        """Totals of the average policy over all evaluations so far."""
        self.num_restored = len(plan.buffer)
        self._skip = plan.skip
        self._consumed = Consumed(state.consumed_below, state.consumed_beyond)
        self._log, self._store = log, store
        self._elapsed_before_s = state.counters.get("elapsed_s", 0.0)
        self._start = time.monotonic()
        self._refill(plan, scored)

    def _refill(self, plan: ResumePlan, scored: bool) -> None:
        wanted = set(plan.buffer)
        if not wanted:
            return
        for seq, episode in self._log.episodes(min(wanted)):
            if seq in wanted:
                self.buffer.put(seq, self._log.read(seq), episode, ready=not scored)

    @property
    def elapsed_s(self) -> float:
        """Time spent on the run, by this and by earlier processes."""
        return self._elapsed_before_s + time.monotonic() - self._start

    @property
    def elapsed_here_s(self) -> float:
        """Time spent on the run by this process."""
        return time.monotonic() - self._start

    def next_pending(self) -> PendingMatch:
        """What to play next: what has to be played again first, then the next index."""
        if self.replays:
            return self.replays.pop(0)
        while self.next_match in self._skip:
            self.next_match += 1
        self.next_match += 1
        return PendingMatch(self.next_match - 1, 0)

    def next_version(self, agent: str) -> int:
        """Versions are never used twice: after a kill the store may hold later ones than the checkpoint knows."""
        latest = self._store.latest(agent)
        return max(self.versions[agent], latest.version if latest else 0) + 1

    def in_flight_staleness(self) -> list[int]:
        """For each episode being played or scored, how far behind the trainer its oldest turn may be."""
        being_scored = self.buffer.unready_staleness(self.versions)
        return [self._age(began) for began in self.began_with.values()] + being_scored

    def consume(self, seqs: list[int]) -> None:
        """These episodes go into an optimizer step."""
        self._consumed.add(seqs)
        self.ledger.train(len(seqs))

    def discard_stale(self, max_staleness: int) -> int:
        """Drop what waits and is too old to be trained on, counted; how many episodes."""
        stale = self.buffer.drop_stale(self.versions, max_staleness)
        if stale:
            self._drop([s.seq for s in stale], TOO_STALE)
        return len(stale)

    def take_back(self, agent: str) -> None:
        """The trainer's weights of ``agent`` are those of an earlier time: they get a number that nobody had."""
        self.versions[agent] = self.valid_from[agent] = self.next_version(agent)

    def discard_taken_back(self) -> int:
        """Drop what waits and was sampled by versions that were taken back, counted; how many episodes."""
        seqs = sorted({s for a, first in self.valid_from.items() for s in self.buffer.older_than(a, first)})
        for seq in seqs:
            self.discard(seq, TAKEN_BACK)
        return len(seqs)

    def score(self, seq: int, scores: Weighted) -> None:
        """All scorers have answered: the episode may be trained on, unless it was dropped meanwhile."""
        if self.buffer.make_ready(seq):
            self.scores[seq] = scores

    def discard(self, seq: int, reason: str) -> None:
        """Drop one episode that waits, counted; one that is gone already was counted then."""
        if self.buffer.discard(seq):
            self._drop([seq], reason)

    def _drop(self, seqs: list[int], reason: str) -> None:
        self._consumed.add(seqs)
        self.ledger.evict(len(seqs), reason)
        for seq in seqs:
            self.scores.pop(seq, None)

    def began_before(self, max_staleness: int) -> list[PendingMatch]:
        """What is being played and began on versions more than ``max_staleness`` behind."""
        return [match for match, began in self.began_with.items() if self._age(began) > max_staleness]

    def _age(self, began: dict[str, int]) -> int:
        return max((self.versions[a] - v for a, v in began.items()), default=0)

    def digests(self) -> dict[str, str]:
        """``agent@n`` → digest of every version that is stored and newest of its agent."""
        newest = [PolicyVersion(agent, version) for agent, version in self.published.items()]
        stored = {v for agent in self.published for v in self._store.versions(agent)}
        return {str(v): self._store.info(v).digest for v in newest if v in stored}

    def state(self, algorithm: dict[str, float]) -> RunState:
        """What to save now."""
        return RunState(
            step=self.step, versions=dict(self.versions), digests=self.digests(), consumed_below=self._consumed.below,
            consumed_beyond=self._consumed.beyond, logged=self._log.next_seq, next_match=self.next_match,
            pending=(*sorted(self.began_with), *self.replays), ledger=self.ledger.snapshot(), algorithm=algorithm,
            averages=self.averages, valid_from=dict(self.valid_from),
            counters={"elapsed_s": self.elapsed_s},
        )  # fmt: skip
