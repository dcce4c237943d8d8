"""``python -m selfplay.bench.pool_policy ADDRESS``: a policy server without a model, which answers at once.

It stands where the real server does, so that what is left to measure is everything around the model.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import zmq

from selfplay.agent import Answer
from selfplay.process import live_with_parent
from selfplay.types import Span
from selfplay.wire.codec import Codec
from selfplay.wire.messages import PROTOCOL, FromPolicy, Generate, Generated, PolicyHello, PolicyInfo, ToPolicy
from selfplay.wire.sockets import bind_router, receive, route

PROMPT_TOKENS, SAMPLED_TOKENS = 24, 8
ANSWER = Answer(
    text="word", prompt_ids=tuple(range(PROMPT_TOKENS)), sampled_ids=tuple(range(SAMPLED_TOKENS)),
    logprobs=(-0.5,) * SAMPLED_TOKENS, spans=(Span(version=0, start=0, end=SAMPLED_TOKENS),), stop_reason="stop",
)  # fmt: skip


async def serve(address: str) -> None:
    """Answer every request until the process is ended."""
    incoming, outgoing = Codec[Any](ToPolicy), Codec[Any](FromPolicy)
    router = bind_router(zmq.Context(), address)
    while True:
        identity, data = await receive(router) or (b"", b"")
        message = incoming.decode(data)
        if isinstance(message, Generate):
            reply: object = Generated(request=message.request, answer=ANSWER)
        elif isinstance(message, PolicyHello):
            reply = PolicyInfo(
                request=message.request, protocol=PROTOCOL, engine="none", model="none", max_model_len=1 << 20,
                max_live_adapters=0, stop_ids=(), probe_ids=(),
            )  # fmt: skip
        else:
            continue
        await route(router, identity, outgoing.encode(reply))


if __name__ == "__main__":
    live_with_parent()
    asyncio.run(serve(sys.argv[1]))
