"""Where pools of other processes and hosts join a run: one CURVE port for matches, episodes and questions to the models.

    remote pool ── FromPool ──►  Gateway ── join, leave, take_result ──►  PoolSupervisor
                ◄── ToPool ──       │  ▲
                              Generate, Choose   (checked against the matches that the pool holds)
                                    ▼  │
                               policy servers

The policy servers hear of no pool: the gateway asks for them, under its own request ids. So a pool can neither send them
anything but a question of its own games nor read what is not its own. One port, one schema, one place to check.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from selfplay.errors import ConfigError, EngineError, WireError, WorkerError
from selfplay.pool.guests import RemotePool
from selfplay.pool.supervisor import PoolSupervisor
from selfplay.registry.ids import may_be_one_game, shown_id
from selfplay.wire.codec import Codec
from selfplay.wire.curve import KeyedListener, KeyPair, load_allowed
from selfplay.wire.messages import (
    PROTOCOL,
    AskPolicy,
    Cancel,
    Choose,
    Chosen,
    EndEpisode,
    FromPolicy,
    FromPool,
    Generate,
    Generated,
    PolicyAnswer,
    PoolHello,
    PoolLeaves,
    PoolPulse,
    PoolRefused,
    PoolWelcome,
    Refused,
    RunEnds,
    RunPulse,
    Terms,
    ToPolicy,
    ToPool,
)
from selfplay.wire.sockets import Caller, connect_dealer, receive, unique_identity
from selfplay.wire.text import safe_text

PULSES_PER_SILENCE = 5
MAX_POOLS = 256
_MAX_REASON = 2000
_MAX_KEYS_SAID = 20
_LINGER_MS = 500


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a run opens to remote pools."""

    listen: str
    keys: KeyPair
    allowed: Path
    """Folder of the ``.key`` files that may join; read at every handshake."""
    env: str
    source: str
    """Provenance of the environment: a pool must have the same, to the byte."""
    max_slots: int
    terms: Terms


