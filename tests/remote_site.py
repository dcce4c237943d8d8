"""What the tests of remote pools share: a run's pool with an open gateway, keys, and pools as real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import zmq
from tests.patience import PATIENCE_S

from pool_site import GAME, make_config
from selfplay.agent import Sampling
from selfplay.pool import PoolSupervisor
from selfplay.pool.gateway import Gateway, GatewayConfig
from selfplay.process import RuntimeDir
from selfplay.wire.codec import Codec
from selfplay.wire.curve import KeyedConnection, load_public, load_secret, make_keys
from selfplay.wire.messages import PROTOCOL, FromPool, PoolHello, PoolPulse, Terms, ToPool
from selfplay.wire.sockets import receive

SOURCE = "pool-test-games 1.0 sha256:of-this-game"
TERMS = Terms(
    sampling=Sampling(max_tokens=8), jury="base", episode_timeout_s=30.0, request_timeout_s=30.0, silence_s=10.0
)


def game_source() -> str:
    """The provenance of the pool tests' game, as processes with the present environment see it."""
    code = f"from selfplay.registry import environment_source; print(environment_source({GAME!r}))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


class Keys:
    """A run's keys and those of two pools that may join and one that may not."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.allowed = folder, folder / "allowed"
        for name in ("run", "mallory"):
            make_keys(folder / name)
        for name in ("alice", "bob"):
            make_keys(self.allowed / name)

    def secret(self, name: str) -> Path:
        return (self.allowed if name in ("alice", "bob") else self.folder) / f"{name}.key_secret"

    @property
    def server(self) -> Path:
        return self.folder / "run.key"


class Site:
    """A run's side: its own pool, and the gateway beside it."""

    def __init__(self, pool: PoolSupervisor, gateway: Gateway, said: list[str], keys: Keys) -> None:
        self.pool, self.gateway, self.said, self.keys = pool, gateway, said, keys
        self._peers: list[Peer] = []

    def peer(self, who: str = "alice", identity: bytes = b"peer") -> Peer:
        """A client with the keys of ``who``; closed with the site."""
        self._peers.append(Peer(self, who, identity))
        return self._peers[-1]

    def close_peers(self) -> None:
        for peer in self._peers:
            peer.close()


@contextlib.asynccontextmanager
async def open_site(
    folder: Path,
    runtime: RuntimeDir,
    *,
    source: str = SOURCE,
    engines: tuple[str, ...] = (),
    silence_s: float = 10.0,
    worker: bool = True,
    **config: Any,
) -> AsyncIterator[Site]:
    """A pool with an open gateway, both closed at the end of the block. Without ``worker`` only remote pools play."""
    keys, said = Keys(folder / "keys"), list[str]()
    pool = PoolSupervisor(
        make_config(policy_endpoints=engines, **config), runtime=runtime, log_dir=folder / "logs", say=print
    )
    terms = Terms(
        sampling=TERMS.sampling, jury="base", episode_timeout_s=30.0, request_timeout_s=30.0, silence_s=silence_s
    )
    gateway = Gateway(
        GatewayConfig(
            listen="tcp://127.0.0.1:0", keys=load_secret(keys.secret("run")), allowed=keys.allowed, env=GAME,
            source=source, max_slots=8, terms=terms,
        ),
        pool, engines, said.append,
    )  # fmt: skip
    gateway.start()
    site = Site(pool, gateway, said, keys)
    try:
        if worker:
            await pool.start()
        yield site
    finally:
        site.close_peers()
        await gateway.close()
        await pool.close(grace_s=5.0)


class PoolProcess:
    """``selfplay pool`` as a real process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process, self.lines = process, list[str]()

    @classmethod
    async def start(cls, site: Site, who: str = "alice", *, server: Path | None = None, **options: str) -> PoolProcess:
        values = {
            "connect": site.gateway.address, "env": GAME, "key": str(site.keys.secret(who)),
            "server": str(server or site.keys.server), "concurrency": "4", "wait": "60",
        } | options  # fmt: skip
        arguments = [part for name, value in values.items() for part in (f"--{name}", value)]
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "selfplay.cli.main", "pool", *arguments, env=dict(os.environ),
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, stdin=asyncio.subprocess.DEVNULL,
            )
        )  # fmt: skip

    async def until(self, text: str) -> None:
        """Read its output up to a line with ``text``."""
        assert self.process.stdout is not None
        while True:
            line = (await asyncio.wait_for(self.process.stdout.readline(), PATIENCE_S)).decode()
            self.lines.append(line)
            if text in line:
                return
            assert line, f"it ended without {text!r}:\n{''.join(self.lines)}"

    async def end(self, signals: tuple[signal.Signals, ...] = ()) -> tuple[int, str]:
        """Its exit code and the rest of its output, after ``signals``."""
        for number in signals:
            self.process.send_signal(number)
        out, _ = await asyncio.wait_for(self.process.communicate(), PATIENCE_S)
        assert self.process.returncode is not None
        return self.process.returncode, out.decode()


class Peer:
    """A client that speaks the pools' protocol by hand."""

    def __init__(self, site: Site, who: str = "alice", identity: bytes = b"peer") -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.link = KeyedConnection(
            self.context, site.gateway.address, identity, load_secret(site.keys.secret(who)),
            load_public(site.keys.server),
        )  # fmt: skip
        self._out, self._in = Codec[Any](FromPool), Codec[Any](ToPool)

    async def send(self, *messages: Any) -> None:
        for message in messages:
            await self.link.socket.send(message if isinstance(message, bytes) else self._out.encode(message))

    async def next(self, kind: type[Any]) -> Any:
        """The next message of a kind; others are passed over."""
        while True:
            frames = await receive(self.link.socket, 30.0)
            assert frames is not None, f"no {kind.__name__} came"
            message = self._in.decode(frames[0])
            if isinstance(message, kind):
                return message

    async def join(self, slots: int = 4, source: str = SOURCE) -> None:
        await self.send(PoolHello(protocol=PROTOCOL, env=GAME, source=source, slots=slots), PoolPulse(slots=slots))

    def close(self) -> None:
        self.link.close()
        self.context.term()


async def until(ready: Any) -> None:
    """Wait for a condition of this process."""
    async with asyncio.timeout(PATIENCE_S):
        while not ready():
            await asyncio.sleep(0.01)
