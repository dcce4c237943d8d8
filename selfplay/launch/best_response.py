"""A best response by training: an agent that learns against one frozen player only, and what it earns from it on fresh deals.

In: who sits where (bots, base, or checkpoints), settings of a run. Out: per seat the mean reward of a learner that takes it, with
an interval. Nobody can earn more than a best response does, so this is a *lower* bound of how exploitable the player is: a longer or
better run can only find more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from selfplay.config import Config, load_config
from selfplay.config.league import LeagueConfig
from selfplay.config.schema import EvalConfig, SeatConfig, WarmStartConfig
from selfplay.errors import UserError
from selfplay.registry import EnvironmentSpec
from selfplay.tournament.gamelog import GameLine
from selfplay.tournament.spec import Entrant
from selfplay.types import BASE, Scalar

HUNTER = "hunter"


class SeatBound(msgspec.Struct, frozen=True, kw_only=True):
    """What the learner at one seat earned a game; ``half`` is the half width of a 95 % interval over deals."""

    seat: str
    mean: float
    half: float | None
    games: int
    hunter: str
    """Folder of the adapter that learnt it."""


class LowerBound(msgspec.Struct, frozen=True, kw_only=True):
    """All seats together. For zero sum ``nash_conv_at_least`` is a lower bound of the player's NashConv."""

    env: str
    target: str
    steps: int
    seats: tuple[SeatBound, ...]
    nash_conv_at_least: float | None
    half: float | None


def hunter_config(
    base: Config,
    env: EnvironmentSpec,
    seat: str,
    profile: Mapping[str, Entrant],
    *,
    params: Mapping[str, Scalar],
    steps: int,
    runs_dir: Path,
    overrides: Sequence[str],
) -> Config:
    """The run in which ``seat`` learns and all others are seated as ``profile`` says. Raises `ConfigError` for a bad override."""
    others = {s: profile[s] for s in env.seats if s != seat}
    if not others:
        raise UserError(f"{env.id} has one seat: there is nobody to learn against")
    _check_distinct(others.values())
    wanted = replace(
        base, env=env.id, env_params=env.values(params), name=f"best-response-{seat}".replace(" ", "-"), runs_dir=str(runs_dir),
        seats={seat: SeatConfig(agent=hunter_name(others.values()))} | {s: _frozen(e) for s, e in others.items()}, agents={}, scorers={},
        league=LeagueConfig(), eval=EvalConfig(), warm_start=WarmStartConfig(), train=replace(base.train, steps=steps),
    )  # fmt: skip
    return load_config(None, overrides, defaults=_without_none(msgspec.to_builtins(wanted)))


def hunter_name(targets: Iterable[Entrant]) -> str:
    """The learner's name: never that of a player it learns against."""
    taken = {Path(t.adapter).parent.name for t in targets if t.adapter}
    return next(name for k in range(1, len(taken) + 2) if (name := HUNTER if k == 1 else f"{HUNTER}-{k}") not in taken)


def _check_distinct(targets: Iterable[Entrant]) -> None:
    """They play in one run under the names they have."""
    paths: dict[tuple[str, str], str] = {}
    for path in (Path(t.adapter) for t in targets if t.adapter):
        if paths.setdefault((path.parent.name, path.name), str(path)) != str(path):
            raise UserError(
                f"{path} and {paths[path.parent.name, path.name]} carry one name, {path.parent.name}@{path.name}: a run cannot seat both"
            )


def _frozen(target: Entrant) -> SeatConfig:
    if target.adapter:
        path = Path(target.adapter)
        return SeatConfig(agent=f"{path.parent.name}@{path.name}", options=target.options)
    if target.player == "llm":
        return SeatConfig(agent=BASE, options=target.options)
    return SeatConfig(player=target.player, options=target.options)


def _without_none(tree: Any) -> Any:
    """A config as nested tables; what is unset is left out."""
    return {k: _without_none(v) for k, v in tree.items() if v is not None} if isinstance(tree, dict) else tree


def seat_bound(seat: str, hunter: str, games: Sequence[GameLine], folder: str) -> SeatBound:
    """From the games in which ``hunter`` sat at ``seat``: one to a deal. Raises `UserError` when none has a result."""
    rewards = [g.rewards[seat] for g in games if g.seats[seat] == hunter and g.scored]
    if not rewards:
        raise UserError(
            f"no game with {hunter} at {seat} came to a result: look at the games before asking for a bound"
        )
    mean = sum(rewards) / len(rewards)
    return SeatBound(seat=seat, mean=mean, half=_half_width(rewards, mean), games=len(rewards), hunter=folder)


def lower_bound(env: EnvironmentSpec, target: str, steps: int, seats: Sequence[SeatBound]) -> LowerBound:
    """The seats together. A learner that earns less than nothing has found nothing there; the sum says so as it is."""
    halves = [s.half for s in seats]
    whole = env.zero_sum and len(seats) == len(env.seats)
    known = [h for h in halves if h is not None]
    return LowerBound(
        env=env.id, target=target, steps=steps, seats=tuple(seats),
        nash_conv_at_least=sum(s.mean for s in seats) if whole else None,
        half=math.sqrt(sum(h * h for h in known)) if whole and len(known) == len(halves) else None,
    )  # fmt: skip


def _half_width(values: Sequence[float], mean: float) -> float | None:
    if len(values) < 2:
        return None
    from scipy import stats

    variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return float(stats.t.ppf(0.975, len(values) - 1)) * math.sqrt(variance / len(values))


def bound_text(bound: LowerBound) -> str:
    """For people."""
    lines = [f"{bound.env}  {bound.target}  against agents that learnt against it alone for {bound.steps} steps"]
    for s in bound.seats:
        half = "" if s.half is None else f" ± {s.half:.4f}"
        lines.append(f"  {s.seat}  the learner earns {s.mean:+.4f}{half} a game ({s.games} deals)  {s.hunter}")
    if bound.nash_conv_at_least is not None:
        half = "" if bound.half is None else f" ± {bound.half:.4f}"
        lines.append(
            f"NashConv is at least {bound.nash_conv_at_least:.4f}{half}: a lower bound; more steps can only find more"
        )
    else:
        lines.append("a lower bound of what can be earned against it; more steps can only find more")
    return "\n".join(lines)
