"""Small plots as plain SVG: no library, no script, no network; colours come from the page's style.

In: numbers and labels. Out: SVG text that scales with the page. All labels are escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

ROW, LABEL, WIDTH = 26, 150, 640


class Bar:
    """One row of an interval plot: a point with its interval."""

    def __init__(self, label: str, value: float, low: float, high: float, note: str = "") -> None:
        self.label, self.value, self.low, self.high, self.note = label, value, low, high, note


def intervals(bars: Sequence[Bar], unit: str) -> str:
    """Points with intervals, one row each."""
    if not bars:
        return ""
    finite = [x for b in bars for x in (b.value, *_clipped(b))]
    low, high = _nice(min(finite), max(finite))
    height = ROW * len(bars) + 34

    def x(value: float) -> float:
        return LABEL + (min(max(value, low), high) - low) / (high - low) * (WIDTH - LABEL - 60)

    parts = [_axis(low, high, x, height, unit)]
    for i, b in enumerate(bars):
        y = 14 + ROW * i
        a, z = _clipped(b)
        parts.append(
            f'<text class="label" x="{LABEL - 8}" y="{y + 4}" text-anchor="end">{escape(_short(b.label))}</text>'
            f'<line class="range" x1="{x(a):.1f}" x2="{x(z):.1f}" y1="{y}" y2="{y}"/>'
            f'<circle class="point" cx="{x(b.value):.1f}" cy="{y}" r="4"/>'
            f'<text class="value" x="{WIDTH - 4}" y="{y + 4}" text-anchor="end">{escape(b.note)}</text>'
        )
    return _svg(height, "".join(parts))


def _clipped(bar: Bar) -> tuple[float, float]:
    """An interval at most 600 to each side: an open one would flatten all others."""
    return max(bar.low, bar.value - 600), min(bar.high, bar.value + 600)


def curves(lines: dict[str, Sequence[tuple[float, float, float, float]]], x_name: str, y_name: str) -> str:
    """Lines of (x, value, low, high) with their intervals as bands."""
    points = [p for line in lines.values() for p in line]
    if not points:
        return ""
    low, high = _nice(min(max(p[2], p[1] - 600) for p in points), max(min(p[3], p[1] + 600) for p in points))
    left, right = min(p[0] for p in points), max(p[0] for p in points)
    right = right if right > left else left + 1
    height, bottom = 260, 224

    def at(px: float, py: float) -> tuple[float, float]:
        y = bottom - (min(max(py, low), high) - low) / (high - low) * (bottom - 14)
        return 54 + (px - left) / (right - left) * (WIDTH - 150), y

    parts = [_grid(low, high, at, left, right, x_name, y_name, height)]
    for k, (name, line) in enumerate(sorted(lines.items())):
        up = " ".join("{:.1f},{:.1f}".format(*at(p[0], p[3])) for p in line)
        down = " ".join("{:.1f},{:.1f}".format(*at(p[0], p[2])) for p in reversed(line))
        middle = " ".join("{:.1f},{:.1f}".format(*at(p[0], p[1])) for p in line)
        end = at(line[-1][0], line[-1][1])
        dots = "".join(
            '<circle class="c{}" cx="{:.1f}" cy="{:.1f}" r="3"/>'.format(k % 6, *at(p[0], p[1])) for p in line
        )
        parts.append(
            f'<polygon class="band c{k % 6}" points="{up} {down}"/><polyline class="line c{k % 6}" points="{middle}"/>{dots}'
            f'<text class="label" x="{end[0] + 8:.1f}" y="{end[1] + 4:.1f}">{escape(_short(name, 12))}</text>'
        )
    return _svg(height, "".join(parts))


def heat_map(names: Sequence[str], values: Sequence[Sequence[float | None]]) -> str:
    """Scores 0..1 of row against column."""
    size = max(34, min(64, (WIDTH - LABEL) // max(1, len(names))))
    top, height = 76, 76 + size * len(names) + 6
    width = max(WIDTH, LABEL + size * len(names) + 70)
    parts = []
    for j, name in enumerate(names):
        cx = LABEL + size * j + size / 2
        parts.append(
            f'<text class="column" transform="translate({cx:.0f},{top - 8}) rotate(-35)">{escape(_short(name, 12))}</text>'
        )
    for i, name in enumerate(names):
        y = top + size * i
        parts.append(
            f'<text class="label" x="{LABEL - 8}" y="{y + size / 2 + 4:.0f}" text-anchor="end">{escape(_short(name))}</text>'
        )
        for j, value in enumerate(values[i]):
            parts.append(_cell(LABEL + size * j, y, size, value))
    return _svg(height, "".join(parts), width)


def _cell(x: int, y: int, size: int, value: float | None) -> str:
    if value is None:
        return f'<rect class="none" x="{x}" y="{y}" width="{size - 2}" height="{size - 2}" rx="3"/>'
    side = "win" if value >= 0.5 else "loss"
    strength = min(1.0, abs(value - 0.5) * 2)
    return (
        f'<rect class="{side}" fill-opacity="{0.08 + 0.8 * strength:.2f}" x="{x}" y="{y}" width="{size - 2}" '
        f'height="{size - 2}" rx="3"/><text class="value" x="{x + size / 2 - 1:.0f}" y="{y + size / 2 + 4:.0f}" '
        f'text-anchor="middle">{value:.2f}</text>'
    )


def histogram(values: Sequence[float], name: str) -> str:
    """How often each value, or range of values, occurred."""
    if not values:
        return ""
    low, high = min(values), max(values)
    num = min(24, int(high - low) + 1)
    width = (high - low + 1) / num
    counts = [0] * num
    for v in values:
        counts[min(num - 1, int((v - low) / width))] += 1
    height, bottom, most = 170, 130, max(counts)
    step = (WIDTH - 20) / num
    parts = []
    for i, count in enumerate(counts):
        tall = (bottom - 14) * count / most
        parts.append(
            f'<rect class="bar" x="{10 + step * i:.1f}" y="{bottom - tall:.1f}" width="{max(1.0, step - 3):.1f}" height="{tall:.1f}"/>'
        )
        if num <= 12 or i % 4 == 0:
            parts.append(
                f'<text class="tick" x="{10 + step * (i + 0.5):.1f}" y="{bottom + 16}" text-anchor="middle">{low + i * width:.0f}</text>'
            )
    parts.append(f'<text class="tick" x="{WIDTH / 2}" y="{bottom + 34}" text-anchor="middle">{escape(name)}</text>')
    return _svg(height, "".join(parts))


def shares(rows: Sequence[tuple[str, float, str]]) -> str:
    """Labelled bars of shares 0..1."""
    height = ROW * len(rows) + 8
    room = WIDTH - LABEL - 70
    parts = []
    for i, (label, value, note) in enumerate(rows):
        y = 4 + ROW * i
        parts.append(
            f'<text class="label" x="{LABEL - 8}" y="{y + 15}" text-anchor="end">{escape(_short(label))}</text>'
            f'<rect class="none" x="{LABEL}" y="{y + 3}" width="{room}" height="{ROW - 10}" rx="3"/>'
            f'<rect class="bar" x="{LABEL}" y="{y + 3}" width="{max(0.0, min(1.0, value)) * room:.1f}" height="{ROW - 10}" rx="3"/>'
            f'<text class="value" x="{WIDTH - 4}" y="{y + 15}" text-anchor="end">{escape(note)}</text>'
        )
    return _svg(height, "".join(parts))


def _svg(height: float, body: str, width: float = WIDTH) -> str:
    return f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img">{body}</svg>'


def _short(text: str, most: int = 20) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _nice(low: float, high: float) -> tuple[float, float]:
    """A range with room around it and round ends."""
    room = max(10.0, (high - low) * 0.08)
    step = _step(high - low + 2 * room)
    return math.floor((low - room) / step) * step, math.ceil((high + room) / step) * step


def _step(span: float) -> float:
    base = 10.0 ** math.floor(math.log10(span))
    return next(base * k for k in (0.1, 0.2, 0.5, 1.0, 2.0) if span / (base * k) <= 8)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from ``low`` to ``high``."""
    step = _step(high - low)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [step * k for k in range(first, last + 1)]


