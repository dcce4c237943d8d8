"""A real run with a league: past selves and bots are met as the rule says, a resume goes on with them, a tournament rates them."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from pathlib import Path

import pytest
from tests.runs import TINY, Run

from selfplay.league import LeagueRecords

pytestmark = pytest.mark.engine
LEAGUE = (
    "league.opponents=mix", "league.mix.uniform_past=1", "league.mix.fixed=1", 'league.fixed=["random"]',
    "league.snapshot_every=1", "league.pool=2", "train.batch=8",
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("league")
    run = Run(folder, "train", "--env", "debate-v0", "train.steps=4", "name=l", "--json", *TINY, *LEAGUE)
    assert run.wait(400) == 0, run.error_text()
    return run


def members(folder: Path) -> dict[str, list[int]]:
    with sqlite3.connect(folder / "runs/l/league.sqlite") as db:
        rows = db.execute("SELECT agent, version FROM snapshots WHERE standing = 'member' ORDER BY version").fetchall()
    db.close()
    return {a: [v for agent, v in rows if agent == a] for a in ("pro", "con")}


def test_one_learns_and_the_others_are_drawn(trained: Run) -> None:
    with LeagueRecords.open(trained.folder / "runs/l/league.sqlite") as records:
        games = list(records.games())
    assert len(games) >= 32
    met = Counter(g.players["con"].partition("@")[0] for g in games if int(g.episode_id.partition(".")[0]) % 2)
    assert set(met) <= {"con", "random"}
    assert min(met["con"], met["random"]) >= sum(met.values()) / 6
    assert not any("past" in p for g in games for p in g.players.values())
    assert {a: len(v) for a, v in members(trained.folder).items()} == {"pro": 2, "con": 2}
    assert "is an opponent from now on" in trained.error_text()


def test_a_resume_goes_on_with_the_same_opponents_and_a_tournament_rates_them(trained: Run) -> None:
    before = members(trained.folder)
    run = Run(trained.folder, "resume", "runs/l", "train.steps=5", "--json")
    assert run.wait(400) == 0, run.error_text()
    after = members(trained.folder)
    assert all(set(after[a]) & set(before[a]) for a in before)
    words = (
        "--players",
        "runs/l/adapters/pro",
        "random",
        "--pairs",
        "2",
        "--anchor",
        "random=0",
        "--out",
        "T",
        "--json",
    )
    played = Run(trained.folder, "tournament", "--env", "debate-v0", "-p", "rounds=1", *words)
    assert played.wait(400) == 0, played.error_text()
    result = json.loads(played.out.read_text().splitlines()[-1])["standings"]
    names = {p["player"] for p in result["ratings"]["players"]}
    assert "random" in names
    assert len(names) >= 4
    assert all(p["elo"] is not None for p in result["ratings"]["players"])
    assert "Rating over training" in (trained.folder / "T/report.html").read_text("utf-8")
