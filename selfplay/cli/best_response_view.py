"""``selfplay eval --best-response``: train an agent against the checkpoint at each seat, then let both play on fresh deals.

In: what the command line asks for. Out: the bound as text or one JSON object, and a folder with the runs and the games.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from selfplay.errors import UserError, suggestion

if TYPE_CHECKING:
    from selfplay.launch.entrants import Field
    from selfplay.registry import EnvironmentSpec
    from selfplay.tournament.spec import Entrant


def hunt(env_id: str, asked: dict[str, Any]) -> None:
    """All seats, one after the other. Everything is checked before the first model is loaded."""
    from selfplay.cli.eval_cmd import seat_entrants
    from selfplay.cli.tournament_cmd import free_name
    from selfplay.config.load import parse_override
    from selfplay.launch.best_response import bound_text, hunter_config, lower_bound
    from selfplay.launch.entrants import read_field
    from selfplay.registry import describe

    params = dict(parse_override(text) for text in asked["params"])
    env = describe(env_id, params)
    if asked["at"] and asked["at"] not in env.seats:
        raise UserError(f"{env.id} has no seat {asked['at']!r}{suggestion(asked['at'], env.seats)}")
    field = read_field(asked["players"], model=asked["model"])
    folder = Path(asked["out"] or free_name(env.id))
    profile = dict(zip(env.seats, seat_entrants(env.seats, field), strict=True))
    configs = {
        seat: hunter_config(
            field.config, env, seat, profile, params=params, steps=asked["steps"], runs_dir=folder / "runs",
            overrides=asked["overrides"],
        )
        for seat in env.seats
        if seat == (asked["at"] or seat)
    }  # fmt: skip
    bounds = [_seat(env, seat, profile, config, field, folder, asked) for seat, config in configs.items()]
    bound = lower_bound(env, ", ".join(sorted({t.name for t in profile.values()})), asked["steps"], bounds)
    click.echo(msgspec.json.encode(bound).decode() if asked["as_json"] else bound_text(bound))


def _seat(
    env: EnvironmentSpec, seat: str, profile: dict[str, Entrant], config: Any, field: Field, folder: Path,
    asked: dict[str, Any],
) -> Any:  # fmt: skip
    from selfplay.cli.tournament_cmd import make_spec
    from selfplay.cli.view import open_view
    from selfplay.launch.best_response import hunter_name, seat_bound
    from selfplay.launch.commands import start_run
    from selfplay.launch.tournament import play_tournament, tournament_folder
    from selfplay.tournament.gamelog import read_lines

    others = {s: e for s, e in profile.items() if s != seat}
    adapters = sorted({e.adapter for e in others.values() if e.adapter})
    with open_view(f"best response at {seat}", json=asked["as_json"]) as view:
        summary = start_run(config, view, list(map(Path, adapters)))
    hunter = summary.adapters[hunter_name(others.values())]
    words = tuple(dict.fromkeys(e.adapter or e.name for e in others.values()))
    wanted = {
        **asked,
        "env": env.id,
        "schedule": "round-robin",
        "anchors": (),
        "compare": "",
        "model": field.config.model,
    }
    players, spec = make_spec(wanted, (hunter, *words))
    named = dict(zip(("", *words), (p.name for p in spec.players), strict=True))
    seats = {seat: ""} | {s: e.adapter or e.name for s, e in others.items()}
    spec = msgspec.structs.replace(spec, seating=tuple(named[seats[s]] for s in env.seats))
    with tournament_folder(folder / f"games-{seat}".replace(" ", "-"), spec) as games:
        asyncio.run(play_tournament(spec, games, config=players.config, say=_say, watch=lambda *_: None))
    return seat_bound(seat, spec.players[0].name, read_lines(games), hunter)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