def _axis(low: float, high: float, x: object, height: int, unit: str) -> str:
    parts = []
    for tick in _ticks(low, high):
        at = x(tick)  # type: ignore[operator]
        kind = "zero" if abs(tick) < 1e-9 else "grid"
        parts.append(f'<line class="{kind}" x1="{at:.1f}" x2="{at:.1f}" y1="2" y2="{height - 24}"/>')
        parts.append(f'<text class="tick" x="{at:.1f}" y="{height - 10}" text-anchor="middle">{tick:+.0f}</text>')
    return (
        "".join(parts) + f'<text class="tick" x="{WIDTH - 4}" y="{height - 10}" text-anchor="end">{escape(unit)}</text>'
    )


def _grid(low: float, high: float, at: object, left: float, right: float, x_name: str, y_name: str, height: int) -> str:
    parts = []
    for tick in _ticks(low, high):
        x, y = at(left, tick)  # type: ignore[operator]
        end, _ = at(right, tick)  # type: ignore[operator]
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{end:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{tick:+.0f}</text>')
    for value in sorted({left, right}):
        x, _ = at(value, low)  # type: ignore[operator]
        parts.append(f'<text class="tick" x="{x:.1f}" y="{height - 18}" text-anchor="middle">{value:g}</text>')
    parts.append(f'<text class="tick" x="{WIDTH / 2}" y="{height - 4}" text-anchor="middle">{escape(x_name)}</text>')
    return "".join(parts) + f'<text class="tick" x="58" y="10">{escape(y_name)}</text>'
