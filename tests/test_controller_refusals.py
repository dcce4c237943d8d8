"""A move of weights that failed at the trainer: the rank says so and goes on, and the controller hears a `SyncError`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import zmq

from selfplay.controller.trainer_link import TrainerLink
from selfplay.errors import SyncError, TrainerError
from selfplay.process import RuntimeDir
from selfplay.training.rank import answer
from selfplay.types import PolicyVersion
from selfplay.wire.codec import Codec
from selfplay.wire.messages import (
    PROTOCOL,
    FromTrainer,
    JoinWeights,
    Save,
    Send,
    Sent,
    ToTrainer,
    TrainerHello,
    TrainerRefused,
)
from selfplay.wire.sockets import connect_dealer, receive

SEND = Send(request=3, version=PolicyVersion("pro", 1), timeout_s=1.0)
JOIN = JoinWeights(request=3, transport="gloo", address="file:///x", rank=0, world_size=2, timeout_s=1.0)


class Service:
    """Fails as told."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def handle(self, message: Any) -> Any:
        raise self.error


@pytest.mark.parametrize("message", [SEND, JOIN])
def test_a_send_or_join_that_failed_is_refused(message: Any) -> None:
    service: Any = Service(SyncError("a receiver did not take part within 1 s"))
    refused = answer(service, message, 0)
    assert isinstance(refused, TrainerRefused)
    assert (refused.request, refused.message) == (3, "a receiver did not take part within 1 s")


@pytest.mark.parametrize(
    ("message", "error"),
    [(Save(request=3, folder="x"), SyncError("odd")), (SEND, TrainerError("it was not exported last"))],
)
def test_everything_else_ends_the_rank(message: Any, error: Exception) -> None:
    service: Any = Service(error)
    with pytest.raises(type(error)):
        answer(service, message, 0)


def test_the_controller_hears_of_it_and_the_next_send_works() -> None:
    async def rank(socket: Any) -> None:
        out, into = Codec[Any](FromTrainer), Codec[Any](ToTrainer)
        await socket.send(out.encode(TrainerHello(protocol=PROTOCOL, rank=0, pid=1, step=0, versions={})))
        for reply in (
            lambda r: TrainerRefused(request=r, rank=0, message="the group is broken"),
            lambda r: Sent(request=r, digest="d"),
        ):
            frames = await receive(socket)
            assert frames is not None
            await socket.send(out.encode(reply(into.decode(frames[-1]).request)))

    async def work(runtime: RuntimeDir) -> None:
        context: zmq.Context[Any] = zmq.Context()
        link = TrainerLink(context, runtime.endpoint("trainer"), 1)  # type: ignore[arg-type]
        socket = connect_dealer(context, runtime.endpoint("trainer"), b"rank-0")
        playing = asyncio.create_task(rank(socket))
        await link.ready(10.0)
        with pytest.raises(SyncError, match="trainer rank 0 could not send: the group is broken"):
            await link.send(lambda r: Send(request=r, version=SEND.version, timeout_s=1.0), 10.0)
        assert not link.is_lost
        sent = await link.send(lambda r: Send(request=r, version=SEND.version, timeout_s=1.0), 10.0)
        assert sent.digest == "d"
        await playing
        await link.close()
        socket.close()
        context.term()

    runtime = RuntimeDir.create()
    try:
        asyncio.run(work(runtime))
    finally:
        runtime.remove()
