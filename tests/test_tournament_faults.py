"""Tournaments that are killed, and players whose server misbehaves: nothing lost, nothing twice, nothing invented."""

from __future__ import annotations

import asyncio
import json
import random
import re
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
from selfplay.registry import make_environment
from selfplay.tournament.gamelog import GameLine, read_episode, read_lines
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


TYPED = ("tournament", "--env", "kuhn-poker-v0", "--players", "random", "equilibrium", "--pairs", "100000")


def results(lines: list[GameLine]) -> dict[str, object]:
    return {x.game: (x.seats, x.winners, x.rewards, x.ended, x.reason, x.turns) for x in lines}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "words", [TYPED, ("match", "random", "equilibrium", *TYPED[1:3], "--pairs", "100000", "--sprt=-100,-99")]
)
def test_who_interrupts_is_told_how_to_go_on(words: tuple[str, ...], number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "selfplay.cli.main", *words, "--out", "T"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        games = tmp_path / "T" / "games.jsonl"
        while not (games.exists() and games.stat().st_size):
            assert child.poll() is None
            time.sleep(0.05)
        child.send_signal(number)
        out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (130, "")
    assert err.splitlines()[-2:] == [
        "finished games are kept; go on with  selfplay tournament resume T", "selfplay: interrupted",
    ]  # fmt: skip


def test_kill_9_at_twenty_moments_loses_no_pair_and_plays_none_twice(tmp_path: Path) -> None:
    """The killed tournament ends with exactly the games, and the ratings, of one that nobody disturbed.

    A game takes at least two of the moments, so that the lives together cannot come to the end of the tournament.
    """
    spec = kuhn(pairs=100, concurrency=4)
    total = 6 * spec.pairs
    assert total >= KILLS * MOMENTS / 2
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


SHARE = 0.3
KINDS = ("401", "500", "never", "closes")
GAME = str(Path(__file__).with_name("dealt_game.py"))
API_SEATS = re.compile(r"deal (\d+) (\w+) turn (\d)")


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What goes wrong in a game: at which of the player's two decisions, and in how many attempts."""

    kind: str
    turn: int
    attempts: int


def fault_of(game: str) -> Fault | None:
    """The same for every attempt of a game; None for 70 % of all games."""
    rng = random.Random(game)
    if rng.random() >= SHARE:
        return None
    return Fault(kind=rng.choice(KINDS), turn=rng.choice((0, 1)), attempts=rng.choice((1, 2)))


def move_of(game: str, turn: int) -> str:
    """What the model behind the server says: a function of the game and the turn."""
    return random.Random(f"{game}/{turn}").choice(("left", "right"))


class Server(ThreadingHTTPServer):
    """Chat completions; in a share of the games of the model called shaky it misbehaves."""

    daemon_threads = True

    def __init__(self, faulty: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.faulty = faulty
        self.games: set[str] = set()
        """Of the shaky model."""
        self.faults: Counter[tuple[str, str]] = Counter()
        """(game, kind) → how often."""
        self.guard = threading.Lock()

    def fault(self, model: str, game: str, turn: int) -> str:
        """What to do wrong now; empty: nothing."""
        if model != "shaky":
            return ""
        with self.guard:
            self.games.add(game)
            plan = fault_of(game) if self.faulty else None
            if plan is None or turn // 2 != plan.turn or self.faults[game, plan.kind] >= plan.attempts:
                return ""
            self.faults[game, plan.kind] += 1
            return plan.kind


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.close_connection = True
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        deal, seat, turn = API_SEATS.findall(asked["messages"][-1]["content"])[0]
        fault = self.server.fault(asked["model"], f"{deal} {seat}", int(turn))
        if fault == "never":
            self.connection.settimeout(60)
            self.connection.recv(1)  # until the player has given up
        elif fault in ("401", "500"):
            self.send_error(int(fault))
        else:
            move = move_of(f"{asked['model']} {deal} {seat}", int(turn))
            reply = json.dumps({"choices": [{"message": {"content": move}, "finish_reason": "stop"}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply[: len(reply) // 2] if fault == "closes" else reply)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(faulty: bool) -> Iterator[Server]:
    server = Server(faulty)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def api_tournament(server: Server) -> TournamentSpec:
    options = {"base": f"http://127.0.0.1:{server.server_address[1]}/v1", "timeout_s": 2.0, "retries": 0}
    models = [Entrant(name=n, player="api", options={**options, "model": n}) for n in ("shaky", "sound")]
    return kuhn(env=GAME, seats=("first", "second"), players=(BOTS[0], *models), pairs=20, concurrency=8)


def by_deal(folder: Path) -> dict[object, object]:
    return {(x.cluster, tuple(x.seats.values())): (x.rewards, x.reason, x.ended, x.turns) for x in read_lines(folder)}


def test_a_server_that_fails_in_30_percent_of_a_players_games_changes_no_result(tmp_path: Path) -> None:
    """What it spoils is played again: results and ratings are those of the sound server, and no move is made up."""
    folders, spoilt = {}, {}
    for name in ("clean", "faulty"):
        with served(name == "faulty") as server:
            spec = api_tournament(server)
            folders[name] = new_folder(tmp_path / name, spec)
            played = asyncio.run(play_tournament(spec, folders[name], config=Config(), say=lambda _: None))
            spoilt[name] = sum(played.replayed.values())
    assert len(server.games) == 80
    assert 0.2 < len({game for game, _ in server.faults}) / len(server.games) < 0.4
    assert {kind for _, kind in server.faults} == set(KINDS)
    assert spoilt["faulty"] >= sum(server.faults.values()) > spoilt["clean"]
    assert by_deal(folders["faulty"]) == by_deal(folders["clean"])
    for line in read_lines(folders["faulty"]):
        for turn in read_episode(folders["faulty"], line.episode or 0).turns:
            who = line.seats[turn.seat]
            if who != "random":
                deal = make_environment(GAME, {}, line.seed).deal  # type: ignore[attr-defined]
                assert turn.text == move_of(f"{who} {deal} {turn.seat}", turn.round)
    shaky, clean = (conclude(read_tournament(folders[n])).ratings.of("shaky") for n in ("faulty", "clean"))
    assert shaky.low <= clean.elo <= shaky.high
    assert shaky.elo == pytest.approx(clean.elo)
