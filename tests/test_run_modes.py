"""Every value of every mode setting in a real run: real engines, real trainer, real workers, on the tiny model.

The rows cover each value of ``buffer.depth``, ``sync.interrupt``, ``rollout.partial`` and ``sync.transport`` (those of this
machine) at least once. Each run is looked at from outside: its metrics, its episodes, what it said.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from tests.runs import Run

from selfplay.store.episode_log import EpisodeLog
from selfplay.types import Episode

pytestmark = pytest.mark.engine

STEPS, BATCH = 4, 4
BASE = (
    "train", "--env", "kuhn-poker-v0", "model=tiny", f"train.steps={STEPS}", f"train.batch={BATCH}", "rollout.concurrency=4",
    "name=r", "--json",
)  # fmt: skip
LONG = ("rollout.max_tokens=120", "rollout.concurrency=1")
"""A game takes several times as long as a step, and they are played one after the other: a run plays no more games than it trains on, so
with all of them at once a slow trainer would find nobody at play."""
AHEAD = "16"
"""A depth at which there are always games to go on with: at 2 a slow trainer is waited for, and nothing is under way when its step ends."""
SHORT = ("rollout.max_tokens=12",)
"""For what does not ask that an answer is under way at the right moment."""


class Row(msgspec.Struct, frozen=True):
    """One run."""

    depth: str
    interrupt: str
    partial: str
    transport: str
    more: tuple[str, ...] = ()

    def settings(self) -> tuple[str, ...]:
        return (
            f"buffer.depth={self.depth}", f"sync.interrupt={self.interrupt}", f"rollout.partial={self.partial}",
            f"sync.transport={self.transport}", *self.more,
        )  # fmt: skip

    @property
    def deepest_lag(self) -> int:
        staleness = next((m.partition("=")[2] for m in self.more if m.startswith("buffer.max_staleness")), self.depth)
        return int(staleness)


ROWS = (
    Row("0", "blocking", "continue", "file", SHORT),
    Row("1", "episode", "drain", "file", SHORT),
    Row(AHEAD, "token", "continue", "shm", LONG),
    Row(AHEAD, "turn", "abort_resume", "gloo", ("policy.engines=2", *LONG)),
    Row("unbounded", "drain", "cancel_group", "shm", ("buffer.max_staleness=1", *LONG)),
)


class Finished(msgspec.Struct, frozen=True):
    """What a run left."""

    row: Row
    result: dict[str, Any]
    metrics: list[dict[str, Any]]
    episodes: list[Episode]
    said: str

    def total(self, name: str) -> float:
        """The sum of a figure over all agents and steps."""
        return float(
            sum(v for m in self.metrics for k, v in m.items() if k.startswith("agents/") and k.endswith(f"/{name}"))
        )

    def spans_per_answer(self) -> list[int]:
        return [len(t.spans) for e in self.episodes for t in e.turns if t.sampled_ids]

    def versions_per_game(self) -> list[int]:
        return [1 + high - low for e in self.episodes for low, high in e.versions().values()]


@pytest.fixture(scope="module", params=ROWS, ids=lambda r: f"{r.depth}-{r.interrupt}-{r.partial}-{r.transport}")
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    row: Row = request.param
    run = Run(tmp_path_factory.mktemp("modes"), *BASE, *row.settings())
    assert run.wait() == 0, run.error_text()
    folder = run.folder / "runs/r"
    with EpisodeLog.open(folder / "episodes", write=False, say=lambda _: None) as log:
        episodes = [episode for _, episode in log.episodes()]
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Finished(row, run.result(), metrics, episodes, run.error_text())


def test_the_mode_left_its_trace(finished: Finished) -> None:
    row, result = finished.row, finished.result
    assert (result["step"], result["transport"]) == (STEPS, row.transport)
    counts = result["accounting"]
    dropped = counts["dropped"]
    lost = sum(sum(counts[k].values()) for k in ("failed", "void", "dropped"))
    assert counts["started"] == counts["stored"] + counts["in_flight"] + lost
    assert (counts["trained"], counts["failed"], counts["void"]) == (STEPS * BATCH, {}, {})

    assert f"deepest version lag {row.deepest_lag} (buffer.depth={row.depth})" in finished.said
    assert max(m["staleness_max"] for m in finished.metrics) <= row.deepest_lag
    assert all(m["length_trained/num"] == BATCH * m["step"] <= m["length_generated/num"] for m in finished.metrics)
    for m in finished.metrics:
        assert all(v < 0.001 for k, v in m.items() if k.endswith("probe_mean"))
        assert all(v in (0, 1) for k, v in m.items() if k.endswith("sync_tries"))

    _check_interrupt(finished)
    _check_partial(finished, dropped)
    if "policy.engines=2" in row.more:
        assert "starting 2 × vllm" in finished.said
        assert finished.said.count("is current") == 2, "one line per agent: current means on both engines"


def _check_interrupt(finished: Finished) -> None:
    interrupt, partial = finished.row.interrupt, finished.row.partial
    held = finished.total("sync_held_s")
    assert (held > 0) == (interrupt in ("drain", "blocking"))
    assert (finished.total("answers_swapped") > 0) == (interrupt == "token")
    assert (finished.total("answers_left") > 0) <= (interrupt in ("turn", "episode"))
    split = interrupt == "token" or partial == "abort_resume"
    assert (max(finished.spans_per_answer()) > 1) == split
    if interrupt in ("episode", "blocking") or finished.row.depth == "0":
        assert set(finished.versions_per_game()) == {1}


def _check_partial(finished: Finished, dropped: dict[str, int]) -> None:
    partial = finished.row.partial
    assert (finished.total("answers_resumed") > 0) == (partial == "abort_resume")
    cancelled = sum(m["games_cancelled"] for m in finished.metrics)
    assert cancelled <= dropped.get("cancelled at a new version", 0)  # the last step's may come after its report
    assert (cancelled > 0) <= (partial == "cancel_group")
    assert (sum(m["drained_s"] for m in finished.metrics) > 0) == (partial == "drain")
    if partial == "drain":
        assert set(finished.versions_per_game()) == {1}
    assert ("too stale" in dropped) <= (finished.row.depth == "unbounded")
