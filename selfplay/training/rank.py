"""``python -m selfplay.training.rank JSON``: the process of one trainer rank.

    controller (ROUTER)  ──ToTrainer──►  rank (DEALER)          one message at a time, answered in order
                         ◄─FromTrainer─

It says `TrainerHello` when it is wholly ready. A send or a join that failed is refused; whatever else goes wrong ends it: `TrainerFailed` with one line, the traceback
in the log, exit code 1; a rank that lost another one has nothing left to compute. torch is imported after its
environment variables are set.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq.asyncio

from selfplay.errors import EXIT_FAULT, EXIT_OK, EXIT_USER, SyncError
from selfplay.process import live_with_parent
from selfplay.training.config import RankConfig
from selfplay.wire.codec import Codec
from selfplay.wire.messages import (
    PROTOCOL,
    FromTrainer,
    JoinWeights,
    Send,
    Stop,
    ToTrainer,
    TrainerFailed,
    TrainerHello,
    TrainerRefused,
)
from selfplay.wire.sockets import connect_dealer, receive, unique_identity

if TYPE_CHECKING:
    from selfplay.training.service import TrainerService

LAST_WORDS_MS = 2000
"""How long the last message may take to reach the controller."""
MAX_MESSAGE = 2000


def main(argv: list[str]) -> int:
    """Run the rank; the exit code."""
    try:
        config = msgspec.json.decode(argv[1] if len(argv) == 2 else "", type=RankConfig)
    except msgspec.DecodeError as e:
        print(f"usage: python -m selfplay.training.rank RANKCONFIG-AS-JSON ({e})", file=sys.stderr)
        return EXIT_USER
    live_with_parent(Path(config.runtime_dir))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's to answer: it asks the ranks to stop
    set_environment(config.config.train.threads)
    return asyncio.run(serve(config))


def set_environment(threads: int) -> None:
    """Before torch and transformers are imported. OpenMP threads that spin while others compute slow all down tenfold."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["HF_HUB_OFFLINE"] = "1"  # the model is a folder; nothing here may look for it elsewhere


async def serve(config: RankConfig) -> int:
    """Start, say hello, answer until `Stop`. Calls are blocking on purpose: a rank does one thing at a time."""
    context = zmq.asyncio.Context()
    socket = connect_dealer(context, config.controller, unique_identity(f"trainer-{config.rank}"))
    outgoing: Codec[FromTrainer] = Codec(FromTrainer)
    request = 0
    try:
        from selfplay.training.service import TrainerService

        service = TrainerService.start(config)
        hello = TrainerHello(
            protocol=PROTOCOL, rank=config.rank, pid=os.getpid(), step=service.num_steps, versions=config.versions
        )
        await socket.send(outgoing.encode(hello))
        incoming: Codec[ToTrainer] = Codec(ToTrainer)
        while True:
            frames = await receive(socket)
            message = incoming.decode(frames[-1] if frames else b"")
            request = message.request
            await socket.send(outgoing.encode(answer(service, message, config.rank)))
            if isinstance(message, Stop):
                return EXIT_OK
    except Exception as error:  # noqa: BLE001 (the process's boundary: every fault is reported, then the rank ends)
        traceback.print_exc()
        await socket.send(outgoing.encode(TrainerFailed(request=request, rank=config.rank, message=one_line(error))))
        return EXIT_FAULT
    finally:
        socket.close(linger=LAST_WORDS_MS)
        context.term()


def answer(service: TrainerService, message: Any, rank: int) -> Any:
    """The service's answer. A move of weights that failed has changed nothing here: it is refused, and the rank goes on."""
    try:
        return service.handle(message)
    except SyncError as error:
        if not isinstance(message, Send | JoinWeights):
            raise
        return TrainerRefused(request=message.request, rank=rank, message=one_line(error))


def one_line(error: Exception) -> str:
    """The error in one line: our own errors in their words, others with their type."""
    lines = str(error).strip().splitlines() or [""]
    known = type(error).__module__ == "selfplay.errors"
    return (lines[0] if known else f"{type(error).__name__}: {lines[0]}")[:MAX_MESSAGE]


if __name__ == "__main__":
    code = main(sys.argv)
    sys.stdout.flush()
    sys.stderr.flush()
    if code == EXIT_FAULT:
        os._exit(code)  # a broken process group may hang for its whole timeout in torch's own clean-up
    sys.exit(code)
