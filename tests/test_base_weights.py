"""A hundred syncs leave the weights that all agents share as they were, bit for bit: in the trainer that sends, and in an engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch
from tests.base_digest import base_digest
from tests.policy_samples import adapter_config, random_adapter

from selfplay.agent import Sampling
from selfplay.policy import PolicyServerConfig
from selfplay.policy.transformers_engine import TransformersEngine
from selfplay.store.adapters import AdapterStore
from selfplay.sync import make_receiver, save_adapter, verify
from selfplay.training.export import Exporter
from selfplay.training.service import start_trainer
from selfplay.types import PolicyVersion
from selfplay.wire.messages import Export, Send
from training_site import config, rank_config, segments, train_steps

NUM_SYNCS = 100


def test_in_the_trainer_that_steps_and_sends(tiny_model: Path, tmp_path: Path) -> None:
    trainer, _ = start_trainer(rank_config(tiny_model, tmp_path, config()))
    exporter = Exporter(trainer.policy, "float32")
    receiver = make_receiver("shm", address="", rank=1, world_size=2, timeout_s=60.0)
    before, sent = base_digest(trainer.policy.base), set()
    for number in range(NUM_SYNCS):
        trainer.step(train_steps(segments(number, ("pro",), each=1), step=number)[0])
        version, address = PolicyVersion("pro", number), str(tmp_path / "bucket")
        exported = exporter.export(
            Export(request=1, version=version, folder=str(tmp_path / "adapters"), transport="shm", address=address)
        )
        exporter.send(Send(request=2, version=version, timeout_s=60.0))
        verify(exported.header, receiver.receive(exported.header, 60.0))
        sent.add(exported.header.crc32)
    receiver.close()
    assert len(sent) == NUM_SYNCS, "every version was another"
    assert base_digest(trainer.policy.base) == before


def test_in_an_engine_that_takes_them(tiny_model: Path, tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    for seed in (0, 1):
        tensors = random_adapter(str(tiny_model), seed)
        store.publish(
            PolicyVersion("pro", seed), lambda f, t=tensors: save_adapter(f, t, adapter_config()), parent=None
        )  # type: ignore[misc]

    async def run() -> None:
        settings = PolicyServerConfig(address="", runtime_dir=str(tmp_path), model=str(tiny_model), dtype="bfloat16")
        engine = TransformersEngine(settings)
        await engine.start()
        try:
            before, said = base_digest(engine._model), set[tuple[int, tuple[int, ...]]]()
            for n in range(NUM_SYNCS):
                name = f"version-{n}"
                await engine.begin_install(name, store.bucket_header(PolicyVersion("pro", n % 2)))
                await engine.commit_install(name, 60.0)
                sampled = await engine.generate(
                    name, list(range(60, 80)), Sampling(temperature=0.0, max_tokens=2), (), name
                )
                said.add((n % 2, sampled.ids))
                await engine.drop(name)
            assert len(said) == 2
            assert base_digest(engine._model) == before
            next(engine._model.parameters()).view(torch.uint8).flatten()[0] ^= 1
            assert base_digest(engine._model) != before, "and a single bit would have shown"
        finally:
            await engine.close()

    asyncio.run(run())