class Gateway:
    """The run's side of all remote pools.

    >>> gateway = Gateway(config, pool, engines=["ipc:///..."], say=print)
    >>> gateway.start()
    >>> gateway.address     # with the real port
    >>> await gateway.close()
    """

    def __init__(
        self, config: GatewayConfig, pool: PoolSupervisor, engines: Sequence[str], say: Callable[[str], None]
    ) -> None:
        self._config, self._pool, self._engines, self._say = config, pool, engines, say
        self._in, self._out = Codec[Any](FromPool), Codec[Any](ToPool)
        self._guests: dict[bytes, RemotePool] = {}
        self._numbers = itertools.count(1)
        self._strangers: set[bytes] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self.counts: Counter[str] = Counter()
        """joined, left, refused, bad_frames, foreign."""

    def start(self) -> None:
        """Listen; raises `ConfigError` for an address or keys that do not do."""
        load_allowed(self._config.allowed)
        self._loop = asyncio.get_running_loop()
        self._listener = KeyedListener(self._config.listen, self._config.keys, self._is_allowed)
        port = self._listener.socket.address.rpartition(":")[2]
        self.address = f"{self._config.listen.rpartition(':')[0]}:{port}"
        self._context: zmq.Context[Any] = zmq.Context()
        self._callers = [
            Caller(connect_dealer(self._context, e, unique_identity("gateway")), Codec(ToPolicy), Codec(FromPolicy), "policy server")
            for e in self._engines
        ]  # fmt: skip
        self._tasks = [asyncio.create_task(t(), name=f"gateway {t.__name__}") for t in (self._receive, self._watch)]

    @property
    def names(self) -> tuple[str, ...]:
        """The pools that are joined now."""
        return tuple(g.name for g in self._guests.values())

    def fault(self) -> WorkerError | None:
        """Why the gateway works no more; None while it does."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                return WorkerError(f"{task.get_name()} failed: {type(error).__name__}: {error}")
        return None

    async def close(self) -> None:
        """Tell every pool that the run is over, and close; idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for guest in list(self._guests.values()):
            self._send(guest.identity, RunEnds())
            self._forget(guest, "the run is over")
        if self._tasks:
            for caller in self._callers:
                await caller.close()
            self._context.term()
            self._listener.close(_LINGER_MS)
        self._tasks = []

    # ── who may come in ───────────────────────────────────────────────────────────────────────

    def _is_allowed(self, key: bytes) -> bool:
        """Whether a handshake with this public key may go on. Called in the thread of the authenticator."""
        try:
            known = key in load_allowed(self._config.allowed)
        except ConfigError as e:
            self._loop.call_soon_threadsafe(self._say, f"remote pools: nobody can join: {e}")
            return False
        if not known:
            self._loop.call_soon_threadsafe(self._stranger, key)
        return known

    def _stranger(self, key: bytes) -> None:
        self.counts["refused"] += 1
        if key not in self._strangers and len(self._strangers) < _MAX_KEYS_SAID:
            self._strangers.add(key)
            self._say(
                f"a pool with the unknown key {key.decode()} was refused; put its .key file into {self._config.allowed} to let it in"
            )

    def _name(self, key: bytes) -> str:
        with contextlib.suppress(ConfigError):
            return f"{safe_text(load_allowed(self._config.allowed).get(key, 'pool'))[:60]}-{next(self._numbers)}"
        return f"pool-{next(self._numbers)}"

    # ── messages in ───────────────────────────────────────────────────────────────────────────

    async def _receive(self) -> None:
        while True:
            identity, data, key = await receive(self._listener.socket) or (b"", b"", b"")
            guest = self._guests.get(identity)
            if guest is not None and guest.key != key:
                self.counts["foreign"] += 1
                continue
            try:
                message = self._in.decode(data)
            except WireError as e:
                self._bad_frame(identity, guest, data, e)
                continue
            if guest is not None:
                guest.heard_at = time.monotonic()
                await self._take(guest, message)
            elif isinstance(message, PoolHello):
                self._welcome(identity, key, message)
            elif not isinstance(message, PoolLeaves):
                self._refuse(identity, "this pool is not joined (any more): start it again")

    def _bad_frame(self, identity: bytes, guest: RemotePool | None, data: bytes, error: WireError) -> None:
        self.counts["bad_frames"] += 1
        if guest is not None:
            guest.fault(f"a frame of {len(data)} bytes was {error}")
        elif (theirs := _protocol_of(data)) is not None and theirs != PROTOCOL:
            self._refuse(identity, _other_protocol(theirs))

    async def _take(self, guest: RemotePool, message: Any) -> None:
        if isinstance(message, PoolPulse):
            guest.slots, guest.ready = min(message.slots, guest.max_slots), True
            self._pool.slots_changed()
        elif isinstance(message, AskPolicy):
            self._ask(guest, message.message)
        elif isinstance(message, PoolLeaves):
            self._forget(guest, safe_text(message.reason)[:200] or "it left")
        elif isinstance(message, PoolHello):
            guest.fault("it said hello twice")
        else:
            if message.episode_id in guest.held:
                self._end_episode(message.episode_id)
            await self._pool.take_result(guest, message)

    # ── joining and leaving ───────────────────────────────────────────────────────────────────

    def _welcome(self, identity: bytes, key: bytes, hello: PoolHello) -> None:
        config = self._config
        if why := self._why_refused(hello):
            self._refuse(identity, why)
            return
        guest = RemotePool(
            name=self._name(key), identity=identity, key=key, max_slots=min(hello.slots, config.max_slots),
            terms=config.terms, send=self._send, send_away=self._send_away,
        )  # fmt: skip
        welcome = PoolWelcome(name=guest.name, slots=guest.max_slots, terms=config.terms)
        if not self._send(identity, welcome):
            return
        self._guests[identity] = guest
        self._pool.join(guest)
        self.counts["joined"] += 1
        self._say(f"remote pool {guest.name} joined: up to {guest.max_slots} games at once")

    def _why_refused(self, hello: PoolHello) -> str:
        config = self._config
        if hello.protocol != PROTOCOL:
            return _other_protocol(hello.protocol)
        if not may_be_one_game(hello.env, config.env):
            return f"the run plays {shown_id(config.env)}, the pool {safe_text(hello.env)[:80]}"
        if hello.source != config.source:
            return f"the run plays {shown_id(config.env)} of {config.source}, the pool has {safe_text(hello.source)}: install the same"
        if len(self._guests) >= MAX_POOLS:
            return f"{MAX_POOLS} pools have joined already"
        return "" if hello.slots else "a pool needs at least one slot"

    def _refuse(self, identity: bytes, why: str) -> None:
        self.counts["refused"] += 1
        self._send(identity, PoolRefused(protocol=PROTOCOL, reason=why[:_MAX_REASON]))

    def _send_away(self, guest: RemotePool, why: str) -> None:
        if guest.identity in self._guests:
            self._refuse(guest.identity, why)
            self._forget(guest, why)

    def _forget(self, guest: RemotePool, why: str) -> None:
        """The pool is gone: nobody works for it any more, and what it held is played again."""
        del self._guests[guest.identity]
        for task in list(guest.asking.values()):
            task.cancel()
        for episode_id in guest.held:
            self._end_episode(episode_id)
        num_void = self._pool.leave(guest, f"remote pool {guest.name} left: {why}")
        self.counts["left"] += 1
        self._say(
            f"remote pool {guest.name} left after {guest.num_played} games: {why}"
            + (f"; {num_void} are played again" if num_void else "")
        )

    async def _watch(self) -> None:
        silence_s = self._config.terms.silence_s
        while True:
            for guest in list(self._guests.values()):
                self._send(guest.identity, RunPulse())
                if time.monotonic() - guest.heard_at > silence_s:
                    self._send_away(guest, f"nothing was heard of it for {silence_s:g} s")
            await asyncio.sleep(silence_s / PULSES_PER_SILENCE)

    # ── questions to the models ───────────────────────────────────────────────────────────────

    def _ask(self, guest: RemotePool, message: Generate | Choose | Cancel) -> None:
        if isinstance(message, Cancel):
            if (task := guest.asking.get(message.target)) is not None:
                task.cancel()
            return
        if why := guest.why_not(message):
            self._answer(guest, Refused(request=message.request, kind="bad_request", message=why))
            guest.fault(why)
            return
        task = asyncio.create_task(self._asked(guest, message), name=f"question of {guest.name}")
        guest.asking[message.request] = task
        # From outside: a task that is cancelled before its first step never runs a line of its own.
        task.add_done_callback(lambda _: guest.asking.pop(message.request, None))

    async def _asked(self, guest: RemotePool, message: Generate | Choose) -> None:
        limit_s = min(max(message.timeout_s, 0.001), self._config.terms.request_timeout_s)
        try:
            reply = await self._caller(message).call(
                lambda number: msgspec.structs.replace(message, request=number, timeout_s=limit_s),
                timeout_s=limit_s + 1.0,
                cancel=lambda number, target: Cancel(request=number, target=target),
            )
        except EngineError as e:
            reply = Refused(request=0, kind="unavailable", message=str(e)[:_MAX_REASON])
        if not isinstance(reply, Generated | Chosen | Refused):
            reply = Refused(
                request=0, kind="bad_request", message=f"the policy server answered with {type(reply).__name__}"
            )
        if isinstance(reply, Generated):
            guest.answered(message, reply.answer)
        self._answer(guest, msgspec.structs.replace(reply, request=message.request))

    def _caller(self, message: Generate | Choose) -> Caller:
        """An episode stays with one policy server, whose cache knows it; jury questions go round."""
        key = message.episode_id if isinstance(message, Generate) else str(message.request)
        return self._callers[zlib.crc32(key.encode()) % len(self._callers)]

    def _end_episode(self, episode_id: str) -> None:
        if self._callers:
            caller = self._callers[zlib.crc32(episode_id.encode()) % len(self._callers)]
            caller.post(lambda number: EndEpisode(request=number, episode_id=episode_id))

    # ── messages out ──────────────────────────────────────────────────────────────────────────

    def _answer(self, guest: RemotePool, reply: Generated | Chosen | Refused) -> None:
        self._send(guest.identity, PolicyAnswer(message=reply))

    def _send(self, identity: bytes, message: Any) -> bool:
        return self._listener.socket.offer((identity, self._out.encode(message)))


def _protocol_of(data: bytes) -> int | None:
    """The protocol number of a hello whose other fields are not known here."""
    try:
        tag, protocol, *_ = msgspec.msgpack.decode(data[:4096] if len(data) <= 4096 else b"", type=list[msgspec.Raw])
        if msgspec.msgpack.decode(tag, type=str) == "pool":
            return msgspec.msgpack.decode(protocol, type=int)
    except (msgspec.DecodeError, ValueError, RecursionError):
        pass  # no hello of any version
    return None


def _other_protocol(theirs: int) -> str:
    return f"the run speaks protocol {PROTOCOL}, the pool {theirs}: use one version of selfplay"
