"""What a run tells: one report per step, a status in between, and who may listen."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from selfplay.buffer import Accounting
from selfplay.scoring.segments import SegmentAges
from selfplay.types import Episode
from selfplay.wire.messages import AgentReport


class AgentStep(msgspec.Struct, frozen=True, kw_only=True):
    """One agent in one step: what training did to it and whether the engines follow."""

    version: int
    moved: bool
    """False: no signal, nothing of it was touched."""
    ages: SegmentAges = SegmentAges()
    """How old the weights were that sampled what it learnt from."""
    train: AgentReport | None = None
    probe_mean: float = 0.0
    probe_max: float = 0.0
    policy_moved: float = 0.0
    sync_s: float = 0.0
    sync_tries: int = 0
    """Moves it took; more than one after a failure."""
    sync_held_s: float = 0.0
    """How long generation was held back: of the agent (drain), or of everybody (blocking)."""
    answers_waited_for: int = 0
    answers_swapped: int = 0
    answers_resumed: int = 0
    answers_left: int = 0
    """Answers that were under way: waited for, gone on with the new weights, begun again from their tokens, left alone."""


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step, as written to ``metrics.jsonl`` and shown live."""

    step: int
    num_steps: int
    elapsed_s: float
    eta_s: float
    episodes: int
    """Episodes of this batch."""
    accounting: Accounting
    """Where every attempt of the run went."""
    buffer_episodes: int
    buffer_bytes: int
    staleness_mean: float
    staleness_max: int
    episodes_per_s: float
    sampled_tokens_per_s: float
    trained_tokens_per_s: float
    train_s: float
    wait_s: float
    """How long the trainer waited for this batch."""
    turns_mean: float
    sampled_tokens_mean: float
    illegal_share: float
    ended: dict[str, float]
    """Share of natural, forfeit and truncated endings in the batch."""
    win_share: dict[str, float]
    """Seat → share of the batch it won; ``draw``: nobody did. Games that were cut short are neither."""
    reward_mean: dict[str, float]
    split_answers: float
    """Share of the batch's answers whose tokens are of more than one version."""
    split_games: float
    """Share of the batch's games in which an agent played as more than one version."""
    length_generated: dict[str, float]
    """Sampled tokens per game, of all games this process collected: num, mean, p10, p50, p90."""
    length_trained: dict[str, float]
    """The same of the games it trained on: a rule that drops late games shows here."""
    scorers: dict[str, dict[str, float]]
    """Scorer → episodes scored, mean seconds for one, episodes that wait for it."""
    games_cancelled: int
    """Games that were given up at a new version since the last report (``rollout.partial=cancel_group``)."""
    drained_s: float
    """How long this step's versions waited for games under way (``rollout.partial=drain``)."""
    agents: dict[str, AgentStep]
    evaluation: dict[str, float] = msgspec.field(default_factory=dict)
    """Of the versions that are current after the step; empty in steps without one."""
    league: dict[str, float] = msgspec.field(default_factory=dict)
    """Snapshots that can be met, rollbacks, and how the gate's test stands."""
    pools: dict[str, float] = msgspec.field(default_factory=dict)
    """Workers, remote pools and their slots now; games since the last report, and how many of them remote pools played."""


def flat_metrics(report: StepReport) -> dict[str, float | int | str | bool]:
    """A report as flat names: ``agents/pro/train/kl``, ``accounting/void/worker died``, ..."""
    return dict(_flat(msgspec.to_builtins(report), ""))


def _flat(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}/")
        elif value is not None:
            yield prefix + key, value


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to: the table at its end, and the object of ``--json``."""

    run: str
    outcome: str
    """finished or interrupted."""
    step: int
    elapsed_s: float
    engine: str
    transport: str
    accounting: Accounting
    versions: dict[str, tuple[int, int]]
    """Agent → (version at the start, version at the end) of this process."""
    last: StepReport | None
    adapters: dict[str, str]
    """Agent → folder of its newest adapter (PEFT format)."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Where the run is between reports."""

    phase: str
    step: int
    num_steps: int
    started: int
    stored: int
    in_flight: int
    buffer_episodes: int
    elapsed_s: float
    versions: dict[str, int]


class Observer(Protocol):
    """Whoever shows a run to a person."""

    def event(self, text: str) -> None:
        """Something a person should know, once."""
        ...

    def status(self, status: Status) -> None: ...

    def step(self, report: StepReport) -> None: ...


class RateMeter:
    """Episodes and sampled tokens per second over the last reports; monotonic clock."""

    def __init__(self, window_s: float = 300.0) -> None:
        self._window_s = window_s
        self._events: collections.deque[tuple[float, int]] = collections.deque()

    def add(self, tokens: int) -> None:
        self._events.append((time.monotonic(), tokens))

    def rates(self) -> tuple[float, float]:
        """(episodes/s, tokens/s) over the window."""
        now = time.monotonic()
        while self._events and now - self._events[0][0] > self._window_s:
            self._events.popleft()
        if not self._events:
            return 0.0, 0.0
        span = max(now - self._events[0][0], 1.0)
        return len(self._events) / span, sum(n for _, n in self._events) / span


def batch_figures(episodes: list[Episode]) -> dict[str, object]:
    """The figures of a batch that come from its episodes alone: fields of `StepReport` of the same names."""
    num = len(episodes)
    turns = [t for e in episodes for t in e.turns]
    seats = sorted({s for e in episodes for s in e.rewards})
    wins = {s: sum(s in e.winners for e in episodes) / num for s in seats}
    return {
        "episodes": num,
        "turns_mean": len(turns) / num,
        "sampled_tokens_mean": sum(e.num_tokens()[1] for e in episodes) / num,
        "illegal_share": sum(not t.legal for t in turns) / max(1, len(turns)),
        "ended": {k: sum(e.ended == k for e in episodes) / num for k in ("natural", "forfeit", "truncated")},
        "win_share": wins | {"draw": sum(not e.winners and e.ended != "truncated" for e in episodes) / num},
        "split_answers": sum(len(t.spans) > 1 for t in turns) / max(1, sum(bool(t.spans) for t in turns)),
        "split_games": sum(any(low < high for low, high in e.versions().values()) for e in episodes) / num,
        "reward_mean": {s: sum(e.rewards.get(s, 0.0) for e in episodes) / num for s in seats},
    }
