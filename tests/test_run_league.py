"""Real runs with a league: who is met how often is as each rule says; a resume goes on with pool, matrix and gate; agents are taken back."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from tests.runs import TINY, Run

from selfplay.cli.main import main
from selfplay.league import LeagueRecords
from selfplay.league.pool import SnapshotPool
from selfplay.store.adapters import AdapterStore
from selfplay.tournament.gamelog import read_episode, read_lines
from selfplay.tournament.spec import STOPPED_BY_RESULT

pytestmark = pytest.mark.engine
CROWD = str(Path(__file__).with_name("crowd_game.py"))
QUICK = (
    *TINY,
    "policy.engine=transformers",
    "train.batch=32",
    "rollout.concurrency=32",
    "lora.rank=2",
    'lora.targets=["q_proj"]',
)
RULES = {
    "s0": "latest", "s1": "mirror", "s2": "uniform_past", "s3": "pfsp_hard", "s4": "pfsp_even", "s5": "psro_nash",
    "s6": "fixed", "s7": "mix",
}  # fmt: skip
EVERY_RULE = (
    *(f"league.rules.{agent}={rule}" for agent, rule in RULES.items()), 'league.fixed=["base"]', "league.mix.openskill=1",
    "league.mix.fixed=2", "league.snapshot_every=1", "league.pool=2", "train.steps=4",
)  # fmt: skip
GATE = (
    "league.opponents=uniform_past", "league.snapshot_every=1", "league.gate=true", "league.gate_elo=[0, 700]",
    "league.gate_error=0.4", "league.gate_pairs=4", "league.exploiters.spy.target=player_0", "train.steps=3", "train.batch=12",
)  # fmt: skip


def finished(run: Run) -> Run:
    assert run.wait(400) == 0, run.error_text()
    return run


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight agents, each with a rule of its own."""
    folder = tmp_path_factory.mktemp("crowd")
    return finished(Run(folder, "train", "--env", CROWD, "name=c", "--json", *QUICK, *EVERY_RULE)).folder / "runs/c"


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of two agents and an exploiter, with a gate that decides within a few pairs."""
    folder = tmp_path_factory.mktemp("gated")
    return finished(Run(folder, "train", "--env", "kuhn-poker-v0", "name=g", "--json", *QUICK, *GATE))


def test_who_is_met_how_often_is_as_each_rule_says(crowd: Path) -> None:
    with contextlib.closing(SnapshotPool(crowd / "league.sqlite", write=False)) as pool:
        meetings = pool.meetings()
    assert {(m.agent, m.rule) for m in meetings if m.rule == RULES[m.agent]} == set(RULES.items())
    for m in meetings:
        assert m.met == pytest.approx(m.expected) or abs(m.surprise) < 4, m
    by_rule = {rule: sum(m.met for m in meetings if m.rule == rule) for rule in RULES.values()}
    assert min(by_rule[r] for r in ("uniform_past", "pfsp_hard", "pfsp_even", "psro_nash")) >= 80
    mix = {m.opponent: m.expected for m in meetings if m.rule == "mix"}
    assert mix["fixed"] == pytest.approx(2 * mix["openskill"])


def test_the_games_on_record_are_those_that_were_drawn(crowd: Path) -> None:
    """Told by the players of the games alone, without what the league says of its draws."""
    with LeagueRecords.open(crowd / "league.sqlite") as records:
        games = [(list(RULES)[int(g.episode_id.partition(".")[0]) % 8], g.players) for g in records.games()]
    assert len(games) >= 128
    lineages = [(learner, Counter(p.partition("@")[0] for p in players.values())) for learner, players in games]
    assert not any("past" in name for _, met in lineages for name in met)
    for learner, met in lineages:
        if RULES[learner] == "mirror":
            assert met == {learner: 8}
        elif RULES[learner] == "fixed":
            assert met == {learner: 1, "base": 7}
        elif RULES[learner] != "mix":
            assert met == dict.fromkeys(RULES, 1)
    frozen = [players for learner, players in games if RULES[learner] == "uniform_past"]
    versions = Counter(p.rpartition("@")[2] for players in frozen for seat, p in players.items() if seat != "s2")
    assert len(versions) >= 2


def test_a_tournament_rates_the_checkpoints_of_a_run(crowd: Path, tmp_path: Path) -> None:
    words = ("--players", str(crowd / "adapters/s0"), "random", "--pairs", "2", "--anchor", "random=0", "--out", "T")
    played = finished(Run(tmp_path, "tournament", "--env", "kuhn-poker-v0", *words, "--json"))
    ratings = json.loads(played.out.read_text().splitlines()[-1])["standings"]["ratings"]["players"]
    assert "random" in {p["player"] for p in ratings}
    assert len(ratings) >= 3
    assert all(p["elo"] is not None for p in ratings)
    assert "Rating over training" in (tmp_path / "T/report.html").read_text("utf-8")


# ── gate, resume, rollback ───────────────────────────────────────────────────────────────────────


def standings(run: Path) -> list[Any]:
    with contextlib.closing(sqlite3.connect(run / "league.sqlite")) as db:
        return db.execute("SELECT agent, version, digest, standing, incumbent FROM snapshots ORDER BY 1, 2").fetchall()


def games_of(run: Path) -> dict[str, Any]:
    with LeagueRecords.open(run / "league.sqlite") as records:
        return {g.episode_id: g for g in records.games()}


def test_the_gate_decides_who_is_an_opponent(gated: Run) -> None:
    run, text = gated.folder / "runs/g", gated.error_text()
    assert "is before the gate" in text
    assert "takes the place of" in text or "is not shown to be better than" in text
    found = standings(run)
    assert {a for a, *_ in found} == {"player_0", "player_1", "spy"}
    assert Counter(a for a, _, _, _, incumbent in found if incumbent) == {"player_0": 1, "player_1": 1, "spy": 1}
    gate_games = [g for name, g in games_of(run).items() if len(name) > 18]
    assert len(gate_games) >= 8
    assert all("@" in p and ".." not in p for g in gate_games for p in g.players.values())
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["league/gate_games"] >= 8
    assert last["accounting/stored"] == 36  # the gate's games are not the run's
    spied = [g for name, g in games_of(run).items() if len(name) <= 18 and g.players["player_1"].startswith("spy@")]
    assert all(g.players["player_0"].startswith("player_0@") for g in spied)
    assert spied


def test_games_of_the_gate_are_kept_whole_and_shown_like_a_tournaments(
    gated: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run = gated.folder / "runs/g"
    lines = read_lines(run / "gate")
    recorded = {g.episode_id: g for name, g in games_of(run).items() if len(name) > 18}
    episodes = {line.game: read_episode(run / "gate", line.episode or 0) for line in lines}
    assert {e.episode_id for e in episodes.values()} == set(recorded)
    assert all(line.seats == recorded[episodes[line.game].episode_id].players for line in lines)
    assert main(["rate", str(run / "gate"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["standings"]["ratings"]
    assert STOPPED_BY_RESULT in told["remarks"]
    assert {p for line in lines for p in line.seats.values()} == {p["player"] for p in told["players"]}
    assert "biased away from 0" in (run / "gate/report.html").read_text()
    assert (
        main(
            [
                "tournament",
                "--env",
                "kuhn-poker-v0",
                "--players",
                "random",
                "equilibrium",
                "--pairs",
                "1",
                "--out",
                str(run / "T"),
            ]
        )
        == 0
    )
    assert main(["rate", str(run / "T"), "--merge", str(run / "gate"), "--json"]) == 0
    merged = json.loads(capsys.readouterr().out.splitlines()[-1])["standings"]["ratings"]
    assert any("groups never met" in r for r in merged["remarks"])
    assert main(["replay", str(run / "gate"), lines[-1].game, "--show-private"]) == 0
    assert lines[-1].game in capsys.readouterr().out
    assert main(["replay", str(run), "3"]) == 0
    assert "kuhn-poker-v0" in capsys.readouterr().out
    assert main(["replay", str(run), "9999"]) == 2
    assert "no game '9999'" in capsys.readouterr().err
    assert main(["tournament", "resume", str(run / "gate")]) == 2
    assert "promotion gate" in capsys.readouterr().err


def test_a_resume_goes_on_with_pool_matrix_and_gate_and_takes_an_agent_back(gated: Run) -> None:
    """At the last step an agent that says nothing legal is in alarm: it goes back to what it was when the run was resumed.

    Games of the gate that a crash kept from the record are put there from the gate's log.
    """
    run = gated.folder / "runs/g"
    before, games, store = standings(run), games_of(run), AdapterStore(run / "adapters")
    good = store.latest("player_0")
    assert good is not None
    with contextlib.closing(sqlite3.connect(run / "league.sqlite")) as db, db:
        assert db.execute("DELETE FROM games WHERE length(episode_id) > 18").rowcount > 0
    watched = ("league.on_alarm=rollback", "league.window=8", "league.max_illegal=0.0", "league.opponents=latest")
    again = finished(Run(gated.folder, "resume", "runs/g", "train.steps=4", "--json", *watched))
    after = {(a, v): row for a, v, *row in standings(run)}
    assert all(after[a, v][0] == digest for a, v, digest, *_ in before)
    assert {(a, v) for a, v, _, standing, _ in before if standing == "member"} <= set(after)
    assert games.items() <= games_of(run).items()
    now = store.latest("player_0")
    assert now is not None
    assert f"player_0 goes back to {good} of step 3 as {now}" in again.error_text()
    assert now.version > good.version + 1
    assert (store.info(now).parent, store.verify(now).digest) == (good, store.verify(good).digest)
    last = max((run / "checkpoints").iterdir(), key=lambda p: int(p.name)) / "trainer"
    kept, saved = load_all(run / f"good/player_0/{good.version}"), load_all(last)
    state = {name: value for name, value in kept.items() if name.startswith("player_0.")}
    assert {n.partition(".")[2] for n in state} == {"flat", "exp_avg", "exp_avg_sq", "counts", "reference"}
    assert min(state["player_0.counts"].tolist()) >= 1
    assert all((saved[name] == value).all() for name, value in state.items())
    baselines = json.loads((run / f"good/player_0/{good.version}/baselines.json").read_text())
    assert set(baselines) == {'["kuhn-poker-v0","player_0","player_0"]'}
    assert baselines.items() <= json.loads((last.parent / "state.json").read_text())["state"]["algorithm"].items()


def load_all(folder: Path) -> dict[str, Any]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def test_a_run_says_where_its_league_stands(gated: Run) -> None:
    shown = finished(Run(gated.folder, "runs", "show", "g", "--json"))
    facts = json.loads(shown.out.read_text().splitlines()[-1])["league"]
    assert "best" in facts["snapshots player_0"]
    assert any(name.startswith("met by spy (exploit)") for name in facts)
