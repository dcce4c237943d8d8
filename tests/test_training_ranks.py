"""Real rank processes over real sockets and gloo: two ranks are one trainer, and a fault of one ends the other."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from selfplay.store.adapters import AdapterStore
from selfplay.training import checkpoint
from selfplay.training.service import start_trainer
from selfplay.training.trainer import Trainer
from selfplay.types import PolicyVersion, Segment
from selfplay.wire.messages import (
    AgentReport,
    Export,
    Exported,
    Save,
    Send,
    Sent,
    StepDone,
    TrainerDone,
    TrainerFailed,
    TrainerProbe,
    TrainerProbed,
)
from training_site import AGENTS, Ranks, config, rank_config, segments, train_steps, wait_for_exit

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
        name = PolicyVersion(agent, version)
        message = Export(
            request=50, version=name, folder=str(root), transport="file", address=str(root.parent / "bucket")
        )
        assert isinstance(ranks.ask(message), Exported)
        assert isinstance(ranks.ask(Send(request=51, version=name, timeout_s=10.0)), Sent)
    return {a: load_file(store.path(PolicyVersion(a, version)) / "adapter_model.safetensors") for a in AGENTS}


def copy_of(trainer: Trainer) -> Weights:
    return {a: {n: t.clone() for n, t in adapter.tensors().items()} for a, adapter in trainer.policy.adapters.items()}


def distance(found: Weights, expected: Weights) -> float:
    """Largest relative difference of a matrix; the B of a fresh adapter is zero and must be met exactly."""
    pairs = [(found[a][n], e) for a in AGENTS for n, e in expected[a].items()]
    return max(float((f - e).norm() / e.norm().clamp(min=1e-12)) for f, e in pairs)


class OneRank(NamedTuple):
    """The same six steps on one rank, in this process."""

    reports: list[dict[str, AgentReport]]
    weights: list[Weights]
    """Before step 1, after step 1, …, after step 6."""
    checkpoint: Path
    """Saved after step 3."""


@pytest.fixture(scope="module")
def one_rank(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> OneRank:
    place = tmp_path_factory.mktemp("one")
    trainer, _ = start_trainer(rank_config(tiny_model, place, config()))
    reports, states = [], [copy_of(trainer)]
    for step in range(1, 7):
        reports.append(trainer.step(train_steps(batch(step), step=step)[0]))
        states.append(copy_of(trainer))
        if step == 3:
            checkpoint.save(trainer, place / "3")
    return OneRank(reports, states, place / "3")


def assert_alike(ours: list[dict[str, AgentReport]], theirs: list[dict[str, AgentReport]]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for agent in one:
            assert one[agent].num_actions == other[agent].num_actions
            for figure in ("loss", "grad_norm", "kl", "max_abs_dlogp", "ess", "entropy"):
                expected = getattr(other[agent], figure)
                assert getattr(one[agent], figure) == pytest.approx(expected, rel=1e-3, abs=1e-5), figure


def test_two_whole_ranks_are_one_and_refuse_to_disagree(tiny_model: Path, tmp_path: Path, one_rank: OneRank) -> None:
    """The last part: gradients of different agents, equal in size, would be added up without a sign."""
    with Ranks(tiny_model, tmp_path, config(train={"shard": "none"}), world_size=2) as ranks:
        assert [ranks.hellos[r].step for r in (0, 1)] == [0, 0]
        assert distance(weights(ranks, tmp_path / "adapters", 0), one_rank.weights[0]) == 0.0
        reports = train(ranks, range(1, 5))
        found = weights(ranks, tmp_path / "adapters", 1)
        probes = ranks.everyone(TrainerProbe(request=60, agent="pro", ids=IDS))
        ranks.send(0, train_steps(segments(5, ("con",)), step=5, ranks=2)[0])
        ranks.send(1, train_steps(segments(5, ("pro",)), step=5, ranks=2)[1])
        failures = [ranks.receive_from_survivor() for _ in range(2)]
        assert [wait_for_exit(c) for c in ranks.children] == [1, 1]
    assert distance(found, one_rank.weights[4]) <= TOLERANCE < 0.01 < distance(found, one_rank.weights[3])
    assert_alike(reports, one_rank.reports[:4])
    assert [len(p.logprobs) for p in probes if isinstance(p, TrainerProbed)] == [len(IDS) - 1, 0]
    assert all(isinstance(f, TrainerFailed) and "disagree about step 5" in f.message for f in failures)


def test_two_sharded_ranks_go_on_from_one_and_one_from_two(tiny_model: Path, tmp_path: Path, one_rank: OneRank) -> None:
    """A checkpoint of one rank read by two, trained on with the base sharded, saved, and read by one: bit for bit."""
    settings, saved = config(train={"shard": "base"}), tmp_path / "6"
    with Ranks(tiny_model, tmp_path, settings, world_size=2, checkpoint=str(one_rank.checkpoint)) as ranks:
        assert [ranks.hellos[r].step for r in (0, 1)] == [3, 3]
        loaded = weights(ranks, tmp_path / "adapters", 3)
        reports = train(ranks, range(4, 7))
        found = weights(ranks, tmp_path / "adapters", 6)
        answers = ranks.everyone(Save(request=7, folder=str(saved)))
        probes = ranks.everyone(TrainerProbe(request=60, agent="pro", ids=IDS))
        assert ranks.stop() == [0, 0]
    assert distance(loaded, one_rank.weights[3]) == 0.0
    assert distance(found, one_rank.weights[6]) <= TOLERANCE < 0.01 < distance(found, one_rank.weights[5])
    assert_alike(reports, one_rank.reports[3:])
    assert [a.rank for a in answers if isinstance(a, TrainerDone)] == [0, 1]
    back, _ = start_trainer(rank_config(tiny_model, tmp_path, config(), checkpoint=str(saved)))
    assert back.num_steps == 6
    assert distance(copy_of(back), found) == 0.0
    assert isinstance(probes[0], TrainerProbed)
    assert list(probes[0].logprobs) == pytest.approx(back.policy.probe("pro", IDS), abs=1e-5)


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


def test_a_rank_that_hangs_ends_the_other_by_the_clock_and_leaves_with_its_parent(
    tiny_model: Path, tmp_path: Path
) -> None:
    with Ranks(tiny_model, tmp_path, config(train={"timeout_s": 5.0}), world_size=2) as ranks:
        os.kill(ranks.children[1].pid, signal.SIGSTOP)
        ranks.send(0, train_steps(batch(2), step=2, ranks=2, request=2)[0])
        assert isinstance(ranks.receive_from_survivor(), TrainerFailed)
        assert wait_for_exit(ranks.children[0]) == 1
        os.kill(ranks.children[1].pid, signal.SIGCONT)
        ranks.children[1]._drop_lifeline()  # what the kernel does when the parent is killed
        assert wait_for_exit(ranks.children[1]) == 17
        assert not ranks.runtime.path.exists()


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
