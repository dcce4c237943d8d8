"""``selfplay bench learn-chat``: two LoRA agents of a real chat model learn Kuhn poker, through the whole stack.

As it comes the model mostly says no move, and after the warm start it plays far from equilibrium. One run, measured exactly;
it takes minutes on two cores.
"""

from __future__ import annotations

import statistics

from selfplay.bench.learning import Evaluation, train
from selfplay.bench.report import Row

LAST = 10
"""Evaluations whose mean is the figure."""
SETTINGS = (
    "env=kuhn-poker-v0", "model=smollm2-135m", "seats.player_0.options.history=last", "seats.player_1.options.history=last",
    "warm_start.steps=20", "warm_start.batch=24", "warm_start.episodes=64", "warm_start.lr=1e-4", "lora.rank=16",
    "lora.alpha=32", "lora.layers=15", "train.threads=2", "train.steps=36", "train.batch=320", "train.schedule=linear",
    "train.lr=1e-3", "train.betas=[0.9, 0.999]", "algorithm.loss=ppo", "algorithm.epochs=5", "algorithm.kl=0.5", "algorithm.reference=moving",
    "algorithm.reference_every=20", "algorithm.illegal_penalty=2.0", "rollout.concurrency=320", "rollout.max_tokens=4",
    "rollout.request_timeout_s=600", "buffer.depth=0", "policy.engine=transformers", "policy.max_num_seqs=320",
    "policy.threads=2", "eval.every=3", "checkpoint.every=20",
)  # fmt: skip
"""The same as configs/kuhn-smollm2.toml."""
QUICK = ("train.steps=1", "train.batch=8", "eval.every=1", "algorithm.epochs=1", "warm_start.steps=1")


def run(quick: bool) -> list[Row]:
    """Rows ``smollm2_nash_conv`` (as played, lower is better) and ``smollm2_illegal_share``."""
    found = train([*SETTINGS, *QUICK] if quick else SETTINGS, seed=0)
    return [
        _row("smollm2_nash_conv", [e.figures["nash_conv_as_played"] for e in found], "chips", found),
        _row("smollm2_illegal_share", [e.illegal_share for e in found], "share", found),
    ]


def _row(name: str, values: list[float], unit: str, found: list[Evaluation]) -> Row:
    last = values[-LAST:]
    told = f"mean of the last {len(last)} evaluations"
    if half := len(last) // 2:  # whether it still falls
        told += f" ({statistics.fmean(last[:half]):.3f} in their first half, {statistics.fmean(last[half:]):.3f} in the second)"
    told += f"; {values[0]:.3f} at step {found[0].step}, {values[-1]:.3f} at step {found[-1].step}"
    told += f" after {found[-1].elapsed_s / 60:.1f} minutes"
    return Row(name=name, value=statistics.fmean(last), unit=unit, reference=told, repeats=len(last))
