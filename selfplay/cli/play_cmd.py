"""``selfplay play``: watch or play games in the terminal, with bots, people, API models and served models.

In: an environment id or file and who sits where. Out: the games turn by turn, or one JSON object. A model is started
only when a seat or the jury needs one, and only after everything else has been checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import click
import msgspec

from selfplay.cli.options import FiniteRange
from selfplay.config.load import parse_override
from selfplay.errors import ConfigError, UserError

if TYPE_CHECKING:
    from selfplay.agent import PolicyClient
    from selfplay.cli.table_view import TableView
    from selfplay.environment import Environment
    from selfplay.play import Jury
    from selfplay.types import Episode, Match, PolicyVersion, Scalar, SeatAssignment

DEFAULT_MODEL = "smollm2-135m"
HUMAN_TIME_S = 24 * 3600.0
_OPTION = re.compile(r":(?=[a-z_]+=)")


class OpenPolicy(Protocol):
    """The way to served models: ``selfplay.launch.serve.open_policy``.

    Starts a policy server for ``model`` (None: the model of ``run``) with the adapters ``versions`` of ``run``, gives a
    client of it, and leaves nothing behind. ``say`` hears what takes seconds. Raises `UserError` for an unknown model,
    run or version before anything is started.
    """

    def __call__(
        self, *, model: str | None, run: str | None, versions: tuple[PolicyVersion, ...], say: Callable[[str], None]
    ) -> AbstractAsyncContextManager[PolicyClient]: ...


class Seating(msgspec.Struct, frozen=True, kw_only=True):
    """One ``--players`` item: an agent kind, or a model (kind ``llm``), with options."""

    player: str
    agent: str
    pin: Literal["turn"] | int = "turn"
    options: dict[str, Any] = {}


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    """Everything asked for on the command line, checked."""

    env_id: str
    source: str
    params: dict[str, Any]
    seats: tuple[Any, ...]
    jury: Seating | None
    seed: int
    num_games: int
    model: str | None
    run: str | None
    temperature: float
    show_private: bool
    as_json: bool


@click.command()
@click.argument("env")
@click.option(
    "--players",
    default="",
    metavar="A,B,...",
    help="Who sits at each seat; one name fills all seats.  [default: random]",
)
@click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(0, 2**62), help="Decides cards, motions and bots."
)
@click.option("--games", default=1, show_default=True, type=click.IntRange(1, 100_000), help="How many games.")
@click.option("-p", "params", multiple=True, metavar="KEY=VALUE", help="Parameter of the environment; repeatable.")
@click.option(
    "--jury", default="", help="Who judges games that need it: base, agent@n, api:model=NAME, or even (all tie)."
)
@click.option("--run", default=None, help="Run folder that agent@n is taken from.")
@click.option(
    "--model", default=None, help=f"Base model of model players.  [default: that of --run, or {DEFAULT_MODEL}]"
)
@click.option("--temperature", default=1.0, show_default=True, type=FiniteRange(0.01, 10.0), help="Of model players.")
@click.option("--show-private", is_flag=True, help="Show what each seat sees, and full answers.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else there.")
def command(**asked: Any) -> None:
    """Watch or play games of ENV, an id or a Python file.

    A player is random, minimax, equilibrium, human, api:model=NAME, base (the model without adapter) or agent@n.

    \b
    selfplay play tictactoe-v0 --players minimax,human
    selfplay play kuhn-poker-v0 --players random,equilibrium --games 100
    selfplay play debate-v0 --players base,human -p rounds=2
    selfplay play debate-v0 --run runs/NAME --players pro@3,con@0
    """
    request, environment = _check(asked)
    episodes = asyncio.run(_play_all(request, environment))
    if request.as_json:
        body = {"env": request.env_id, "source": request.source, "seed": request.seed, "episodes": episodes}
        click.echo(msgspec.json.encode(body).decode())


def parse_player(text: str, kinds: Sequence[str]) -> Seating:
    """Read ``kind``, ``base``, ``agent`` or ``agent@n``, each with ``:option=value`` parts; raises `UserError`."""
    from selfplay.types import BASE, PolicyVersion

    name, *rest = _OPTION.split(text.strip())
    options = dict(parse_override(part) for part in rest)
    if "@" in name:
        version = PolicyVersion.parse(name)
        return Seating(player="llm", agent=version.agent, pin=version.version, options=options)
    if name in ("llm", BASE):
        return Seating(player="llm", agent=BASE, options=options)
    if name not in kinds:
        from selfplay.errors import UnknownNameError

        raise UnknownNameError("player", name, [*kinds, BASE, "agent@n"])
    return Seating(player=name, agent=name, options=options)


def _check(asked: Mapping[str, Any]) -> tuple[_Request, Environment]:
    """Check all that can be checked before a model is started; the environment is one instance to learn its seats."""
    from selfplay.registry import AGENTS, environment_source, list_entries, make_environment, resolve_environment_id

    env_id = resolve_environment_id(asked["env"])
    if env_id != asked["env"] and not env_id.endswith(".py"):
        click.echo(f"environment {asked['env']} is {env_id}", err=True)
    params = dict(parse_override(text) for text in asked["params"])
    environment = make_environment(env_id, params, asked["seed"])
    kinds = sorted({e.id for e in list_entries(AGENTS)})
    seatings = [parse_player(text, kinds) for text in (asked["players"] or "random").split(",")]
    request = _Request(
        env_id=env_id, source=environment_source(env_id), params=params, seats=_assign(environment.seats, seatings),
        jury=_parse_jury(asked["jury"], environment, env_id, seatings), seed=asked["seed"], num_games=asked["games"],
        model=asked["model"], run=asked["run"], temperature=asked["temperature"],
        show_private=asked["show_private"], as_json=asked["as_json"],
    )  # fmt: skip
    _check_players(request, environment)
    if request.model and not _needs_model(request):
        raise UserError(
            f"--model {request.model}: no player is a model; name base among the --players, or leave it out"
        )
    if _versions(request) and request.run is None:
        raise UserError(f"{_versions(request)[0]} is a version of a run: name it with --run RUN")
    return request, environment


def _assign(seats: Sequence[str], seatings: Sequence[Seating]) -> tuple[SeatAssignment, ...]:
    from selfplay.types import SeatAssignment

    if len(seatings) == 1:
        seatings = [seatings[0]] * len(seats)
    if len(seatings) != len(seats):
        raise UserError(
            f"{len(seatings)} players for {len(seats)} seats ({', '.join(seats)}): name one per seat, or one for all"
        )
    return tuple(
        SeatAssignment(seat=seat, player=s.player, agent=s.agent, pin=s.pin, options=s.options)
        for seat, s in zip(seats, seatings, strict=True)
    )


def _parse_jury(text: str, environment: Environment, env_id: str, seatings: Sequence[Seating]) -> Seating | None:
    from selfplay.environment import Environment as Base

    if not text:
        if type(environment).jury_questions is Base.jury_questions:
            return None
        if any(s.player == "llm" for s in seatings):
            text = "base"
        else:
            raise UserError(
                f"{env_id} needs a jury: add --jury base (the base model judges), --jury api:model=NAME, "
                f"or --jury even (every game is a tie)"
            )
    jury = parse_player(text, ("api", "even"))
    if jury.player in ("api", "even"):
        _open_jury(jury, None)  # checks its options
    elif jury.options:
        raise ConfigError(f"jury {text!r} takes no options")
    return jury


def _check_players(request: _Request, environment: Environment) -> None:
    """Make every player once: options and games that a bot cannot play are told before a model is loaded."""
    from selfplay.agent import Sampling
    from selfplay.play import sit_down

    sit_down(_match(request, environment, 0), cast("PolicyClient", object()), Sampling())


def _needs_model(request: _Request) -> bool:
    return any(s is not None and s.player == "llm" for s in (*request.seats, request.jury))


def _versions(request: _Request) -> tuple[PolicyVersion, ...]:
    from selfplay.types import PolicyVersion

    models = [s for s in (*request.seats, request.jury) if s is not None and isinstance(s.pin, int)]
    return tuple(sorted({PolicyVersion(s.agent, s.pin) for s in models}))


def _match(request: _Request, environment: Environment, index: int) -> Match:
    from selfplay.types import Limits, Match, derive_seed

    human = any(a.player == "human" for a in request.seats)
    limits = Limits(max_turns=environment.max_turns, time_s=HUMAN_TIME_S if human else Limits().time_s)
    seed = derive_seed(request.seed, "play", index)
    return Match(
        index=index, env=request.env_id, env_params=request.params, seed=seed, seats=request.seats, limits=limits
    )


async def _play_all(request: _Request, environment: Environment) -> list[Episode]:
    from rich.console import Console

    from selfplay.cli.table_view import TableView

    view = (
        None
        if request.as_json
        else TableView(Console(highlight=False), environment.seats, show_private=request.show_private)
    )
    async with _policy(request) as policy:
        jury = None if request.jury is None else _open_jury(request.jury, policy)
        episodes = [await _play_one(request, environment, i, policy, jury, view) for i in range(request.num_games)]
    if view is not None and len(episodes) > 1:
        view.summary(episodes)
    return episodes


async def _play_one(
    request: _Request,
    like: Environment,
    index: int,
    policy: PolicyClient | None,
    jury: Jury | None,
    view: TableView | None,
) -> Episode:
    from selfplay.agent import Sampling
    from selfplay.play import play, sit_down
    from selfplay.play.table import Table
    from selfplay.registry import make_environment

    match = _match(request, like, index)
    environment = make_environment(request.env_id, request.params, match.seed)
    players = sit_down(match, policy, Sampling(temperature=request.temperature, max_tokens=0), environment)
    if view is not None:
        view.open_game(match, request.source)
    episode = await play(
        request.env_id, environment, players, match, jury=jury, env_source=request.source,
        watch=None if view is None else view.turn,
    )  # fmt: skip
    if view is not None:
        view.close_game(episode, Table(request.env_id, environment, match.seed).transcript())
    return episode


@contextlib.asynccontextmanager
async def _policy(request: _Request) -> AsyncIterator[PolicyClient | None]:
    """A served model where a seat or the jury needs one, else None."""
    if not _needs_model(request):
        yield None
        return
    open_policy = cast("OpenPolicy", import_module("selfplay.launch.serve").open_policy)
    model = request.model or (None if request.run else DEFAULT_MODEL)
    async with open_policy(model=model, run=request.run, versions=_versions(request), say=_say) as policy:
        yield policy


def _open_jury(jury: Seating, policy: PolicyClient | None) -> Jury:
    from selfplay.play import ApiJury, FixedJury, PolicyJury
    from selfplay.play.chat_api import ChatApi, api_base
    from selfplay.registry import Parameter, check_values

    if jury.player == "even":
        check_values("jury even", (), jury.options)
        return FixedJury(name="even")
    if jury.player == "api":
        known = [Parameter(name=name, kind="str", default="") for name in ("base", "model")]
        options: dict[str, Scalar] = check_values("jury api", known, jury.options)
        return ApiJury(ChatApi(api_base(str(options["base"])), str(options["model"])))
    if policy is None:
        raise UserError(f"jury {jury.agent} is a model, but none is served")
    return PolicyJury(policy, jury.agent, jury.pin)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
