"""What the controller must remember to go on after any crash, and how to go on from it.

In: a `RunState` from the last checkpoint and the episode log, which may hold more than the checkpoint knew of. Out: a
`ResumePlan`: which episodes go back into the buffer, which matches are played again, which must not be.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from selfplay.buffer.accounting import Ledger, LedgerState
from selfplay.errors import StoreError
from selfplay.types import Episode

Natural = Annotated[int, Meta(ge=0)]


class PendingMatch(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A match that has no result yet: being played, or waiting to be played again."""

    index: Natural
    attempt: Natural

    @property
    def episode_id(self) -> str:
        return f"{self.index}.{self.attempt}"


class RunState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The controller at the end of a step.

    Episodes numbered below ``consumed_below``, and those in ``consumed_beyond``, were trained on or dropped.
    ``logged`` is the episode log's ``next_seq``; ``next_match`` is the first index never handed out.
    """

    step: Natural
    versions: dict[str, int]
    digests: dict[str, str] = {}
    """``agent@n`` → digest of the adapter, for the versions that may be in use."""
    consumed_below: Natural = 0
    consumed_beyond: tuple[int, ...] = ()
    logged: Natural = 0
    next_match: Natural = 0
    pending: tuple[PendingMatch, ...] = ()
    ledger: LedgerState = LedgerState()
    algorithm: dict[str, float] = {}
    """State of the algorithm: baselines."""
    averages: tuple[float, ...] = ()
    """Totals of the average policy, where ``eval.every`` keeps one."""
    valid_from: dict[str, int] = {}
    """Agent that was taken back → its first version since: episodes by earlier ones are not trained on."""
    rng: dict[str, tuple[int, ...]] = {}
    counters: dict[str, float] = {}


class ResumePlan(msgspec.Struct, frozen=True, kw_only=True):
    """How to go on. ``skip``: indices from ``next_match`` on whose episodes are in the log already."""

    buffer: tuple[int, ...]
    """Sequence numbers to put back, in order."""
    replay: tuple[PendingMatch, ...]
    """Attempts to start, in order."""
    next_match: int
    skip: frozenset[int]
    ledger: LedgerState
    """With the attempts that died with their processes void, and what was logged since the checkpoint stored."""
    from_lost_versions: tuple[int, ...]
    """Of ``buffer``: episodes sampled by versions that were published after the checkpoint and are not current now."""


class Consumed:
    """Which sequence numbers are done with: a watermark and the few beyond it."""

    def __init__(self, below: int = 0, beyond: Iterable[int] = ()) -> None:
        self.below, self._beyond = below, set(beyond)

    @property
    def beyond(self) -> tuple[int, ...]:
        return tuple(sorted(self._beyond))

    def add(self, seqs: Iterable[int]) -> None:
        """These were trained on or dropped. Raises ValueError for one that was already."""
        for seq in seqs:
            if seq < self.below or seq in self._beyond:
                raise ValueError(f"episode number {seq} was consumed before")
            self._beyond.add(seq)
        while self.below in self._beyond:
            self._beyond.remove(self.below)
            self.below += 1


def plan_resume(state: RunState, logged: Iterable[tuple[int, Episode]], next_seq: int) -> ResumePlan:
    """``logged`` yields (number, episode) from ``state.consumed_below`` to the end of the log, which is ``next_seq``.

    Raises `StoreError` when the log is shorter than the checkpoint says.
    """
    if next_seq < state.logged:
        raise StoreError(
            f"the episode log ends at {next_seq}, but the checkpoint of step {state.step} knew {state.logged} episodes: it was cut or replaced"
        )
    done: set[int] = set()
    waiting, lost_versions = [], []
    ledger = Ledger(state.ledger)
    for seq, episode in logged:
        done.add(episode.match.index)
        _count_logged(ledger, episode.episode_id, is_known=seq < state.logged)
        if seq >= state.consumed_below and seq not in state.consumed_beyond:
            waiting.append(seq)
            if any(
                newest > state.versions.get(agent, newest) for agent, (_, newest) in _trained_versions(episode).items()
            ):
                lost_versions.append(seq)
    ledger.void_all("process ended")
    return ResumePlan(
        buffer=tuple(waiting), replay=tuple(PendingMatch(p.index, p.attempt + 1) for p in state.pending if p.index not in done),
        next_match=state.next_match, skip=frozenset(i for i in done if i >= state.next_match),
        ledger=ledger.snapshot(), from_lost_versions=tuple(lost_versions),
    )  # fmt: skip


def _count_logged(ledger: Ledger, episode_id: str, *, is_known: bool) -> None:
    """Count what the checkpoint had not counted yet, also when it was taken between an append and its entry in the ledger."""
    if not ledger.is_in_flight(episode_id):
        if is_known:
            return
        ledger.start(episode_id)
    ledger.store(episode_id)


def _trained_versions(episode: Episode) -> dict[str, tuple[int, int]]:
    trained = set(episode.trained_agents())
    return {agent: span for agent, span in episode.versions().items() if agent in trained}
