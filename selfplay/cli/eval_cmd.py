"""``selfplay eval``: how good is a checkpoint: exactly, where the game can be solved; against named opponents otherwise.

In: a checkpoint (or a run, or a bot) and environments. Out: exploitability with its legal mass and spread, or a gauntlet with
intervals; as text, or one JSON object.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from selfplay.cli.options import FiniteRange
from selfplay.errors import ConfigError, UserError

if TYPE_CHECKING:
    from selfplay.agent import Message
    from selfplay.evaluation import ExploitReport, GameTree
    from selfplay.evaluation.sampled import SampledReport
    from selfplay.launch.entrants import Field
    from selfplay.tournament.spec import Entrant


@click.command()
@click.argument("players", nargs=-1, required=True, metavar="CHECKPOINT...")
@click.option("--env", "envs", multiple=True, required=True, help="Environment; repeatable.")
@click.option("-p", "params", multiple=True, metavar="KEY=VALUE", help="Parameter of the environment; repeatable.")
@click.option("--exploitability", is_flag=True, help="Exact NashConv by its own probabilities.")
@click.option(
    "--best-response",
    "steps",
    default=0,
    type=click.IntRange(0),
    metavar="STEPS",
    help="Train against it: a lower bound.",
)
@click.option("--at", "at", default="", metavar="SEAT", help="Learn at that seat only.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Setting of that training; repeatable.")
@click.option(
    "--opponents",
    default="random",
    show_default=True,
    metavar="A,B,...",
    help="Bots, base, or checkpoints to play against.",
)
@click.option(
    "--pairs",
    default=50,
    show_default=True,
    type=click.IntRange(1, 100_000),
    help="Deals against each opponent, in all seatings.",
)
@click.option(
    "--min-legal",
    default=0.9,
    show_default=True,
    type=FiniteRange(0, 1),
    help="No headline below this share of legal answers.",
)
@click.option(
    "--variants/--no-variants", default=True, show_default=True, help="Ask with moves reordered and renamed as well."
)
@click.option(
    "--samples",
    default=2048,
    show_default=True,
    type=click.IntRange(8, 1_000_000),
    help="Answers per state of players without probabilities.",
)
@click.option("--states", is_flag=True, help="Show every information state.")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Folder.  [default: tournaments/ENV-N]")
@click.option("--model", default=None, help="Base model.  [default: that of the run]")
@click.option("--concurrency", default=16, show_default=True, type=click.IntRange(1, 4096), help="Games at once.")
@click.option("--temperature", default=1.0, show_default=True, type=FiniteRange(0.01, 10.0), help="Of models.")
@click.option("--jury", default="base", show_default=True, help="Who judges games that need it: base or api.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**31 - 1), help="Of the deals.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout, nothing else there.")
def command(**asked: Any) -> None:
    """Evaluate a checkpoint: exactly with --exploitability, by training against it with --best-response, else against --opponents.

    CHECKPOINT is runs/NAME/adapters/AGENT/N, a run (its newest versions, each at its seat), base, or a bot.

    \b
    selfplay eval runs/a --env kuhn-poker-v0 --exploitability
    selfplay eval runs/a/adapters/player_0/9 --env kuhn-poker-v0 --opponents random,equilibrium,cfr,base
    """
    if (asked["overrides"] or asked["at"]) and not asked["steps"]:
        raise UserError("--set and --at are for the training of --best-response STEPS")
    if asked["steps"] and asked["exploitability"]:
        raise UserError(
            "--exploitability is exact where it works, --best-response is for games where it does not: ask for one"
        )
    if not (asked["exploitability"] or asked["steps"]):
        _gauntlets(asked)
        return
    for env in asked["envs"]:
        if asked["exploitability"]:
            asyncio.run(_exploit(env, asked))
        else:
            from selfplay.cli.best_response_view import hunt

            hunt(env, asked)


# ── exact ────────────────────────────────────────────────────────────────────────────────────────


async def _exploit(env: str, asked: dict[str, Any]) -> None:
    from selfplay.config.load import parse_override
    from selfplay.evaluation import build_tree, exploitability
    from selfplay.evaluation.sampled import sampled_exploitability
    from selfplay.launch.entrants import read_field
    from selfplay.launch.serve import open_server

    if asked["temperature"] != 1.0:
        raise ConfigError("--exploitability scores answers at temperature 1; leave --temperature out")
    field = read_field(asked["players"], model=asked["model"])
    tree = build_tree(env, dict(parse_override(text) for text in asked["params"]))
    seated = seat_entrants(tree.seats, field)
    kinds = {e.player for e in seated}
    if kinds != {"llm"}:
        if len(field.entrants) != 1:
            raise UserError("name one bot, or only models: their exploitabilities are found in different ways")
        bot = field.entrants[0]
        sampled = await sampled_exploitability(
            tree, bot.player, bot.options, samples=asked["samples"], seed=asked["seed"]
        )
        _print(sampled, sampled_text(bot.name, sampled), asked["as_json"])
        return
    if len({msgspec.json.encode(e.options) for e in seated}) > 1:
        raise ConfigError("seats of one evaluation cannot have different options")
    async with open_server(field.config, field.adapters, _say) as served:

        async def score(seat: int, messages: Sequence[Message], answers: Sequence[str]) -> Sequence[float]:
            who = seated[seat]
            pin: int | str = 0 if who.version is None else who.version
            return await served.client.score(who.agent, pin, messages, answers)

        report = await exploitability(
            tree, score, options=seated[0].options, min_legal=asked["min_legal"], variants=asked["variants"]
        )
    _print(report, exploit_text(tree, seated, report, states=asked["states"]), asked["as_json"])


def seat_entrants(seats: Sequence[str], field: Field) -> list[Entrant]:
    """Who sits at each seat: the only player everywhere, or the checkpoints whose agent carries the seat's name."""
    if len(field.entrants) == 1:
        return [field.entrants[0]] * len(seats)
    out = []
    for seat in seats:
        configured = field.config.seats.get(seat)
        lineage = configured.agent if configured is not None and configured.agent else seat
        found = [e for e in field.entrants if e.adapter and Path(e.adapter).parent.name == lineage]
        if len(found) != 1:
            names = ", ".join(e.name for e in field.entrants)
            raise UserError(
                f"seat {seat} is agent {lineage}'s, and {len(found)} of {names} are versions of it: name one each"
            )
        out += found
    return out


