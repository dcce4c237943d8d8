"""``selfplay bench learn-kuhn``: does self-play find equilibrium? Kuhn poker from random weights, through the whole stack.

Three seeds each begin at a NashConv of about .92 (uniform play) and are measured exactly, in runs of 99,328 games and in runs of
three times as many. The figures are of the worst seed. It takes more than an hour on two cores.
"""

from __future__ import annotations

from collections.abc import Sequence

from selfplay.bench.learning import Outcome, outcome, row, train
from selfplay.bench.report import Row
from selfplay.config import load_config

SEEDS = (0, 1, 2)
SETTINGS = (
    "env=kuhn-poker-v0", "model=tiny", "warm_start.steps=300", "lora.rank=64", "lora.alpha=64", "train.steps=97",
    "train.batch=1024", "train.lr=1e-3", "train.schedule=linear", "algorithm.baseline_decay=0.99", "algorithm.loss=ppo",
    "algorithm.epochs=12", "algorithm.kl=0.5", "algorithm.reference=moving", "algorithm.reference_every=20",
    "algorithm.illegal_penalty=2.0", "rollout.concurrency=512", "policy.engine=transformers", "policy.max_num_seqs=1024",
    "eval.every=2", "checkpoint.every=12",
)  # fmt: skip
"""The same as configs/kuhn.toml: 99,328 games."""
QUICK = (
    "train.steps=6", "train.batch=32", "eval.every=2", "warm_start.steps=30", "warm_start.episodes=40", "algorithm.epochs=2",
)  # fmt: skip


def run(quick: bool) -> list[Row]:
    """Rows of runs within 100,000 games, ``average_nash_conv``, ``last_nash_conv`` (lower is better) and ``legal_mass``; then the same
    of runs three times as long, with ``_3x`` in their names."""
    if quick:
        found = train([*SETTINGS, *QUICK], SEEDS[0])
        first, last = outcome(found, found[-1].games / 3), outcome(found, found[-1].games)
        return [*_rows([first], SEEDS[:1], ""), *_rows([last], SEEDS[:1], "_3x")]
    steps = load_config(None, [*SETTINGS]).train.steps
    return [*_rows(_ends(SETTINGS), SEEDS, ""), *_rows(_ends([*SETTINGS, f"train.steps={3 * steps}"]), SEEDS, "_3x")]


def _ends(settings: Sequence[str]) -> list[Outcome]:
    """Where the run of each seed stood at its end."""
    return [outcome(found, found[-1].games) for found in (train(settings, seed) for seed in SEEDS)]


def _rows(found: list[Outcome], seeds: tuple[int, ...], suffix: str) -> list[Row]:
    what = (
        f"Kuhn poker, tiny, after {found[0].games} games in at most {max(f.elapsed_s for f in found) / 60:.1f} minutes"
    )
    return [
        row(f"average_nash_conv{suffix}", [f.average for f in found], "chips", seeds, f"{what}; uniform play 0.917"),
        row(
            f"last_nash_conv{suffix}",
            [f.last for f in found],
            "chips",
            seeds,
            f"{what}; median of the last evaluations",
        ),
        row(f"legal_mass{suffix}", [f.legal for f in found], "share", seeds, what, best=True),
    ]
