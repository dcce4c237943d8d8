"""Supervised learning of a whole base model on segments: what it takes to bring a format to a model that has none.

In: a model folder and segments whose actions are what it should say. Out: another model folder with every weight trained.
Rows are packed as in training by play, but here no adapter is involved and the head learns, too.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from selfplay.config.schema import WarmStartConfig
from selfplay.errors import TrainerError
from selfplay.scoring.packing import plan_micro_batches
from selfplay.store.atomic import new_folder
from selfplay.training import attention
from selfplay.training.rows import PackedRow, pack_row
from selfplay.types import Segment

CLIP_NORM = 1.0
WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json")


class FitReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the learning did: nats per answer token, means over the first and the last tenth of the steps."""

    steps: int
    sequences: int
    first_loss: float
    last_loss: float


def fit(
    source: Path, target: Path, segments: Sequence[Segment], config: WarmStartConfig, *, seed: int, max_tokens: int,
    say: Callable[[str], None], complete: Callable[[Path, FitReport], None],
) -> FitReport:  # fmt: skip
    """Train ``source`` on ``segments`` and write the result as ``target``, which must not exist.

    ``complete`` may add files to the folder before it is seen under its name: it is there with all of them or not at all.

    The weights are float32 while they are trained and keep the dtype that they were stored in. Raises `TrainerError` when
    there is nothing to learn from or the loss is not finite, `StoreError` when ``target`` cannot be written.
    """
    if not any(s.num_actions for s in segments):
        raise TrainerError("the scripted players said nothing: there is nothing to learn from")
    model = _load(source)
    stored = model.config.dtype or torch.float32
    model.float()
    losses = _train(model, segments, config, random.Random(seed), max_tokens, say)
    tenth = max(1, len(losses) // 10)
    first, last = (sum(part) / len(part) for part in (losses[:tenth], losses[-tenth:]))
    report = FitReport(steps=len(losses), sequences=len(segments), first_loss=first, last_loss=last)
    with new_folder(target) as temp:
        model.to(stored).save_pretrained(temp)
        complete(temp, report)
        _copy_the_rest(source, temp)
    return report


def _load(source: Path) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    attention.register()
    return AutoModelForCausalLM.from_pretrained(
        source, dtype="auto", attn_implementation=attention.NAME, local_files_only=True, use_safetensors=True
    )


def _train(
    model: Any, segments: Sequence[Segment], config: WarmStartConfig, rng: random.Random, max_tokens: int,
    say: Callable[[str], None],
) -> list[float]:  # fmt: skip
    """Loss of each step, nats per answer token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.0)
    losses = []
    for step in range(config.steps):
        batch = [segments[rng.randrange(len(segments))] for _ in range(config.batch)]
        losses.append(_step(model, batch, max_tokens))
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        for group in optimizer.param_groups:
            group["lr"] = config.lr * (1.0 - step / config.steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % max(1, config.steps // 5) == 0:
            say(f"warm start: step {step}/{config.steps}, {losses[-1]:.3f} nats per token")
    return losses


def _step(model: Any, batch: Sequence[Segment], max_tokens: int) -> float:
    """Gradient of one batch; its loss."""
    (rows,) = plan_micro_batches(batch, ranks=1, max_tokens=max_tokens)
    num, total = sum(s.num_actions for s in batch), 0.0
    for segments in rows:
        loss = _loss(model, pack_row(segments, torch.device("cpu"))) / num
        if not torch.isfinite(loss):
            raise TrainerError(f"the loss of the warm start is {loss.item()}: lower warm_start.lr")
        loss.backward()
        total += loss.item()
    return total


def _loss(model: Any, row: PackedRow) -> Tensor:
    """Summed negative log-likelihood of the row's samples."""
    hidden = model.base_model(
        input_ids=row.ids, position_ids=row.positions, use_cache=False, chains=row.chains
    ).last_hidden_state[0]
    logits = model.get_output_embeddings()(hidden[row.predicted_from])
    found: Tensor = torch.nn.functional.cross_entropy(logits[row.picks], row.targets[row.picks], reduction="sum")
    return found


def _copy_the_rest(source: Path, target: Path) -> None:
    """Tokenizer, template and generation settings as they are; weights and config.json were just written."""
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith(WEIGHT_SUFFIXES) and not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)
