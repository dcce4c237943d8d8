"""Remote pools, both ends: the port that a run opens to them, and ``selfplay pool`` itself.

A run: config → what can be checked at once (`check_remote`) → a `Gateway` beside its pool (`open_gateway`).
A pool: address and key files → a `JoinedPool` until it leaves (`play_for`).
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from selfplay.config import Config
from selfplay.errors import ConfigError
from selfplay.pool.gateway import Gateway, GatewayConfig
from selfplay.pool.remote import JoinConfig, JoinedPool, PoolSummary
from selfplay.pool.supervisor import PoolSupervisor
from selfplay.process import RuntimeDir
from selfplay.registry import EnvironmentSpec, describe
from selfplay.types import Match
from selfplay.wire.curve import PUBLIC, SECRET, check_tcp, load_allowed, load_public, load_secret, make_keys
from selfplay.wire.messages import Terms

KEYS, ALLOWED = "keys", "allowed"
"""In the run folder, for what the config does not name."""


def check_remote(config: Config, match: Match) -> None:
    """Raise `ConfigError` for settings of remote pools that cannot work; ``match`` is any match of the run."""
    remote = config.remote
    if not remote.listen:
        if remote.key or remote.allow:
            raise ConfigError("remote.key and remote.allow do nothing without remote.listen=tcp://HOST:PORT")
        return
    check_tcp(remote.listen)
    if config.jury.agent == "api" or any(s.player == "api" for s in match.seats):
        raise ConfigError(
            "remote.listen: games with api players or an api jury are not given to remote pools, which have no key"
        )
    if remote.key:
        load_secret(Path(remote.key))
    if remote.allow:
        load_allowed(Path(remote.allow))


def open_gateway(
    config: Config,
    spec: EnvironmentSpec,
    terms: Terms,
    *,
    run: Path,
    pool: PoolSupervisor,
    engines: list[str],
    say: Callable[[str], None],
) -> Gateway:
    """Listen for remote pools; raises `ConfigError` when the port is taken. Keys that are not named are made in ``run``."""
    remote = config.remote
    secret = Path(remote.key) if remote.key else _own_key(run / KEYS / "run")
    allowed = Path(remote.allow) if remote.allow else run / KEYS / ALLOWED
    if not remote.allow:
        allowed.mkdir(parents=True, exist_ok=True)
    gateway = Gateway(
        GatewayConfig(
            listen=remote.listen, keys=load_secret(secret), allowed=allowed, env=spec.id, source=spec.source,
            max_slots=remote.max_slots, terms=terms,
        ),
        pool, engines, say,
    )  # fmt: skip
    gateway.start()
    server = str(secret).removesuffix(SECRET) + PUBLIC
    say(f"remote pools may join at {gateway.address} with --server {server}; their own keys go into {allowed}")
    return gateway


def _own_key(stem: Path) -> Path:
    secret = stem.with_name(stem.name + SECRET)
    return secret if secret.exists() else make_keys(stem)[1]


class JoinOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line of a pool says."""

    connect: str
    env: str
    key: Path
    server: Path
    workers: int
    concurrency: int
    wait_s: float


def play_for(options: JoinOptions, say: Callable[[str], None]) -> PoolSummary:
    """Play for a run until it is over or the pool is told to leave (Ctrl-C: finish the games; twice: at once).

    Raises `UserError` when it cannot be joined, `RunError` when it is lost.
    """
    check_tcp(options.connect)
    keys, server = load_secret(options.key), load_public(options.server)
    spec = describe(options.env)
    runtime = RuntimeDir.create()
    try:
        with tempfile.TemporaryDirectory(prefix="selfplay-pool-") as logs:
            config = JoinConfig(
                connect=options.connect, keys=keys, server=server, spec=spec, workers=options.workers,
                concurrency=spec.games_at_once(options.concurrency), wait_s=options.wait_s, log_dir=Path(logs),
            )  # fmt: skip
            return asyncio.run(_until_left(config, runtime, say))
    finally:
        runtime.remove()


async def _until_left(config: JoinConfig, runtime: RuntimeDir, say: Callable[[str], None]) -> PoolSummary:
    pool, asked = JoinedPool(config, runtime, say), False

    def on_signal() -> None:
        nonlocal asked
        if not asked:
            say("leaving: finishing the games under way; once more to leave at once")
        asked = True
        pool.leave()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return await pool.run()
