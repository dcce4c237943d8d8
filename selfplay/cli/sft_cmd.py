"""``selfplay sft``: teach a base model the answer format of an environment and keep it as a model folder."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec

from selfplay.config import Config, load_config
from selfplay.errors import ConfigError
from selfplay.store.atomic import temp_name

DEFAULT_STEPS = 200


@click.command()
@click.argument("items", nargs=-1, metavar="[CONFIG.toml] [key=value ...]")
@click.option("--env", "env_id", help="Environment id, for example kuhn-poker-v0.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder of the new model; must not exist.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, progress on stderr.")
def command(items: tuple[str, ...], env_id: str | None, out: Path, as_json: bool) -> None:
    """Teach a model the answer format of a game, from games of scripted players (supervised learning, all weights).

    \b
    selfplay sft --env kuhn-poker-v0 model=tiny --out models/kuhn-tiny
    selfplay train --env kuhn-poker-v0 model=./models/kuhn-tiny

    `selfplay train ... warm_start.steps=200` does the same as the first phase of a run.
    """
    from selfplay.launch.warm_start import warm_start
    from selfplay.models import resolve_model

    files = [i for i in items if "=" not in i]
    if len(files) > 1:
        raise click.UsageError(f"one config file at most, got {', '.join(files)}")
    overrides = [i for i in items if "=" in i] + ([f"env={env_id}"] if env_id is not None else [])
    config = load_config(files[0] if files else None, overrides, {"warm_start": {"steps": DEFAULT_STEPS}})
    _check(config)
    _check_out(out)
    model, record = warm_start(config, resolve_model(config.model, say=_say), out.absolute(), _say)
    if as_json:
        click.echo(msgspec.json.encode({"model": str(out), "digest": model.digest, **record}))
    else:
        click.echo(
            f"{out}: {record['first_loss']:.3f} → {record['last_loss']:.3f} nats per answer token over {record['steps']} steps\n"
            f"train with  selfplay train --env {config.env} model={_as_model(out)}"
        )


def _check(config: Config) -> None:
    """What can be refused before a model is looked for."""
    from selfplay.config.derive import check_config
    from selfplay.launch.demonstrate import Teacher, check_players
    from selfplay.registry import describe

    check_config(config)
    spec, warm = describe(config.env, dict(config.env_params)), config.warm_start
    check_players(spec, config.env_params, Teacher(warm.player, warm.options), warm.opponent)
    if not warm.steps:
        raise ConfigError("warm_start.steps=0: there would be nothing to do")


def _check_out(out: Path) -> None:
    """Refuse now what could not be written after the learning."""
    try:
        if out.exists():
            raise ConfigError(f"--out {out} exists: name a folder that does not")
        if not out.parent.is_dir():
            raise ConfigError(f"--out {out}: there is no folder {out.parent.absolute()}")
        trial = temp_name(out)
        trial.mkdir()
        trial.rmdir()
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror or error}") from None


def _as_model(path: Path) -> str:
    """How ``model=`` wants a folder."""
    return str(path) if path.is_absolute() or str(path).startswith(".") else f"./{path}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
