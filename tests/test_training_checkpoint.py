"""Saving and going on, and steps that leave other agents alone: bit for bit, on one rank."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from selfplay.errors import StoreError, TrainerError
from selfplay.scoring import agents_with_signal
from selfplay.scoring.segments import segment_ages
from selfplay.training import checkpoint
from selfplay.training.service import start_trainer
from selfplay.training.trainer import Trainer
from selfplay.wire.messages import TrainStep
from training_site import config, rank_config, segments, train_steps

State = dict[str, torch.Tensor]


def fresh(model: Path, place: Path, folder: str = "", seed: int = 7, **sections: object) -> Trainer:
    return start_trainer(rank_config(model, place, config(seed=seed, **sections), checkpoint=folder))[0]


def run(trainer: Trainer, steps: range) -> None:
    """Every third step has segments of one agent only, so that step counts differ between agents."""
    for step in steps:
        agents = ("pro",) if step % 3 == 0 else ("con", "pro")
        trainer.step(train_steps(segments(step, agents), step=step)[0])


def state(trainer: Trainer) -> State:
    out: State = {}
    for agent, optimizer in trainer.optimizers.items():
        exp_avg, exp_avg_sq, *counts = optimizer.state()
        for name, tensor in (("flat", optimizer.flat), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
            out[f"{agent}.{name}"] = tensor.detach().clone()
        out[f"{agent}.counts"] = torch.tensor(counts)
    return out


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_three_and_three_steps_are_six(tiny_model: Path, tmp_path: Path) -> None:
    straight, first = fresh(tiny_model, tmp_path), fresh(tiny_model, tmp_path)
    run(straight, range(6))
    run(first, range(3))
    checkpoint.save(first, tmp_path / "3")
    second = fresh(tiny_model, tmp_path, str(tmp_path / "3"), seed=99)
    assert second.num_steps == 3
    assert same(state(second), state(first))
    run(second, range(3, 6))
    assert same(state(second), state(straight))
    assert second.num_steps == 6


def test_epochs_schedule_and_moving_reference_survive(tiny_model: Path, tmp_path: Path) -> None:
    """The reference is renewed every two steps, so one of the agents is between two renewals when it is saved."""
    settings = {
        "algorithm": {"loss": "ppo", "epochs": 2, "kl": 0.3, "reference": "moving", "reference_every": 2},
        "train": {"schedule": "cosine", "warmup_steps": 1, "steps": 6},
    }
    straight, first = (fresh(tiny_model, tmp_path, **settings) for _ in range(2))
    run(straight, range(6))
    run(first, range(3))
    checkpoint.save(first, tmp_path / "3")
    second = fresh(tiny_model, tmp_path, str(tmp_path / "3"), seed=99, **settings)
    assert same(second.references, first.references)
    run(second, range(3, 6))
    assert same(state(second), state(straight))
    assert same(second.references, straight.references)


def test_the_random_state_comes_back(tiny_model: Path, tmp_path: Path) -> None:
    trainer = fresh(tiny_model, tmp_path)
    torch.manual_seed(123)
    checkpoint.save(trainer, tmp_path / "0")
    expected = torch.rand(3)
    fresh(tiny_model, tmp_path, str(tmp_path / "0"))
    assert torch.equal(torch.rand(3), expected)


def test_a_checkpoint_holds_no_pickle_and_is_whole_or_not_there(tiny_model: Path, tmp_path: Path) -> None:
    checkpoint.save(fresh(tiny_model, tmp_path), tmp_path / "at" / "0")
    assert {p.suffix for p in (tmp_path / "at" / "0").iterdir()} == {".json", ".safetensors"}
    assert [p.name for p in (tmp_path / "at").iterdir()] == ["0"]
    (tmp_path / "blocked").write_text("")
    with pytest.raises(StoreError, match="blocked"):
        checkpoint.save(fresh(tiny_model, tmp_path), tmp_path / "blocked" / "0")


def test_a_disk_that_takes_no_more_is_a_store_error(tiny_model: Path, tmp_path: Path) -> None:
    trainer = fresh(tiny_model, tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(StoreError, match=r"cannot write or read .*at/0: File too large"):
            checkpoint.save(trainer, tmp_path / "at" / "0")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "at" / "0").exists()


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"lora": {"rank": 4}}, r"lora_rank \{'con': 8, 'pro': 8\}, this run has \{'con': 4"),
        ({"lora": {"alpha": 3.0}}, "lora.alpha"),
        ({"lora": {"targets": ["q_proj"]}}, "layout"),
    ],
)
def test_a_changed_config_is_refused_by_name(
    tiny_model: Path, tmp_path: Path, sections: dict[str, object], words: str
) -> None:
    checkpoint.save(fresh(tiny_model, tmp_path), tmp_path / "0")
    with pytest.raises(TrainerError, match=words):
        fresh(tiny_model, tmp_path, str(tmp_path / "0"), **sections)


def test_a_damaged_checkpoint_is_a_store_error(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "0"
    checkpoint.save(fresh(tiny_model, tmp_path), folder)
    (weights,) = folder.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(StoreError, match="cannot be written or read"):
        fresh(tiny_model, tmp_path, str(folder))
    record = json.loads((folder / checkpoint.RECORD).read_text())
    (folder / checkpoint.RECORD).write_text(json.dumps(record | {"surprise": 1}))
    with pytest.raises(StoreError, match="damaged"):
        fresh(tiny_model, tmp_path, str(folder))
    with pytest.raises(StoreError, match="nowhere"):
        fresh(tiny_model, tmp_path, str(tmp_path / "nowhere"))


def test_an_agent_outside_the_step_stays_bit_identical(tiny_model: Path, tmp_path: Path) -> None:
    trainer = fresh(tiny_model, tmp_path)
    run(trainer, range(1, 3))
    before = state(trainer)
    reports = trainer.step(train_steps(segments(9, ("pro",)), step=9)[0])
    after = state(trainer)
    assert set(reports) == {"pro"}
    assert reports["pro"].moved
    for name in before:
        assert torch.equal(before[name], after[name]) == name.startswith("con."), name


def with_advantage(message: TrainStep, agent: str, value: float) -> TrainStep:
    """The same step with ``value`` as advantage of all tokens of one agent."""
    micro_batches = tuple(
        tuple(replace(s, advantages=(value,) * len(s.ids)) if s.agent == agent else s for s in m)
        for m in message.micro_batches
    )
    return replace(message, micro_batches=micro_batches)


def test_an_agent_without_signal_stays_bit_identical(tiny_model: Path, tmp_path: Path) -> None:
    trainer = fresh(tiny_model, tmp_path)
    run(trainer, range(1, 3))
    before = state(trainer)
    (message,) = train_steps(segments(9, ("con",)), step=9)
    reports = trainer.step(with_advantage(message, "con", 0.0))
    assert not reports["con"].moved
    assert same(before, state(trainer))


def test_equal_rewards_beside_others_are_pulled_to_the_reference_and_alone_are_left_out(
    tiny_model: Path, tmp_path: Path
) -> None:
    """With a KL, segments without any advantage still have a gradient: whoever has no others is not in the step at all."""
    trainer = fresh(tiny_model, tmp_path, algorithm={"kl": 0.1})
    run(trainer, range(1, 3))
    chosen = [replace(s, advantages=(0.0,) * len(s.ids)) for s in segments(9)]
    assert agents_with_signal(chosen) == ()
    assert all(ages.silent_share == 1.0 for ages in segment_ages(chosen, {"con": 0, "pro": 0}).values())
    (message,) = train_steps(chosen, step=9)
    assert all(report.moved and report.grad_norm > 0 for report in trainer.step(message).values())


def test_a_gradient_that_is_not_finite_changes_nobody(tiny_model: Path, tmp_path: Path) -> None:
    trainer = fresh(tiny_model, tmp_path)
    run(trainer, range(1, 2))
    before = state(trainer)
    (message,) = train_steps(segments(9), step=9)
    with pytest.raises(TrainerError, match="agent pro at step 9 is not finite"):
        trainer.step(with_advantage(message, "pro", float("nan")))
    assert same(before, state(trainer))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"agents": ("pro", "con")}, "not a sorted list"),
        ({"agents": ()}, "not a sorted list"),
        ({"agents": ("con",)}, r"segments of \['pro'\]"),
        ({"agents": ("con", "judge", "pro")}, r"\['judge'\] are not trained here"),
        ({"num_actions": {"con": 3}}, "at least one per agent"),
    ],
)
def test_a_step_that_does_not_add_up_is_refused(
    tiny_model: Path, tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    (message,) = train_steps(segments(1), step=5)
    with pytest.raises(TrainerError, match=f"step 5: .*{words}"):
        fresh(tiny_model, tmp_path).step(replace(message, **changes))


def test_reports_are_of_the_policy_before_the_update(tiny_model: Path, tmp_path: Path) -> None:
    """Segments whose logprobs are the trainer's own: ratio 1, no KL, all of the effective sample."""
    trainer = fresh(tiny_model, tmp_path)
    (message,) = train_steps(segments(1, ("pro",)), step=1)
    own = tuple(
        tuple(replace(s, logprobs=(0.0, *trainer.policy.probe("pro", s.ids))) for s in m) for m in message.micro_batches
    )
    report = trainer.step(replace(message, micro_batches=own))["pro"]
    assert report.max_abs_dlogp < 1e-4
    assert report.kl == pytest.approx(0.0, abs=1e-6)
    assert report.ess == pytest.approx(1.0, abs=1e-4)
    assert report.clip_fraction == 0.0
    assert 0.0 < report.entropy < 5.7
    assert report.num_actions == message.num_actions["pro"]