def exploit_text(tree: GameTree, seated: Sequence[Entrant], report: ExploitReport, *, states: bool) -> str:
    """The report for people."""
    who = ", ".join(f"{seat}: {e.name}" for seat, e in zip(tree.seats, seated, strict=True))
    lines = [f"{report.env}  {who}  ({len(report.states)} information states)"]
    if report.headline is None:
        lines.append(
            f"NashConv: not given, legal mass {report.legal_mass:.2f} is below {report.threshold:.2f}; the model mostly says "
            "something that is no move (or no common spelling of one)"
        )
    else:
        lines.append(
            f"NashConv {report.headline:.4f}  (exploitability {report.headline / len(tree.seats):.4f} per seat)"
        )
    lines += [
        f"  renormalised  NashConv {report.renormalised.nash_conv:.4f}  values {_numbers(report.renormalised.values)}"
        f"  best responses gain {_numbers(report.renormalised.gains)}",
        f"  as played     NashConv {report.as_played.nash_conv:.4f}  values {_numbers(report.as_played.values)}",
        f"  legal mass    {report.legal_mass:.3f} as met, {report.min_legal_mass:.3f} at worst",
    ]
    if report.spread is not None:
        lines.append(
            f"  other words   NashConv {report.spread[0]:.4f} to {report.spread[1]:.4f} when moves trade places or names"
        )
    for s in report.states if states else ():
        masses = ", ".join(f"{m} {p:.3f}" for m, p in zip(s.moves, s.masses, strict=True))
        lines.append(f"  {s.seat}  {' '.join(s.view.split())[:70]}  {masses}")
    return "\n".join(lines)


def sampled_text(name: str, report: SampledReport) -> str:
    """The report of a sampled player for people."""
    found = report.solution
    return (
        f"{report.env}  {name}  ({len(report.policy)} information states, {report.samples} answers each)\n"
        f"NashConv {found.nash_conv:.4f}, too high by about {report.bias:.4f} from sampling; an equilibrium player would show "
        f"{report.equilibrium_shows:.4f} at as many answers; values {_numbers(found.values)}"
    )


def _numbers(values: Sequence[float]) -> str:
    return " ".join(f"{v:+.4f}" for v in values)


# ── against opponents ────────────────────────────────────────────────────────────────────────────


def _gauntlets(asked: dict[str, Any]) -> None:
    """The checkpoint against its opponents, in one environment after the other; all are checked before the first is played."""
    from selfplay.cli.tournament_cmd import env_label, free_name, make_spec, play_and_show, refuse_idle_model
    from selfplay.launch.tournament import tournament_folder

    opponents = tuple(filter(None, (o.strip() for o in asked["opponents"].split(","))))
    if len(asked["players"]) != 1:
        raise UserError("against opponents one checkpoint is evaluated: name one, and the others with --opponents")
    wanted = {**asked, "schedule": "gauntlet", "anchors": _anchor(opponents), "compare": ""}
    plans = [make_spec({**wanted, "env": env}, (*asked["players"], *opponents)) for env in asked["envs"]]
    refuse_idle_model(asked, [spec for _, spec in plans])
    for field, spec in plans:
        out: Path | None = asked["out"]
        if out is not None and len(plans) > 1:
            out = out / env_label(spec.env)
        with tournament_folder(out or free_name(spec.env), spec) as folder:
            play_and_show((spec, field), folder, asked["as_json"])


def _anchor(opponents: Sequence[str]) -> tuple[str, ...]:
    return ("random=0",) if "random" in opponents else ()


def _print(report: msgspec.Struct, text: str, as_json: bool) -> None:
    click.echo(msgspec.json.encode(_plain(report)).decode() if as_json else text)


def _plain(report: msgspec.Struct) -> dict[str, Any]:
    """With the derived figures: a reader of JSON shall not work them out."""
    out: dict[str, Any] = msgspec.to_builtins(report)
    for name in ("headline", "spread"):
        if hasattr(report, name):
            out[name] = getattr(report, name)
    for name in ("renormalised", "as_played", "solution"):
        solution = getattr(report, name, None)
        if solution is not None:
            out[name] |= {"nash_conv": solution.nash_conv, "exploitability": solution.exploitability}
    return out


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
