"""An environment worker process: ``python -m selfplay.pool.worker JSON`` (a `WorkerConfig`).

One asyncio loop plays many episodes at once. It imports no torch, transformers or vllm.

    controller ── PlayMatch, CancelMatch, EpisodeAck, Drain ──► Worker ── Generate, Cancel, EndEpisode ──► policy server
               ◄─ WorkerHello, EpisodeDone, EpisodeFailed ──                (`ZmqPolicyClient`)

A result is kept and sent again until it is acknowledged. The worker leaves on SIGTERM, when it has drained, or when its
parent is gone; an interrupt from the terminal is the controller's business and ignored here.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from selfplay.errors import WireError
from selfplay.pool.board import Board, episode, watch_tasks
from selfplay.pool.config import WorkerConfig
from selfplay.pool.episodes import EpisodeRunner, failed
from selfplay.pool.outbox import Outbox
from selfplay.pool.policy_client import ZmqPolicyClient
from selfplay.process import live_with_parent
from selfplay.types import Match
from selfplay.wire.aio import AsyncSocket
from selfplay.wire.codec import Codec
from selfplay.wire.messages import (
    PROTOCOL,
    CancelMatch,
    ControllerMessage,
    EpisodeAck,
    EpisodeDone,
    EpisodeFailed,
    PlayMatch,
    WorkerHello,
    WorkerMessage,
)
from selfplay.wire.sockets import connect_dealer, receive

_TICK_S = 0.25
_FLUSH_S = 0.05
"""Between the last message and closing the sockets: they keep nothing back (linger 0)."""


class Worker:
    """Plays what it is given until it is told to leave."""

    def __init__(
        self,
        config: WorkerConfig,
        *,
        socket: AsyncSocket,
        runner: EpisodeRunner,
        board: Board,
        end_episode: Callable[[str], None],
    ) -> None:
        self._config, self._socket, self._runner, self._board = config, socket, runner, board
        self._end_episode = end_episode
        self._outgoing: Codec[WorkerMessage] = Codec(WorkerMessage)
        self._incoming: Codec[ControllerMessage] = Codec(ControllerMessage)
        self._playing: dict[str, asyncio.Task[EpisodeDone | EpisodeFailed]] = {}
        self._outbox = Outbox(socket.send, config.pool.resend_s)
        self._draining = False
        self._drained = asyncio.Event()
        self.num_bad_frames = 0

    async def run(self) -> None:
        """Say hello, then work until drained or cancelled; leaves no episode running."""
        hello = WorkerHello(protocol=PROTOCOL, worker=self._config.worker, pid=os.getpid())
        await self._socket.send(self._outgoing.encode(hello))
        try:
            async with asyncio.TaskGroup() as group:
                service = [group.create_task(loop()) for loop in (self._listen, self._outbox.run, self._tick)]
                await self._drained.wait()
                for task in service:
                    task.cancel()
        finally:
            await self._give_up()

    # ── messages in ───────────────────────────────────────────────────────────────────────────

    async def _listen(self) -> None:
        while True:
            frames = await receive(self._socket)
            try:
                message = self._incoming.decode(frames[0] if frames else b"")
            except WireError:
                self.num_bad_frames += 1
                continue
            self._handle(message)
            self._check_drained()

    def _handle(self, message: ControllerMessage) -> None:
        if isinstance(message, PlayMatch):
            self._begin(message.match)
        elif isinstance(message, EpisodeAck):
            self._outbox.forget(message.episode_id)
        elif isinstance(message, CancelMatch):
            if task := self._playing.get(message.episode_id):
                task.cancel()
        else:
            self._draining = True

    def _begin(self, match: Match) -> None:
        """Start an episode; one that is being played, or whose result waits for its ack, is not played twice."""
        if match.episode_id in self._playing or match.episode_id in self._outbox:
            return
        with episode(match.index, match.attempt):
            task = asyncio.create_task(self._runner.run(match), name=f"episode {match.episode_id}")
        self._playing[match.episode_id] = task
        # From outside, since a task that is cancelled before its first step never runs a line of its own.
        task.add_done_callback(functools.partial(self._ended, match))

    # ── results out ───────────────────────────────────────────────────────────────────────────

    def _ended(self, match: Match, task: asyncio.Task[EpisodeDone | EpisodeFailed]) -> None:
        del self._playing[match.episode_id]
        self._end_episode(match.episode_id)
        self._outbox.put(match.episode_id, self._encoded(match, task))

    def _encoded(self, match: Match, task: asyncio.Task[EpisodeDone | EpisodeFailed]) -> bytes:
        if task.cancelled():
            return self._outgoing.encode(failed(match, "cancelled", "cancelled as asked"))
        try:
            return self._outgoing.encode(task.result())
        except WireError as e:  # an episode over the size limit
            return self._outgoing.encode(failed(match, "environment", f"{match.env}: {e}"))

    # ── life ──────────────────────────────────────────────────────────────────────────────────

    async def _tick(self) -> None:
        while True:
            self._board.beat()
            await asyncio.sleep(_TICK_S)

    def _check_drained(self) -> None:
        if self._draining and not self._playing and not self._outbox:
            self._drained.set()

    async def _give_up(self) -> None:
        """Cancel what is being played, so that the policy server stops working for it."""
        for task in list(self._playing.values()):
            task.cancel()
        if self._playing:
            await asyncio.wait(list(self._playing.values()), timeout=self._config.pool.grace_s)
        await asyncio.sleep(_FLUSH_S)


async def _serve(config: WorkerConfig) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = connect_dealer(context, config.controller, config.worker.encode())
    board = Board(Path(config.board), create=False)
    endpoints = config.pool.policy_endpoints
    policy = ZmqPolicyClient(context, endpoints, request_timeout_s=config.pool.request_timeout_s) if endpoints else None
    loop = asyncio.get_running_loop()
    watch_tasks(loop, board)
    worker = Worker(
        config, socket=socket, runner=EpisodeRunner(config.pool, policy), board=board,
        end_episode=policy.end_episode if policy is not None else _nothing_to_end,
    )  # fmt: skip
    work = asyncio.create_task(worker.run(), name="worker")
    loop.add_signal_handler(signal.SIGTERM, work.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await work
    if policy is not None:
        await policy.close()
    socket.close()
    context.term()
    board.close()


def _nothing_to_end(episode_id: str) -> None:
    """Without a policy server nobody keeps anything for an episode."""


def main(argument: str) -> None:
    """Run one worker until it leaves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    config = msgspec.json.decode(argument, type=WorkerConfig)
    live_with_parent(Path(config.runtime_dir))
    asyncio.run(_serve(config))


if __name__ == "__main__":
    main(sys.argv[1])
