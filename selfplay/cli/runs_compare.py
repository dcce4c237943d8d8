"""``selfplay runs compare``: two runs side by side, paired by step.

In: the metrics of two runs. Out: per figure both means, and the mean difference with an interval. Steps of a run resemble their
neighbours, so the interval comes from blocks of steps and not from single ones; fewer than four blocks give none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from selfplay.store.metrics import Row

BLOCKS = 10
LEAST_BLOCKS = 4
LEFT_OUT = ("step", "time", "elapsed_s", "eta_s", "nonfinite", "num_steps")


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of two runs over the steps that both have; ``half`` is the half width of a 95 % interval."""

    name: str
    steps: int
    one: float
    two: float
    difference: float
    half: float | None

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.half is not None and abs(self.difference) > self.half


def compare(one: Iterable[Row], two: Iterable[Row], *, first: int = 0) -> list[Difference]:
    """Every numeric figure that both runs report at the same steps, from step ``first`` on; sorted by name."""
    a, b = _by_step(one, first), _by_step(two, first)
    shared = sorted(set(a) & set(b))
    names = sorted({n for s in shared for n in a[s]} & {n for s in shared for n in b[s]})
    out = []
    for name in names:
        pairs = [(a[s][name], b[s][name]) for s in shared if name in a[s] and name in b[s]]
        if pairs and any(x != y for x, y in pairs):
            out.append(_difference(name, pairs))
    return out


def _by_step(rows: Iterable[Row], first: int) -> dict[int, dict[str, float]]:
    out: dict[int, dict[str, float]] = {}
    for row in rows:
        step = row.get("step")
        if isinstance(step, int) and step >= first:
            out[step] = {k: float(v) for k, v in row.items() if _is_figure(k, v)}
    return out


def _is_figure(name: str, value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return number and name not in LEFT_OUT and not name.startswith("accounting/")


def _difference(name: str, pairs: Sequence[tuple[float, float]]) -> Difference:
    gaps = [y - x for x, y in pairs]
    mean = sum(gaps) / len(gaps)
    return Difference(
        name=name, steps=len(pairs), one=sum(x for x, _ in pairs) / len(pairs), two=sum(y for _, y in pairs) / len(pairs),
        difference=mean, half=_half_width(gaps),
    )  # fmt: skip


def _half_width(gaps: Sequence[float]) -> float | None:
    """By the means of up to `BLOCKS` blocks of consecutive steps."""
    num = min(BLOCKS, len(gaps) // 2)
    if num < LEAST_BLOCKS:
        return None
    from scipy import stats

    edges = [round(k * len(gaps) / num) for k in range(num + 1)]
    means = [sum(gaps[i:j]) / (j - i) for i, j in itertools.pairwise(edges)]
    centre = sum(means) / num
    variance = sum((m - centre) ** 2 for m in means) / (num - 1)
    return float(stats.t.ppf(0.975, num - 1)) * math.sqrt(variance / num)


def text(names: Mapping[str, str], settings: Sequence[str], found: Sequence[Difference]) -> str:
    """For people: the settings that differ, then a row per figure; a star where the interval leaves out 0."""
    lines = [f"{names['one']} against {names['two']}"]
    lines.append("settings that differ: " + (", ".join(settings) or "none"))
    width = max((len(d.name) for d in found), default=0)
    for d in found:
        half = "" if d.half is None else f" ± {d.half:.3g}"
        lines.append(
            f"{'*' if d.clear else ' '} {d.name:<{width}}  {d.one:>11.4g}  {d.two:>11.4g}  {d.difference:+.4g}{half}  ({d.steps} steps)"
        )
    if not found:
        lines.append("no figure that both report at the same steps differs")
    return "\n".join(lines)
