"""Tournaments that are killed, and players whose server misbehaves: nothing lost, nothing twice, nothing invented."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest
from tests.test_tournament_log import BOTS, kuhn, play

from selfplay.config import Config
from selfplay.launch.tournament import new_folder, play_tournament
from selfplay.tournament.gamelog import LOG_NAME, GameLine, read_lines
from selfplay.tournament.results import conclude, read_tournament
from selfplay.tournament.spec import Entrant, TournamentSpec

KILLS, MOMENTS = 20, 60
CHILD = """
import asyncio, os, signal, sys
from pathlib import Path
from selfplay.config import Config
from selfplay.launch.tournament import play_tournament
from selfplay.pool import PoolSupervisor
from selfplay.tournament.spec import TournamentSpec

folder, left, share = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])

def moment(before=lambda: None):
    global left
    left -= 1
    if left < 0:
        before()
        os.killpg(0, signal.SIGKILL)
        signal.pause()

def deadly(method):
    async def called(*args):
        moment()
        return await method(*args)
    return called

write, fsync = os.write, os.fsync
PoolSupervisor.submit, PoolSupervisor.ack = deadly(PoolSupervisor.submit), deadly(PoolSupervisor.ack)
os.write = lambda fd, data: (moment(lambda: write(fd, bytes(data)[: int(len(data) * share)])), write(fd, data))[1]
os.fsync = lambda fd: (moment(), fsync(fd))[1]
asyncio.run(play_tournament(TournamentSpec.load(folder), folder, config=Config(), say=lambda _: None))
"""
"""Plays on, and is killed with all its workers at the n-th moment that matters: handing out a game, in the middle of a write, before
an fsync, before an acknowledgement."""


def results(lines: list[GameLine]) -> dict[str, object]:
    return {x.game: (x.seats, x.winners, x.rewards, x.ended, x.reason, x.turns) for x in lines}


def test_kill_9_at_twenty_moments_loses_no_pair_and_plays_none_twice(tmp_path: Path) -> None:
    """The killed tournament ends with exactly the games, and the ratings, of one that nobody disturbed.

    A game takes at least two of the moments, so that the lives together cannot come to the end of the tournament.
    """
    spec = kuhn(pairs=100, concurrency=4)
    total = 6 * spec.pairs
    assert KILLS * MOMENTS / 2 <= total
    folder, calm = (new_folder(tmp_path / name, spec) for name in ("killed", "calm"))
    rng, lengths = random.Random(11), []
    for _ in range(KILLS):
        words = (str(folder), str(rng.randrange(MOMENTS)), str(rng.random()))
        child = subprocess.run([sys.executable, "-c", CHILD, *words], start_new_session=True, timeout=300)
        assert child.returncode == -signal.SIGKILL
        lengths.append(len(read_lines(folder)))
    assert lengths == sorted(lengths), "what was on record stays there"
    assert 0 < lengths[-1] < total
    assert play(spec, folder).num_games == total
    play(spec, calm)
    lines = read_lines(folder)
    assert max(Counter(x.game for x in lines).values()) == 1
    assert set(Counter(x.cluster for x in lines).values()) == {2}
    assert results(lines) == results(read_lines(calm))
    assert conclude(read_tournament(folder)).ratings == conclude(read_tournament(calm)).ratings


class Server(ThreadingHTTPServer):
    """Chat completions whose answer is a function of the chat; in a share of the games it misbehaves first."""

    daemon_threads = True

    def __init__(self, share: float) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.share, self.kinds = share, Counter[str]()
        self.asked: Counter[bytes] = Counter()
        self.guard = threading.Lock()

    def fault(self, body: bytes) -> str:
        """What to do wrong now: only the first time a chat is seen, in ``share`` of the chats."""
        digest = hashlib.blake2b(body, digest_size=4).digest()
        with self.guard:
            self.asked[body] += 1
            if self.asked[body] > 3 or random.Random(self.asked[body] * 1000 + digest[0]).random() >= self.share:
                return ""
            kind = ("401", "500", "never", "closes")[sum(self.kinds.values()) % 4]
            self.kinds[kind] += 1
            return kind


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        fault = self.server.fault(body)
        if fault == "never":
            time.sleep(1.0)
        elif fault in ("401", "500"):
            self.send_error(int(fault))
        else:
            move = ("pass", "bet")[hashlib.blake2b(body, digest_size=1).digest()[0] % 2]
            reply = json.dumps({"choices": [{"message": {"content": move}, "finish_reason": "stop"}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply[: len(reply) // 2] if fault == "closes" else reply)
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(share: float) -> Iterator[Server]:
    server = Server(share)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def api_tournament(server: Server) -> TournamentSpec:
    options = {"base": f"http://127.0.0.1:{server.server_address[1]}/v1", "model": "m", "timeout_s": 0.5, "retries": 0}
    return kuhn(players=(*BOTS, Entrant(name="api", player="api", options=options)), pairs=15, schedule="round-robin")


def test_a_misbehaving_server_changes_no_result(tmp_path: Path) -> None:
    found = {}
    for name, share in (("clean", 0.0), ("faulty", 0.3)):
        with served(share) as server:
            spec = api_tournament(server)
            folder = new_folder(tmp_path / name, spec)
            played = asyncio.run(play_tournament(spec, folder, config=Config(), say=lambda _: None))
            found[name] = (folder, played, Counter(server.kinds))
    folder, played, kinds = found["faulty"]
    assert set(kinds) == {"401", "500", "never", "closes"}
    assert sum(played.replayed.values()) >= sum(kinds.values()) / 2
    assert not found["clean"][1].replayed

    def by_deal(path: Path) -> dict[object, object]:
        return {(x.cluster, tuple(x.seats.values())): (x.rewards, x.reason) for x in read_lines(path)}

    assert by_deal(folder) == by_deal(found["clean"][0])
    ratings = [conclude(read_tournament(f)).ratings.of("api") for f in (folder, found["clean"][0])]
    assert ratings[0].elo == pytest.approx(ratings[1].elo)
    assert msgspec.json.encode(played.replayed)
