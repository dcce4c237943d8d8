"""Versions that leave the trainer: into the store as PEFT adapters, into a bucket for the engines, and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from selfplay.errors import TrainerError
from selfplay.store.adapters import AdapterStore
from selfplay.sync import make_receiver, unpack, verify
from selfplay.training.export import Exporter
from selfplay.training.service import start_trainer
from selfplay.training.trainer import Trainer
from selfplay.types import PolicyVersion
from selfplay.wire.messages import Export, Exported, JoinWeights, Send
from test_training_gradients import trainer_of
from training_site import config, rank_config, segments, train_steps

IDS = [72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100]


def trained(model: Path, place: Path) -> Trainer:
    trainer = trainer_of(model, place, config())
    for step in (1, 2):
        trainer.step(train_steps(segments(step), step=step)[0])
    return trainer


def export(trainer: Trainer, place: Path, version: PolicyVersion, **changes: str) -> tuple[Exporter, Exported]:
    exporter = Exporter(trainer.policy, "float32")
    message = {"transport": "file", "address": str(place / "bucket")} | changes
    return exporter, exporter.export(Export(request=1, version=version, folder=str(place / "adapters"), **message))  # type: ignore[arg-type]


def test_peft_loads_it_unchanged_and_gives_the_same_logprobs(tiny_model: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    trainer, version = trained(tiny_model, tmp_path), PolicyVersion("pro", 0)
    exporter, _ = export(trainer, tmp_path, version)
    sent = exporter.send(Send(request=2, version=version, timeout_s=5.0))
    store = AdapterStore(tmp_path / "adapters")
    assert store.verify(version).digest == sent.digest
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        bare = torch.log_softmax(base(torch.tensor([IDS])).logits[0, :-1], -1)
        policy = PeftModel.from_pretrained(base, str(store.path(version)))
        logs = torch.log_softmax(policy(torch.tensor([IDS])).logits[0, :-1], -1)
    at = (torch.arange(len(IDS) - 1), torch.tensor(IDS[1:]))
    assert trainer.policy.probe("pro", IDS) == pytest.approx(logs[at].tolist(), abs=2e-5)
    assert float((logs[at] - bare[at]).abs().max()) > 1e-3


def test_the_sent_bucket_holds_the_same_tensors(tiny_model: Path, tmp_path: Path) -> None:
    trainer, version = trained(tiny_model, tmp_path), PolicyVersion("con", 3)
    exporter, exported = export(trainer, tmp_path, version)
    exporter.send(Send(request=2, version=version, timeout_s=5.0))
    receiver = make_receiver("file", address="", rank=1, world_size=2, timeout_s=5.0)
    data = receiver.receive(exported.header, 5.0)
    verify(exported.header, data)
    received = unpack(exported.header, data)
    ours = trainer.policy.adapters["con"].tensors()
    assert received.keys() == ours.keys()
    assert all(torch.equal(received[n], ours[n]) for n in ours)
    exporter.close()


def test_a_bucket_is_a_snapshot_that_later_steps_do_not_touch(tiny_model: Path, tmp_path: Path) -> None:
    trainer, version = trained(tiny_model, tmp_path), PolicyVersion("pro", 0)
    exporter, exported = export(trainer, tmp_path, version)
    before = {n: t.clone() for n, t in trainer.policy.adapters["pro"].tensors().items()}
    trainer.step(train_steps(segments(3), step=3)[0])
    exporter.send(Send(request=2, version=version, timeout_s=5.0))
    data = make_receiver("file", address="", rank=1, world_size=2, timeout_s=5.0).receive(exported.header, 5.0)
    verify(exported.header, data)
    assert all(torch.equal(t, before[n]) for n, t in unpack(exported.header, data).items())
    exporter.close()


def test_a_run_starts_from_stored_versions_bit_for_bit(tiny_model: Path, tmp_path: Path) -> None:
    trainer = trained(tiny_model, tmp_path)
    exporter, _ = export(trainer, tmp_path, PolicyVersion("pro", 4))
    exporter.close()
    again, _ = start_trainer(rank_config(tiny_model, tmp_path, config(seed=99), versions={"pro": 4, "con": 0}))
    assert torch.equal(again.policy.adapters["pro"].flat, trainer.policy.adapters["pro"].flat)
    assert not torch.equal(again.policy.adapters["con"].flat, trainer.policy.adapters["con"].flat)


def test_a_version_that_is_not_stored_is_named(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="cannot start from pro@4"):
        start_trainer(rank_config(tiny_model, tmp_path, config(), versions={"pro": 4}))


def test_what_cannot_be_sent_is_refused_in_words(tiny_model: Path, tmp_path: Path) -> None:
    trainer = trainer_of(tiny_model, tmp_path, config())
    with pytest.raises(TrainerError, match="judge@0 cannot be exported: agents here are con, pro"):
        export(trainer, tmp_path, PolicyVersion("judge", 0))
    exporter, _ = export(trainer, tmp_path, PolicyVersion("pro", 0), transport="gloo")
    with pytest.raises(TrainerError, match="pro@1 was not exported last"):
        exporter.send(Send(request=2, version=PolicyVersion("pro", 1), timeout_s=1.0))
    with pytest.raises(TrainerError, match="weights group was not joined"):
        exporter.send(Send(request=2, version=PolicyVersion("pro", 0), timeout_s=1.0))
    with pytest.raises(TrainerError, match="rank 0 of the weights group, not 1"):
        exporter.join(JoinWeights(request=3, transport="gloo", address="", rank=1, world_size=2, timeout_s=1.0))
