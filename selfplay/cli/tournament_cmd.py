"""``selfplay tournament``, ``rate``, ``match`` and ``replay``: play frozen players against each other and say who is better.

In: players and a schedule, or a folder of a tournament. Out: that folder with games, ratings and a report; a table in the terminal,
or one JSON object. Everything is checked before a model is loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from selfplay.cli.options import FiniteRange
from selfplay.cli.tournament_words import read_anchors, read_compare, read_numbers, read_seconds
from selfplay.errors import RunError, UserError

if TYPE_CHECKING:
    from selfplay.launch.entrants import Field
    from selfplay.tournament.spec import TournamentSpec

SCHEDULES = ("round-robin", "gauntlet", "swiss", "active")

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else there.")
env_option = click.option("--env", default="", help="Environment id or Python file.")
param_option = click.option("-p", "params", multiple=True, metavar="KEY=VALUE", help="Parameter of the environment.")
seed_option = click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(0, 2**31 - 1), help="Decides all deals."
)
model_option = click.option("--model", default=None, help="Base model of model players.  [default: that of the runs]")
jury_option = click.option(
    "--jury", default="base", show_default=True, help="Who judges: base, api:model=NAME, or runs/NAME/adapters/AGENT/N."
)
concurrency_option = click.option(
    "--concurrency", default=16, show_default=True, type=click.IntRange(1, 4096), help="Games at once."
)
temperature_option = click.option(
    "--temperature", default=1.0, show_default=True, type=FiniteRange(0.01, 10.0), help="Of model players."
)


@click.command()
@env_option
@click.option("--players", multiple=True, metavar="WORD", help="Who plays; more may follow as plain words.")
@click.argument("words", nargs=-1, metavar="[WORD]...")
@param_option
@click.option(
    "--schedule", default="round-robin", show_default=True, type=click.Choice(SCHEDULES), help="Who meets whom."
)
@click.option(
    "--pairs",
    default=50,
    show_default=True,
    type=click.IntRange(1, 1_000_000),
    help="Deals per table; each in all seatings.",
)
@click.option("--anchor", "anchors", multiple=True, metavar="PLAYER=ELO", help="Sets the scale; repeatable.")
@click.option(
    "--compare", default="", metavar="A,B", help="For active: the comparison that matters.  [default: the leaders]"
)
@concurrency_option
@click.option("--budget-tokens", default=0, type=click.IntRange(0), help="Stop after so many tokens; 0: no limit.")
@click.option("--budget-time", default="0", metavar="SECONDS|90m|2h", help="Stop after so long; 0: no limit.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=None, help="Folder to make.  [default: tournaments/ENV-N]"
)
@seed_option
@model_option
@jury_option
@temperature_option
@json_option
def command(**asked: Any) -> None:
    """Play frozen players against each other and rate them.

    A WORD is random, minimax, equilibrium, base, a run folder, runs/NAME/adapters/AGENT, one version below it, or a pattern.

    \b
    selfplay tournament --env kuhn-poker-v0 --players 'runs/a/adapters/*' random base --pairs 50 --anchor random=0 --out T
    selfplay tournament --env tictactoe-v0 --players random minimax --schedule gauntlet
    selfplay tournament resume T
    """
    words = (*asked["players"], *asked["words"])
    if words[:1] == ("resume",) and not asked["env"]:
        if len(words) != 2:
            raise UserError("name one folder: selfplay tournament resume T")
        _go_on(Path(words[1]), as_json=asked["as_json"])
        return
    from selfplay.launch.tournament import tournament_folder

    field, spec = make_spec(asked, words)
    refuse_idle_model(asked, (spec,))
    with tournament_folder(asked["out"] or free_name(spec.env), spec) as folder:
        play_and_show((spec, field), folder, asked["as_json"])


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--merge",
    "others",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Another tournament of the same environment.",
)
@click.option("--anchor", "anchors", multiple=True, metavar="PLAYER=ELO", help="Sets the scale; repeatable.")
@click.option(
    "--parquet",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    help="Also write all games to this file.",
)
@json_option
def rate(folder: Path, others: tuple[Path, ...], anchors: tuple[str, ...], parquet: Path | None, as_json: bool) -> None:
    """Rate the games of a tournament again without playing; --merge adds those of others.

    With --merge nothing is written: the ratings are shown.
    """
    from selfplay.cli.tournament_view import show
    from selfplay.tournament.results import conclude, read_tournament, write_results

    found = read_tournament(folder, others, read_anchors(anchors))
    if parquet is not None:
        from selfplay.store.parquet import write_parquet
        from selfplay.tournament.gamelog import GAME_COLUMNS, game_row

        write_parquet(parquet, GAME_COLUMNS, map(game_row, found.lines))
    result = conclude(found)
    if not others:
        write_results(folder, found, result)
    show(found.spec, result, None if others else folder, as_json=as_json)


@click.command()
@click.argument("one")
@click.argument("two")
@env_option
@param_option
@click.option(
    "--sprt",
    "bounds",
    default="0,20",
    show_default=True,
    metavar="ELO0,ELO1",
    help="Stop when one of the two is decided.",
)
@click.option("--normalised", is_flag=True, help="The bounds are normalised Elo.")
@click.option(
    "--alpha",
    default=0.05,
    show_default=True,
    type=FiniteRange(0.0001, 0.4999),
    help="How often H0 may be wrongly rejected.",
)
@click.option(
    "--beta",
    default=0.05,
    show_default=True,
    type=FiniteRange(0.0001, 0.4999),
    help="How often H1 may be wrongly rejected.",
)
@click.option("--pairs", default=2000, show_default=True, type=click.IntRange(1, 1_000_000), help="Most pairs.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=None, help="Folder to make.  [default: tournaments/ENV-N]"
)
@concurrency_option
@seed_option
@model_option
@jury_option
@temperature_option
@json_option
def match(one: str, two: str, **asked: Any) -> None:
    """Play ONE against TWO until a sequential test decides whether ONE is better.

    \b
    selfplay match runs/a/adapters/pro/9 runs/a/adapters/pro/3 --env kuhn-poker-v0 --sprt 0,20
    """
    from selfplay.launch.tournament import tournament_folder
    from selfplay.ratings.match import Hypotheses

    elo0, elo1 = read_numbers("--sprt", asked["bounds"])
    hypotheses = Hypotheses(
        elo0=elo0, elo1=elo1, alpha=asked["alpha"], beta=asked["beta"],
        model="normalised" if asked["normalised"] else "logistic",
    )  # fmt: skip
    field, spec = make_spec({**asked, "schedule": "round-robin", "anchors": (), "compare": ""}, (one, two))
    if len(spec.players) != 2:
        raise UserError(
            f"a match is between two players; {one} and {two} are {len(spec.players)}: name one version each"
        )
    if len(spec.seats) != 2:
        raise UserError(f"{spec.env} has {len(spec.seats)} seats; a match needs two: use  selfplay tournament")
    refuse_idle_model(asked, (spec,))
    spec = msgspec.structs.replace(spec, origin="match", sprt=hypotheses)
    with tournament_folder(asked["out"] or free_name(spec.env), spec) as folder:
        _play(spec, field, folder, as_json=asked["as_json"])


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("game")
@click.option("--show-private", is_flag=True, help="Show what each seat was shown, and full answers.")
@click.option("--pgn", "as_pgn", is_flag=True, help="A game of chess as PGN.")
@json_option
def replay(folder: Path, game: str, show_private: bool, as_pgn: bool, as_json: bool) -> None:
    """Show a game of a tournament or a run turn by turn. GAME is the beginning of its id, or its number in the log (from 1).

    \b
    selfplay replay T 3 --show-private
    selfplay replay runs/NAME 17               (a training game)
    selfplay replay runs/NAME/gate pro@4.0.1   (of the promotion gate: candidate, pair, half)
    """
    from selfplay.cli.replay_view import show_game

    show_game(folder, game, show_private=show_private, as_pgn=as_pgn, as_json=as_json)


def make_spec(asked: dict[str, Any], words: tuple[str, ...]) -> tuple[Field, TournamentSpec]:
    """The players and the tournament that the command line asks for, checked; raises `UserError`."""
    from selfplay.config.load import parse_override
    from selfplay.config.schema import JuryConfig
    from selfplay.launch.entrants import read_field, read_jury
    from selfplay.registry import describe
    from selfplay.tournament.spec import TournamentSpec
    from selfplay.types import Limits

    if not asked["env"]:
        raise UserError("name an environment with --env (selfplay env list shows all)")
    if len(words) < 1:
        raise UserError("name at least two players with --players, for example --players random base")
    given = dict(parse_override(text) for text in asked["params"])
    env = describe(asked["env"], given)
    known = read_jury(asked["jury"]) if env.needs_jury else JuryConfig()
    field = read_field(words, model=asked["model"], judge=asked["jury"] if known is None else None)
    jury = known or JuryConfig(agent=field.judge_agent)
    if len(field.entrants) < 2:
        raise UserError(f"only {field.entrants[0].name} would play: name at least two players")
    names = [e.name for e in field.entrants]
    anchors, compare = read_anchors(asked["anchors"]), read_compare(asked["compare"], asked["schedule"])
    for name in (*anchors, *compare):
        if name not in names:
            raise UserError(f"{name!r} does not play; the players are {', '.join(names)}")
    needs_model = field.needs_model or (env.needs_jury and jury.agent != "api")
    spec = TournamentSpec(
        env=env.id, env_source=env.source, env_params=env.values(given), seats=env.seats, players=field.entrants,
        schedule=asked["schedule"], pairs=asked["pairs"], anchors=anchors,
        compare=compare, seed=asked["seed"],
        model=field.config.model if needs_model else "", jury=jury, judge=field.judge,
        temperature=asked["temperature"], max_move_tokens=env.max_move_tokens, limits=Limits(max_turns=env.max_turns),
        concurrency=env.games_at_once(asked["concurrency"]), budget_tokens=asked.get("budget_tokens", 0),
        budget_time_s=read_seconds(asked.get("budget_time", "0")),
    )  # fmt: skip
    _check_players(spec)
    return field, spec


def refuse_idle_model(asked: dict[str, Any], specs: Sequence[TournamentSpec]) -> None:
    """Raise `UserError` for a --model that nobody would play or judge with."""
    if asked["model"] and not any(spec.model for spec in specs):
        names = ", ".join(p.name for p in specs[0].players)
        raise UserError(f"--model {asked['model']}: none of {names} is a model; name base among them, or leave it out")


def _check_players(spec: TournamentSpec) -> None:
    """Make every player at every seat once: a bot that cannot play this game is told before a model is loaded."""
    from typing import cast

    from selfplay.agent import PolicyClient, Sampling
    from selfplay.play import sit_down
    from selfplay.tournament.spec import Game

    for player in spec.players:
        game = Game(id="0", table=(player.name,), pair=0, seating=(player.name,) * len(spec.seats))
        sit_down(spec.match(game, 0), cast("PolicyClient", object()), Sampling())


def _load(folder: Path) -> tuple[TournamentSpec, Field]:
    from selfplay.launch.entrants import read_field
    from selfplay.tournament.spec import TournamentSpec

    spec = TournamentSpec.load(folder)
    if spec.origin == "gate":
        raise UserError(
            f"{folder} holds games of a run's promotion gate, which the run itself plays: selfplay rate and replay show them"
        )
    words = [p.adapter for p in spec.players if p.adapter] or ["base"]
    return spec, read_field(words, model=spec.model or None, judge=spec.judge.adapter if spec.judge else None)


def _go_on(folder: Path, *, as_json: bool) -> None:
    """Whatever was under way in ``folder``: a tournament, or a match with its test."""
    spec, field = _load(folder)
    _play(spec, field, folder, as_json=as_json)


def _play(spec: TournamentSpec, field: Field, folder: Path, *, as_json: bool) -> None:
    if spec.sprt is None:
        play_and_show((spec, field), folder, as_json)
        return
    from selfplay.cli.match_view import play_match

    with _says_how_to_go_on(folder):
        asyncio.run(play_match(spec, field, folder, spec.sprt, say=_say, as_json=as_json))


@contextlib.contextmanager
def _says_how_to_go_on(folder: Path) -> Iterator[None]:
    """For whoever interrupts the games that are played inside: what is finished is kept."""
    try:
        yield
    except KeyboardInterrupt:
        _say(f"finished games are kept; go on with  selfplay tournament resume {folder}")
        raise


def play_and_show(what: tuple[TournamentSpec, Field], folder: Path, as_json: bool) -> None:
    """Play a tournament to its end, write its results, and show them. Raises `RunError` when games failed."""
    from selfplay.cli.tournament_view import Progress, show
    from selfplay.launch.tournament import play_tournament
    from selfplay.tournament.gamelog import LOG_NAME
    from selfplay.tournament.results import conclude, read_tournament, write_results

    spec, field = what
    progress = Progress(quiet=as_json)
    with _says_how_to_go_on(folder), contextlib.closing(progress):
        played = asyncio.run(play_tournament(spec, folder, config=field.config, say=_say, watch=progress.game))
    found = read_tournament(folder)
    result = conclude(found)
    write_results(folder, found, result)
    show(spec, result, folder, as_json=as_json, played=played)
    if failed := [line for line in found.lines if line.ended == "failed"]:
        raise RunError(
            f"{len(failed)} of {len(found.lines)} games failed and are not rated ({folder / LOG_NAME} lists them); the first: "
            f"{failed[0].reason}"
        )


def env_label(env: str) -> str:
    """An environment's id as the name of a folder."""
    return Path(env).stem if env.endswith(".py") else env.replace("/", "-").replace(":", "-")


def free_name(env: str) -> Path:
    """A folder that does not exist yet."""
    return next(p for k in range(1, 100_000) if not (p := Path("tournaments") / f"{env_label(env)}-{k}").exists())


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
