"""``selfplay bench dynamics``: what makes self-play converge, and what does not, by many short runs on a game with a known answer.

Kuhn poker; the policy is a table, the losses are those of the trainer, evaluation is exact (`training.table`). Each row is one
way to train, over several seeds; its ratio compares its average policy with that of the first row. What holds here need not
hold for language models; what fails here has no reason to work there.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from typing import Any

import msgspec

from selfplay.bench.report import Row
from selfplay.config.schema import AlgorithmConfig
from selfplay.evaluation import build_tree

SEEDS = tuple(range(5))
PLAIN: dict[str, Any] = {
    "loss": "ppo", "epochs": 6, "kl": 0.5, "reference": "moving", "reference_every": 20, "baseline_decay": 0.95,
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """What is different from the first row, and how it is told."""

    name: str
    about: str
    algorithm: tuple[tuple[str, Any], ...] = ()
    run: tuple[tuple[str, Any], ...] = ()


VARIANTS = (
    Variant("plain", "role-conditioned, clipped, KL .5 to a reference renewed every 20 steps, one step old"),
    Variant("no_baseline", "rewards themselves as advantages", run=(("baseline", False),)),
    Variant("linear", "the learning rate falls to 0", run=(("linear", True),)),
    Variant("twelve_epochs", "12 updates per batch, learning rate falls to 0", (("epochs", 12),), (("linear", True),)),
    Variant("staleness_0", "batches of the present policies", run=(("staleness", 0),)),
    Variant("staleness_4", "batches four steps old, token_tis", run=(("staleness", 4),)),
    Variant("staleness_4_none", "batches four steps old, no correction", (("correction", "none"),), (("staleness", 4),)),
    Variant("past_selves", "opponents are snapshots of every 10 steps, uniformly", run=(("past", 10),)),
    Variant("no_kl", "no reference", (("kl", 0.0),)),
    Variant("renewed_every_5", "KL .5 to a reference renewed every 5 steps", (("reference_every", 5),)),
    Variant("renewed_every_40", "KL .5 to a reference renewed every 40 steps", (("reference_every", 40),)),
    Variant("kl_to_start", "KL .1 to the policy at the start", (("kl", 0.1), ("reference", "base"))),
    Variant("reinforce", "one unclipped update per batch, no reference", (("loss", "reinforce"), ("epochs", 1), ("kl", 0.0))),
)  # fmt: skip


def run(quick: bool) -> list[Row]:
    """A row per variant: NashConv of the average of past selves (lower is better), the last policies' beside it."""
    from selfplay.training.table import Setup, play_and_learn

    tree, seeds, rows = build_tree("kuhn-poker-v0", {}), SEEDS[:1] if quick else SEEDS, list[Row]()
    size = {"steps": 4, "batch": 32} if quick else {}
    for v in VARIANTS[:2] if quick else VARIANTS:
        setup = Setup(algorithm=msgspec.convert(PLAIN | dict(v.algorithm), AlgorithmConfig), **dict(v.run) | size)
        found = [play_and_learn(tree, setup, seed) for seed in seeds]
        averages, last = [r.average for r in found], [r.last for r in found]
        told = (
            f"{v.about}; {min(averages):.3f} to {max(averages):.3f} over {len(seeds)} seeds; last policies mean "
            f"{statistics.fmean(last):.3f}, worst {max(last):.3f}"
        )
        value = statistics.fmean(averages)
        rows.append(Row(
            name=v.name, value=value, unit="NashConv", reference=told, repeats=len(seeds),
            ratio=value / rows[0].value if rows else None,
        ))  # fmt: skip
        print(f"{v.name}: {value:.3f}; {told}", file=sys.stderr, flush=True)
    return rows
