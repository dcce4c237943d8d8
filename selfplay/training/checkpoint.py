"""The trainer's part of a checkpoint: adapters, Adam moments, step counts and RNG, whole whatever the number of ranks.

Written with torch.distributed.checkpoint in safetensors form (no pickle), plus ``trainer.json`` that says what the
tensors belong to. All of it is the same on every rank, so rank 0 writes once the ranks have agreed, and any number of
ranks can read it back, bit for bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from selfplay.errors import StoreError, TrainerError
from selfplay.store.atomic import as_store_error, new_folder, store_errors, write_bytes
from selfplay.training.flat import Layout
from selfplay.training.trainer import Trainer

RECORD = "trainer.json"
FORMAT = 2
MAX_RECORD_BYTES = 1 << 20


class TrainerRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the tensors of a checkpoint are."""

    format: int
    step: int
    agents: list[str]
    lora_rank: dict[str, int]
    """0: every parameter of the model."""
    lora_scale: dict[str, float]
    layout: str
    """Digest of names and shapes of all agents' adapter matrices."""


def save(trainer: Trainer, folder: Path, agent: str = "") -> None:
    """Write the state, or that of one agent, into ``folder``, which must not exist; a collective: every rank returns when it is on disk.

    Raises `TrainerError` when the ranks' adapters are not bit-identical, `StoreError` when the disk refuses.
    """
    agents = _agents(trainer, agent)
    state = _state(trainer, agents)
    trainer.group.require_equal("their adapters", _fingerprints(trainer))
    if trainer.group.rank == 0:
        with new_folder(folder) as temp, _one_process():
            with _checkpoint_errors(folder):
                state_dict_saver.save(state, storage_writer=HuggingFaceStorageWriter(str(temp)), no_dist=True)
            write_bytes(temp / RECORD, msgspec.json.encode(_record(trainer, agents)))
    trainer.group.barrier()


@contextlib.contextmanager
def _checkpoint_errors(folder: Path) -> Iterator[None]:
    """What torch met on the disk as a `StoreError`. Its own error is no `Exception` and would end a rank without a word."""
    try:
        with store_errors(folder):
            yield
    except CheckpointException as e:
        cause, _ = next(iter(e.failures.values()))
        if isinstance(cause, OSError):
            raise as_store_error(folder, cause) from e
        told = (str(cause).splitlines() or [""])[0]
        raise StoreError(f"checkpoint {folder} cannot be written or read: {type(cause).__name__}: {told}") from e


def load(trainer: Trainer, folder: Path, agent: str = "") -> None:
    """Take the state, or that of one agent, over from ``folder``; raises `StoreError` or `TrainerError` saying what does not fit."""
    agents = _agents(trainer, agent)
    record = _read_record(folder)
    expected = _record(trainer, agents)
    for field, remedy in (
        ("agents", "seats"),
        ("lora_rank", "lora.rank or train.parameters"),
        ("lora_scale", "lora.alpha or lora.rslora"),
        ("layout", "model or lora.targets"),
    ):
        saved, now = getattr(record, field), getattr(expected, field)
        if saved != now:
            raise TrainerError(f"checkpoint {folder} has {field} {saved}, this run has {now}: {remedy} changed")
    state = {name: torch.empty_like(tensor) for name, tensor in _state(trainer, agents).items()}
    with _one_process(), _checkpoint_errors(folder):
        state_dict_loader.load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    _apply(trainer, agents, state)
    if not agent:
        torch.set_rng_state(state["rng"])
        trainer.num_steps = record.step


def _agents(trainer: Trainer, agent: str) -> list[str]:
    """All agents, sorted, or the one that is named."""
    if agent and agent not in trainer.optimizers:
        raise TrainerError(f"there is no agent {agent!r} here: they are {', '.join(sorted(trainer.optimizers))}")
    return [agent] if agent else sorted(trainer.optimizers)


def _state(trainer: Trainer, agents: Sequence[str]) -> dict[str, Tensor]:
    """Name → tensor on the host; agent names hold no dot, so names are unambiguous."""
    out: dict[str, Tensor] = {"rng": torch.get_rng_state()}
    for agent in agents:
        optimizer = trainer.optimizers[agent]
        exp_avg, exp_avg_sq, *counts = optimizer.state()
        out[f"{agent}.flat"] = optimizer.flat.detach().cpu()
        out[f"{agent}.exp_avg"], out[f"{agent}.exp_avg_sq"] = exp_avg.cpu(), exp_avg_sq.cpu()
        out[f"{agent}.counts"] = torch.tensor(counts)
        out[f"{agent}.reference"] = trainer.references.get(agent, optimizer.flat).detach().cpu().clone()
    return out


@torch.no_grad()
def _apply(trainer: Trainer, agents: Sequence[str], state: dict[str, Tensor]) -> None:
    for agent in agents:
        optimizer = trainer.optimizers[agent]
        optimizer.flat.copy_(state[f"{agent}.flat"])
        exp_avg, exp_avg_sq = (state[f"{agent}.{name}"].to(optimizer.flat.device) for name in ("exp_avg", "exp_avg_sq"))
        num_steps, num_updates = state[f"{agent}.counts"].tolist()
        optimizer.restore(exp_avg, exp_avg_sq, num_steps, num_updates)
        trainer.references[agent] = state[f"{agent}.reference"].to(optimizer.flat.device)


def _record(trainer: Trainer, agents: Sequence[str]) -> TrainerRecord:
    layouts = {agent: trainer.policy.adapters[agent].layout for agent in agents}
    return TrainerRecord(
        format=FORMAT, step=trainer.num_steps, agents=list(agents),
        lora_rank={a: layout.rank for a, layout in layouts.items()},
        lora_scale={a: layout.scale for a, layout in layouts.items()}, layout=_layout_digest(layouts.values()),
    )  # fmt: skip


def _read_record(folder: Path) -> TrainerRecord:
    path = folder / RECORD
    with store_errors(path):
        if path.stat().st_size > MAX_RECORD_BYTES:
            raise StoreError(f"{path} is larger than {MAX_RECORD_BYTES} bytes")
        data = path.read_bytes()
    try:
        record = msgspec.json.decode(data, type=TrainerRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise StoreError(f"{path} is damaged: {e}") from None
    if record.format != FORMAT:
        raise StoreError(f"{path} has layout {record.format}, this selfplay reads {FORMAT}")
    return record


def _layout_digest(layouts: Iterable[Layout]) -> str:
    shapes = [list(zip(layout.names, layout.shapes, strict=True)) for layout in layouts]
    return hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]


def _fingerprints(trainer: Trainer) -> Tensor:
    """crc32 of each agent's adapter, agents in sorted order."""
    flats = [trainer.optimizers[agent].flat for agent in sorted(trainer.optimizers)]
    return torch.tensor([zlib.crc32(f.detach().cpu().numpy().tobytes()) for f in flats], device=trainer.group.device)


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """Reading and writing alone is meant, so torch need not warn of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
