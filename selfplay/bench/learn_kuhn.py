"""``selfplay bench learn-kuhn``: does self-play find equilibrium, and stay there? Kuhn poker from random weights, through the stack.

Three seeds each begin at a NashConv of about .92 (uniform play). One run per seed, measured exactly: where it stands within 100,000
games, and, at the floor of its learning rate, after three times as many steps. The figures are of the worst seed.
"""

from __future__ import annotations

from selfplay.bench.learning import Outcome, outcome, row, train
from selfplay.bench.report import Row

SEEDS = (0, 1, 2)
WITHIN = 100_000
"""Games of the first rows."""
SETTINGS = (
    "env=kuhn-poker-v0", "model=tiny", "seats.player_0.options.history=last", "seats.player_0.options.rules=none",
    "seats.player_1.options.history=last", "seats.player_1.options.rules=none", "warm_start.steps=300", "lora.rank=64",
    "lora.alpha=64", "train.steps=291", "train.batch=1024", "train.lr=1e-3", "train.schedule=linear", "train.decay_steps=97",
    "train.final_lr_share=0.02", "buffer.depth=0", "algorithm.baseline_decay=0.99", "algorithm.loss=ppo", "algorithm.epochs=12", "algorithm.kl=0.5",
    "algorithm.reference=moving", "algorithm.reference_every=20", "algorithm.illegal_penalty=2.0", "rollout.concurrency=512",
    "policy.engine=transformers", "policy.max_num_seqs=1024", "eval.every=2", "checkpoint.every=12",
)  # fmt: skip
"""configs/kuhn.toml, three times as long."""
QUICK = (
    "train.steps=6", "train.batch=32", "eval.every=2", "warm_start.steps=30", "warm_start.episodes=40", "algorithm.epochs=2",
)  # fmt: skip


def run(quick: bool) -> list[Row]:
    """Rows of the runs within 100,000 games, ``average_nash_conv``, ``last_nash_conv`` (lower is better) and ``legal_mass``; then, with
    ``_3x`` in their names, of the same runs at their end."""
    seeds, settings = (SEEDS[:1], [*SETTINGS, *QUICK]) if quick else (SEEDS, [*SETTINGS])
    runs = [train(settings, seed) for seed in seeds]
    first = [outcome(found, found[-1].games / 3 if quick else WITHIN) for found in runs]
    return [*_rows(first, seeds, ""), *_rows([outcome(found, found[-1].games) for found in runs], seeds, "_3x")]


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
