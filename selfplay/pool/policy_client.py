"""The way from an environment worker to the models: generation requests over ZeroMQ.

Each episode stays with one policy server (its prefix cache knows the episode's contexts). A request that is cancelled or
times out is withdrawn at the server, so that no model generates for nobody.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import zmq

from selfplay.agent import Answer, Message, Sampling
from selfplay.environment import JuryQuestion
from selfplay.errors import EngineError
from selfplay.types import SeatAssignment
from selfplay.wire.codec import Codec
from selfplay.wire.messages import (
    PROTOCOL,
    Cancel,
    Choose,
    Chosen,
    EndEpisode,
    FromPolicy,
    Generate,
    Generated,
    PolicyHello,
    PolicyInfo,
    Refused,
    Score,
    Scored,
    ToPolicy,
)
from selfplay.wire.sockets import Caller, HasRequest, connect_dealer, unique_identity

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


class ZmqPolicyClient:
    """`selfplay.agent.PolicyClient` over the policy servers at ``endpoints``.

    >>> client = ZmqPolicyClient(context, endpoints, request_timeout_s=120)
    >>> answer = await client.generate(assignment, episode_id="7.0", messages=..., ...)
    >>> client.end_episode("7.0")
    >>> await client.close()

    The first request to a server is preceded by the protocol check.
    """

    def __init__(self, context: zmq.Context[Any], endpoints: Sequence[str], *, request_timeout_s: float) -> None:
        to_policy, from_policy = Codec[Any](ToPolicy), Codec[Any](FromPolicy)
        self._timeout_s = request_timeout_s
        self._servers = [
            _Server(Caller(connect_dealer(context, e, unique_identity("policy-client")), to_policy, from_policy, "policy server"))
            for e in endpoints
        ]  # fmt: skip
        self._turns = itertools.count()
        self._pinning: set[str] = set()
        """Episodes for which a server may hold a version."""

    @property
    def num_open(self) -> int:
        """Requests under way."""
        return sum(s.caller.num_open for s in self._servers)

    async def generate(
        self,
        assignment: SeatAssignment,
        *,
        episode_id: str,
        messages: Sequence[Message],
        known_messages: int,
        prefix_ids: Sequence[int],
        sampling: Sampling,
    ) -> Answer:
        """See `selfplay.agent.PolicyClient.generate`."""
        if assignment.pin != "turn":
            self._pinning.add(episode_id)

        def request(number: int, left_s: float) -> Generate:
            return Generate(
                request=number, episode_id=episode_id, agent=assignment.agent, pin=assignment.pin,
                messages=tuple(messages), known_messages=known_messages, prefix_ids=tuple(prefix_ids),
                sampling=sampling, timeout_s=left_s,
            )  # fmt: skip

        reply = await self._ask(self._server_of(episode_id), request)
        if not isinstance(reply, Generated):
            raise EngineError(f"policy server answered a generation with {type(reply).__name__}")
        return reply.answer

    async def choose(self, agent: str, pin: str | int, question: JuryQuestion) -> Mapping[str, float]:
        """See `selfplay.agent.PolicyClient.choose`."""

        def request(number: int, left_s: float) -> Choose:
            return Choose(request=number, agent=agent, pin=pin, question=question, timeout_s=left_s)  # type: ignore[arg-type]

        reply = await self._ask(self._servers[next(self._turns) % len(self._servers)], request)
        if not isinstance(reply, Chosen):
            raise EngineError(f"policy server answered a question with {type(reply).__name__}")
        return reply.probabilities

    async def score(
        self, agent: str, pin: str | int, messages: Sequence[Message], answers: Sequence[str]
    ) -> tuple[float, ...]:
        """Log-probability of each of ``answers`` as the next turn of a chat, its end included, at temperature 1."""

        def request(number: int, left_s: float) -> Score:
            return Score(
                request=number, agent=agent, pin=pin, messages=tuple(messages), answers=tuple(answers),  # type: ignore[arg-type]
                timeout_s=left_s,
            )  # fmt: skip

        reply = await self._ask(self._servers[next(self._turns) % len(self._servers)], request)
        if not isinstance(reply, Scored):
            raise EngineError(f"policy server answered a question with {type(reply).__name__}")
        return reply.logprobs

    def end_episode(self, episode_id: str) -> None:
        """Tell the episode's server that it may let go of what the episode pinned; nothing is said where nothing was."""
        if episode_id not in self._pinning:
            return
        self._pinning.remove(episode_id)
        server = self._server_of(episode_id)
        if server.checked:
            server.caller.post(lambda number: EndEpisode(request=number, episode_id=episode_id))

    async def close(self) -> None:
        """Close the connections; open requests fail with `EngineError`."""
        for server in self._servers:
            await server.caller.close()

    def _server_of(self, episode_id: str) -> _Server:
        return self._servers[zlib.crc32(episode_id.encode()) % len(self._servers)]

    async def _ask(self, server: _Server, make: Callable[[int, float], HasRequest]) -> object:
        """The reply; a server that says ``unavailable`` is asked again until the request's time is up."""
        deadline = time.monotonic() + self._timeout_s
        pause_s = _FIRST_PAUSE_S
        if not server.checked:
            await server.check(self._timeout_s)
        while True:
            left_s = max(0.001, deadline - time.monotonic())
            reply = await server.caller.call(
                lambda number, left_s=left_s: make(number, left_s), timeout_s=left_s, cancel=_cancel  # type: ignore[misc]
            )  # fmt: skip
            if not isinstance(reply, Refused):
                return reply
            if reply.kind != "unavailable" or time.monotonic() + pause_s > deadline:
                raise EngineError(f"policy server refused ({reply.kind}): {reply.message}")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class _Server:
    """One policy server and whether its protocol was checked."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.checked = False

    async def check(self, timeout_s: float) -> None:
        """Say hello before the first request; raises `EngineError` for a server of another protocol.

        Requests that start together each say hello: cheaper than one waiting for another's timeout.
        """
        reply = await self.caller.call(
            lambda number: PolicyHello(request=number, protocol=PROTOCOL), timeout_s=timeout_s
        )
        if isinstance(reply, Refused):
            raise EngineError(f"policy server refused this worker: {reply.message}")
        if not isinstance(reply, PolicyInfo) or reply.protocol != PROTOCOL:
            theirs = reply.protocol if isinstance(reply, PolicyInfo) else type(reply).__name__
            raise EngineError(
                f"policy server speaks protocol {theirs}, this worker {PROTOCOL}: use one version of selfplay"
            )
        self.checked = True


def _cancel(number: int, target: int) -> Cancel:
    return Cancel(request=number, target=target)
