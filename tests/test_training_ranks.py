"""Real rank processes over real sockets and gloo: two ranks are one trainer, and a fault of one ends the other."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_site import AGENTS, Ranks, config, segments, train_steps, wait_for_exit

from selfplay.store.adapters import AdapterStore
from selfplay.types import PolicyVersion, Segment
from selfplay.wire.messages import (
    AgentReport,
    Export,
    Exported,
    Save,
    Send,
    StepDone,
    TrainerDone,
    TrainerFailed,
    TrainerProbe,
    TrainerProbed,
)

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4
"""Relative difference of an adapter after four steps, in float32: the order of sums differs, Adam amplifies it."""
IDS = (72, 101, 108, 108, 111)
Weights = dict[str, dict[str, torch.Tensor]]


def batch(step: int) -> list[Segment]:
    """Of both agents; of one that is absent in step 2; and in step 3 one segment each, so ranks have different agents."""
    return segments(step, ("pro",)) if step == 2 else segments(step, each=1 if step == 3 else 4)


def train(ranks: Ranks, steps: range) -> list[dict[str, AgentReport]]:
    """Run steps; what rank 0 reports, which all ranks must report alike."""
    reports = []
    for step in steps:
        answers = ranks.ask_all(train_steps(batch(step), step=step, ranks=len(ranks.children), request=step))
        assert all(isinstance(a, StepDone) and a.request == a.step == step for a in answers)
        assert all(a.agents == answers[0].agents for a in answers)
        reports.append(answers[0].agents)
    return reports


def weights(ranks: Ranks, root: Path, version: int) -> Weights:
    """The adapters as exported under ``version``."""
    store = AdapterStore(root)
    for agent in AGENTS:
        exported = ranks.ask(
            Export(
                request=50, version=PolicyVersion(agent, version), folder=str(root), transport="file",
                address=str(root / "bucket"),
            )
        )  # fmt: skip
        assert isinstance(exported, Exported)
    return {a: load_file(store.path(PolicyVersion(a, version)) / "adapter_model.safetensors") for a in AGENTS}


def distance(found: Weights, expected: Weights) -> float:
    pairs = [(found[a][n], e) for a in AGENTS for n, e in expected[a].items()]
    return max(float((f - e).norm() / e.norm()) for f, e in pairs)


@pytest.fixture(scope="module")
def one_rank(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Weights, list[dict[str, AgentReport]]]:
    """Adapters and reports after steps 1 to 4 on one rank."""
    place = tmp_path_factory.mktemp("one")
    with Ranks(tiny_model, place, config(train={"shard": "none"}), world_size=1) as ranks:
        reports = train(ranks, range(1, 5))
        found = weights(ranks, place / "adapters", 1)
        assert ranks.stop() == [0]
    return found, reports


@pytest.mark.parametrize("shard", ["none", "base"])
def test_two_ranks_are_one(
    tiny_model: Path, tmp_path: Path, one_rank: tuple[Weights, list[dict[str, AgentReport]]], shard: str
) -> None:
    expected, expected_reports = one_rank
    with Ranks(tiny_model, tmp_path, config(train={"shard": shard}), world_size=2) as ranks:
        assert {h.rank for h in ranks.hellos.values()} == {0, 1}
        start = weights(ranks, tmp_path / "adapters", 0)
        reports = train(ranks, range(1, 5))
        found = weights(ranks, tmp_path / "adapters", 1)
        probes = ranks.everyone(TrainerProbe(request=60, agent="pro", ids=IDS))
        assert ranks.stop() == [0, 0]
    assert distance(found, expected) <= TOLERANCE < 0.1 < distance(found, start)
    for ours, theirs in zip(reports, expected_reports, strict=True):
        assert ours.keys() == theirs.keys()
        for agent in ours:
            assert ours[agent].num_actions == theirs[agent].num_actions
            assert ours[agent].grad_norm == pytest.approx(theirs[agent].grad_norm, rel=1e-3)
            assert ours[agent].loss == pytest.approx(theirs[agent].loss, rel=1e-3, abs=1e-5)
            assert ours[agent].max_abs_dlogp == pytest.approx(theirs[agent].max_abs_dlogp, rel=1e-3)
    assert [len(p.logprobs) for p in probes if isinstance(p, TrainerProbed)] == [len(IDS) - 1, 0]


def test_checkpoints_move_between_one_and_two_ranks_bit_for_bit(tiny_model: Path, tmp_path: Path) -> None:
    """Saved by two ranks, read by one, saved again, read by two sharded ones: the same tensors all the way."""
    settings = config(train={"shard": "none"})
    with Ranks(tiny_model, tmp_path, settings, world_size=2) as two:
        train(two, range(1, 4))
        answers = two.everyone(Save(request=7, folder=str(tmp_path / "a")))
        assert [a.rank for a in answers if isinstance(a, TrainerDone)] == [0, 1]
        saved = weights(two, tmp_path / "one", 3)
        two.stop()
    with Ranks(tiny_model, tmp_path, settings, world_size=1, checkpoint=str(tmp_path / "a")) as one:
        assert one.hellos[0].step == 3
        loaded = weights(one, tmp_path / "two", 3)
        one.everyone(Save(request=8, folder=str(tmp_path / "b")))
        one.stop()
    sharded = config(train={"shard": "base"})
    with Ranks(tiny_model, tmp_path, sharded, world_size=2, checkpoint=str(tmp_path / "b")) as again:
        back = weights(again, tmp_path / "three", 3)
        train(again, range(4, 5))
        again.stop()
    assert distance(loaded, saved) == distance(back, saved) == 0.0
    a, b = (load_file(next((tmp_path / f).glob("*.safetensors"))) for f in "ab")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[n], b[n]) for n in a if n != "rng")


def test_a_killed_rank_ends_the_other_in_words(tiny_model: Path, tmp_path: Path) -> None:
    with Ranks(tiny_model, tmp_path, config(train={"timeout_s": 20.0}), world_size=2) as ranks:
        train(ranks, range(1, 2))
        os.kill(ranks.children[1].pid, signal.SIGKILL)
        wait_for_exit(ranks.children[1])
        ranks.send(0, train_steps(batch(2), step=2, ranks=2, request=2)[0])
        answer = ranks.receive_from_survivor()
        assert isinstance(answer, TrainerFailed)
        assert answer.request == 2
        assert "lost another trainer rank" in answer.message
        assert wait_for_exit(ranks.children[0]) == 1
        assert "Traceback" in ranks.log(0).read_text()


def test_a_stopped_rank_ends_the_other_after_the_timeout(tiny_model: Path, tmp_path: Path) -> None:
    """A rank that hangs without dying is noticed by the clock."""
    with Ranks(tiny_model, tmp_path, config(train={"timeout_s": 5.0}), world_size=2) as ranks:
        os.kill(ranks.children[1].pid, signal.SIGSTOP)
        start = time.monotonic()
        ranks.send(0, train_steps(batch(2), step=2, ranks=2, request=2)[0])
        answer = ranks.receive_from_survivor()
        assert isinstance(answer, TrainerFailed)
        assert wait_for_exit(ranks.children[0]) == 1
        assert time.monotonic() - start < 60.0


def test_ranks_that_were_told_different_steps_refuse(tiny_model: Path, tmp_path: Path) -> None:
    """Otherwise gradients of different agents, equal in size, would be added up without a sign."""
    with Ranks(tiny_model, tmp_path, config(), world_size=2) as ranks:
        ranks.send(0, train_steps(segments(1, ("con",)), step=1, ranks=2)[0])
        ranks.send(1, train_steps(segments(1, ("pro",)), step=1, ranks=2)[1])
        failures = [ranks.receive_from_survivor() for _ in range(2)]
        assert all(isinstance(f, TrainerFailed) for f in failures)
        assert all("disagree about step 1" in f.message for f in failures)
        assert [wait_for_exit(c) for c in ranks.children] == [1, 1]


def test_faults_at_start_and_in_a_message_are_one_line(tiny_model: Path, tmp_path: Path) -> None:
    bad = config(lora={"targets": ["q_projection"]})
    with (
        pytest.raises(AssertionError, match="no projection 'q_projection'"),
        Ranks(tiny_model, tmp_path, bad, world_size=1),
    ):
        pass
    with Ranks(tiny_model, tmp_path, config(), world_size=1) as ranks:
        answer = ranks.ask(Send(request=5, version=PolicyVersion("pro", 0), timeout_s=1.0))
        assert isinstance(answer, TrainerFailed)
        assert answer.message == "pro@0 was not exported last (nothing was): export it first"
        assert wait_for_exit(ranks.children[0]) == 1


def test_a_rank_leaves_with_its_parent(tiny_model: Path, tmp_path: Path) -> None:
    with Ranks(tiny_model, tmp_path, config(), world_size=1) as ranks:
        ranks.children[0]._drop_lifeline()  # what the kernel does when the parent is killed
        assert wait_for_exit(ranks.children[0]) == 17
        assert not ranks.runtime.path.exists()
