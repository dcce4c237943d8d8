"""``selfplay pool``: play for a running training from another process or host, and make the keys that this needs."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from selfplay.cli.options import FiniteRange

_FILE = click.Path(path_type=Path)


@click.group(invoke_without_command=True)
@click.option("--connect", metavar="tcp://HOST:PORT", help="Where the run listens (its remote.listen).")
@click.option("--env", "env_id", metavar="ID", help="The environment; the only one this pool plays.")
@click.option("--key", type=_FILE, metavar="FILE", help="This pool's own .key_secret file.")
@click.option("--server", type=_FILE, metavar="FILE", help="The run's public .key file.")
@click.option("--workers", type=click.IntRange(1, 4096), default=1, show_default=True, help="Worker processes.")
@click.option(
    "--concurrency", type=click.IntRange(1, 100_000), default=16, show_default=True, help="Games at once in each."
)
@click.option(
    "--wait",
    "wait_s",
    type=FiniteRange(0.1, 86_400),
    default=30.0,
    show_default=True,
    help="Seconds to wait for the run.",
)
@click.option("--json", "as_json", is_flag=True, help="Progress on stderr, one JSON object on stdout.")
@click.pass_context
def command(
    ctx: click.Context,
    connect: str | None,
    env_id: str | None,
    key: Path | None,
    server: Path | None,
    workers: int,
    concurrency: int,
    wait_s: float,
    as_json: bool,
) -> None:
    """Join a running training from another process or host and play games for it.

    \b
    selfplay pool keys keys/alice      the pool's keys; give keys/alice.key to the run
    selfplay pool --connect tcp://HOST:7700 --env debate-v0 --key keys/alice.key_secret --server run.key

    Ctrl-C once finishes the games under way and leaves; twice leaves at once, and the run plays them again.
    """
    if ctx.invoked_subcommand is not None:
        return
    if connect is None or env_id is None or key is None or server is None:
        given = {"--connect": connect, "--env": env_id, "--key": key, "--server": server}
        raise click.UsageError(f"{', '.join(k for k, v in given.items() if v is None)} missing")
    from selfplay.launch.remote import JoinOptions, play_for

    options = JoinOptions(
        connect=connect, env=env_id, key=key, server=server, workers=workers, concurrency=concurrency, wait_s=wait_s
    )
    summary = play_for(options, lambda line: click.echo(line, err=as_json))
    if as_json:
        click.echo(msgspec.json.encode(summary).decode())
    else:
        click.echo(f"{summary.name} left: {summary.ended}; {summary.played} games played, {summary.failed} failed")


@command.command()
@click.argument("name", type=_FILE)
def keys(name: Path) -> None:
    """Make a pair of keys: NAME.key to give away, NAME.key_secret (mode 0600) to keep."""
    from selfplay.wire.curve import make_keys

    public, secret = make_keys(name)
    click.echo(f"{public}  public: the other side needs it\n{secret}  secret: leave it here")
