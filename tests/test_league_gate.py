"""The gate promotes who proved to be better and nobody else, and stands after a restart where it stood; exploiters meet their target."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import msgspec
import pytest

from selfplay.config import load_config
from selfplay.config.league import ExploiterConfig, LeagueConfig
from selfplay.errors import ConfigError
from selfplay.league import LeagueRecords, Matchmaker, game_record
from selfplay.league.gate import Gate
from selfplay.league.league import League, check_league
from selfplay.league.pool import Good, Snapshot, SnapshotPool
from selfplay.registry import describe
from selfplay.types import Episode, Match, PolicyVersion

Wins = Callable[[Match], str]
"""Who wins a game: the name of a seat, or nothing for a draw."""
KNOWN = ("llm", "random", "human")


@cache
def maker_of(*overrides: str, env: str = "kuhn-poker-v0") -> Matchmaker:
    config = load_config(None, [f"env={env}", "seed=3", *overrides])
    return Matchmaker(describe(env, dict(config.env_params)), config, known_players=KNOWN)


SHARED = ("seats.player_0.agent=solo", "seats.player_1.agent=solo")


class Site:
    """A gate before which ``agent@4`` stands, with ``@1`` as the incumbent of every agent."""

    def __init__(self, folder: Path, maker: Matchmaker, agent: str, *, most: int = 1000, **config: object) -> None:
        self.maker, self.folder = maker, folder
        self.config = LeagueConfig(gate=True, **config)  # type: ignore[arg-type]
        self.records, self.pool = LeagueRecords.open(folder / "league.sqlite"), SnapshotPool(folder / "league.sqlite")
        if not self.pool.all():
            for name in maker.trained_agents:
                first = PolicyVersion(name, 1)
                self.pool.add(Snapshot(version=first, step=0, digest="d", standing="member", incumbent=True))
            self.pool.add(Snapshot(version=PolicyVersion(agent, 4), step=3, digest="e", standing="candidate"))
        self.league = League(maker, self.config, self.pool, self.records, seed=3)
        self.gate = Gate(maker, self.config, self.pool, seed=3, most=most)
        self.gate.refresh(self.records.games())

    def play(self, num: int, wins: Wins, ended: str = "natural") -> None:
        """Up to ``num`` games, or until the gate has decided; into the record at the end."""
        games = []
        while len(games) < num and self.gate.wants() and self.outcome == "open":
            match = self.gate.next_match()
            games.append(played(match, wins(match), ended))
            self.gate.take(match, game_record(games[-1]))
        self.records.add(games)

    @property
    def outcome(self) -> str:
        verdict = self.gate.verdict
        return "none" if verdict is None else verdict.outcome

    def close(self) -> None:
        self.records.close()
        self.pool.close()


def played(match: Match, winner: str, ended: str = "natural") -> Episode:
    rewards = {s.seat: float(s.seat == winner) for s in match.seats}
    return Episode(
        match=match, env_source="s", turns=(), rewards=rewards, winners=(winner,) if winner else (), ended=ended, reason="",  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.fixture
def solo(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path, maker_of(*SHARED), "solo")
    yield site
    site.close()


def names(match: Match) -> tuple[str, ...]:
    return tuple(f"{s.agent}@{s.pin}" for s in match.seats)


def seat_of(match: Match, name: str) -> str:
    return next(s.seat for s in match.seats if f"{s.agent}@{s.pin}" == name)


def better(match: Match) -> str:
    """The candidate wins three deals of four."""
    candidate, incumbent = (seat_of(match, f"past-solo@{n}") for n in (4, 1))
    return incumbent if match.seed % 4 == 0 else candidate


def test_one_agent_at_both_seats_meets_its_incumbent_with_the_seats_swapped(solo: Site) -> None:
    one, two = solo.gate.match(0, 0), solo.gate.match(0, 1)
    assert {names(one), names(two)} == {("past-solo@4", "past-solo@1"), ("past-solo@1", "past-solo@4")}
    assert one.seed == two.seed != solo.gate.match(1, 0).seed
    assert not any(s.trained for s in one.seats)
    assert solo.gate.owns(one)
    assert not solo.gate.owns(solo.maker.match(5))
    assert msgspec.json.decode(msgspec.json.encode(one), type=Match) == one


def test_the_better_one_is_promoted_and_an_equal_or_worse_one_is_not(solo: Site, tmp_path: Path) -> None:
    solo.play(400, better)
    assert solo.outcome == "promoted"
    verdict = solo.gate.verdict
    assert verdict is not None
    assert "solo@4 takes the place of solo@1" in str(verdict)
    assert solo.league.decide(verdict) == []
    assert str((solo.pool.incumbent("solo") or pytest.fail("no incumbent")).version) == "solo@4"
    solo.gate.refresh(solo.records.games())
    assert solo.outcome == "none"
    assert not solo.gate.wants()
    for name, wins in (("even", lambda m: m.seats[m.seed % 2].seat), ("worse", lambda m: seat_of(m, "past-solo@1"))):
        (tmp_path / name).mkdir()
        other = Site(tmp_path / name, maker_of(*SHARED), "solo")
        other.play(400, wins)
        verdict = other.gate.verdict
        assert verdict is not None
        assert verdict.outcome == "rejected"
        assert other.league.decide(verdict) == [PolicyVersion("solo", 4)]
        assert [str(s.version) for s in other.pool.members()] == ["solo@1"]
        other.close()


def test_agents_with_seats_of_their_own_are_compared_on_the_same_deals(tmp_path: Path) -> None:
    site = Site(tmp_path, maker_of(), "player_1")
    assert names(site.gate.match(7, 0)) == ("past-player_0@1", "past-player_1@4")
    assert names(site.gate.match(7, 1)) == ("past-player_0@1", "past-player_1@1")
    site.play(400, lambda m: "player_1" if "past-player_1@4" in names(m) else ("player_0", "player_1")[m.seed % 2])
    assert site.outcome == "promoted"
    site.close()


def test_a_weak_seat_is_no_weakness(tmp_path: Path) -> None:
    """Both lose every deal as the second player: level, though the candidate never won a game."""
    site = Site(tmp_path, maker_of(), "player_1")
    site.play(400, lambda m: "player_0")
    assert site.gate.verdict is not None
    assert (site.outcome, site.gate.verdict.score) == ("rejected", 0.5)
    site.close()


def test_one_agent_at_many_seats_takes_one_of_them(tmp_path: Path) -> None:
    spec = describe("liars-dice-v0", {"players": 3})
    maker = maker_of("env_params.players=3", *(f"seats.{s}.agent=solo" for s in spec.seats), env="liars-dice-v0")
    site = Site(tmp_path, maker, "solo")
    seatings = [names(site.gate.match(pair, half)) for pair in range(3) for half in (0, 1)]
    assert [s.count("past-solo@4") for s in seatings] == [1, 0, 1, 0, 1, 0]
    assert len(set(seatings)) == 4
    site.close()


def test_a_resumed_gate_stands_where_it_stood(solo: Site) -> None:
    solo.play(11, better)
    before, half_way = solo.gate.verdict, solo.gate.next_match()
    solo.close()
    again = Site(solo.folder, solo.maker, "solo")
    assert again.gate.verdict == before
    assert before is not None
    assert before.pairs == 5
    assert again.gate.wants()
    assert again.gate.next_match() == half_way  # it was under way, and is played again
    again.play(400, better)
    games = [g.episode_id for g in again.records.games()]
    assert len(games) == len(set(games))
    assert again.outcome == "promoted"
    again.close()


def test_a_restart_behind_the_promotion_gives_the_old_incumbent_its_place_back(solo: Site) -> None:
    solo.play(400, better)
    assert solo.gate.verdict is not None
    solo.league.decide(solo.gate.verdict)
    solo.pool.go_back(2)
    solo.pool.crown_where_none("solo")
    assert str((solo.pool.incumbent("solo") or pytest.fail("no incumbent")).version) == "solo@1"


def test_what_is_no_result_decides_nothing(solo: Site) -> None:
    match = solo.gate.next_match()
    assert solo.gate.is_used(PolicyVersion("solo", 4))
    solo.gate.void(match)
    again = solo.gate.next_match()
    assert (again.index, again.attempt, again.seats) == (match.index, 1, match.seats)
    solo.gate.take(again, None)  # the environment raised: its pair does not count
    solo.play(2, lambda m: "", ended="truncated")
    assert not solo.gate.is_used(PolicyVersion("solo", 4))
    assert solo.gate.verdict is not None
    assert (solo.gate.verdict.pairs, solo.outcome) == (0, "open")


def test_the_gate_gives_up_after_so_many_pairs_and_keeps_to_its_slots(tmp_path: Path) -> None:
    site = Site(tmp_path, maker_of(*SHARED), "solo", gate_pairs=3, most=4)
    under_way = [site.gate.next_match() for _ in range(4)]
    assert not site.gate.wants()
    for match in under_way:
        site.gate.take(match, game_record(played(match, better(match))))
    site.play(10, better)
    assert site.gate.verdict is not None
    assert (site.gate.verdict.pairs, site.outcome) == (3, "rejected")
    site.close()


def test_candidates_are_tested_one_after_the_other(solo: Site) -> None:
    solo.pool.add(Snapshot(version=PolicyVersion("solo", 9), step=5, digest="f", standing="candidate"))
    solo.play(400, better)
    assert solo.gate.verdict is not None
    solo.league.decide(solo.gate.verdict)
    late = played(solo.gate.match(300, 0), "")
    solo.gate.refresh(solo.records.games())
    assert names(solo.gate.match(0, 0)) == ("past-solo@9", "past-solo@4")
    solo.gate.take(late.match, game_record(late))  # of the test before: on record, and no matter here
    assert solo.gate.verdict.pairs == 0


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"gate": True, "gate_elo": (50.0, 0.0)}, "league.gate_elo: .*elo0 < elo1"),
        ({"exploiters": {"spy": ExploiterConfig(target="solo")}, "rules": {"spy": "latest"}}, "meets its target"),
    ],
)
def test_gates_that_cannot_be_are_refused(config: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_league(LeagueConfig(**config), ("solo",), KNOWN)  # type: ignore[arg-type]


# ── exploiters ───────────────────────────────────────────────────────────────────────────────────


def table(maker: Matchmaker, name: str = "spy") -> dict[str, tuple[str, object, bool]]:
    return {s.seat: (s.agent, s.pin, s.trained) for s in maker.table_of(name)}


@pytest.mark.parametrize(
    ("target", "seats"),
    [
        ("player_0", {"player_0": ("player_0", "turn", False), "player_1": ("spy", "turn", True)}),
        ("player_1", {"player_0": ("spy", "turn", True), "player_1": ("player_1", "turn", False)}),
        ("player_0@3", {"player_0": ("player_0", 3, False), "player_1": ("spy", "turn", True)}),
        ("base", {"player_0": ("spy", "turn", True), "player_1": ("base", "turn", False)}),
        ("random", {"player_0": ("spy", "turn", True), "player_1": ("random", "turn", False)}),
    ],
)
def test_an_exploiter_learns_against_its_target_alone(target: str, seats: dict[str, tuple[str, object, bool]]) -> None:
    maker = maker_of(f"league.exploiters.spy.target={target}")
    assert maker.trained_agents == ("player_0", "player_1", "spy")
    assert table(maker) == seats
    assert maker.frozen_versions == ((PolicyVersion("player_0", 3),) if "@" in target else ())


def test_exploiters_take_turns_with_the_others_and_their_snapshots_are_met(tmp_path: Path) -> None:
    maker = maker_of("league.exploiters.spy.target=player_0", "league.opponents=uniform_past")
    config = LeagueConfig(opponents="uniform_past", exploiters={"spy": ExploiterConfig(target="player_0")})
    records, pool = LeagueRecords.open(tmp_path / "l"), SnapshotPool(tmp_path / "l")
    league = League(maker, config, pool, records, seed=3)
    for agent in maker.trained_agents:
        league.add_snapshot(PolicyVersion(agent, 0), 0, agent)
    learners = [{s.agent for s in league.match(i).seats if s.trained} for i in range(6)]
    assert learners == [{"player_0"}, {"player_1"}, {"spy"}] * 2
    met = {league.match(i).assignment("player_1").agent for i in range(0, 120, 3)}
    assert met == {"past-player_1", "past-spy"}
    assert {league.match(i).assignment("player_0").agent for i in range(1, 120, 3)} == {"past-player_0"}
    league.note_meetings()
    found = {(m.agent, m.opponent): m for m in pool.meetings()}
    assert found["spy", "player_0"].met == 2
    assert found["player_0", "spy@0"].met + found["player_0", "player_1@0"].met == 40
    assert abs(found["player_0", "spy@0"].surprise) < 3.5
    records.close()
    pool.close()


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ("league.exploiters.spy.target=player_9",),
            r"league\.exploiters\.spy\.target='player_9' is nobody .*player_0",
        ),
        (("league.exploiters.spy.seat=player_1",), "target='' is nobody"),
        (
            ("league.exploiters.spy.target=player_0", "league.exploiters.spy.seat=player_0"),
            "that is the target's only seat",
        ),
        (("league.exploiters.spy.target=player_0", "league.exploiters.spy.seat=x"), "has no seat 'x'"),
        (("league.exploiters.player_1.target=player_0",), "sits at the table already"),
    ],
)
def test_exploiters_that_cannot_be_are_refused(overrides: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        maker_of(*overrides)


# ── going back ───────────────────────────────────────────────────────────────────────────────────


def test_snapshots_behind_a_rollback_are_met_no_more(solo: Site) -> None:
    assert solo.league.withdraw("solo", 2) == [PolicyVersion("solo", 4)]
    solo.gate.refresh(solo.records.games())
    assert solo.outcome == "none"
    assert solo.league.withdraw("solo", 2) == []


def test_good_versions_are_forgotten_with_the_steps_they_belong_to(solo: Site) -> None:
    marks = [Good(version=PolicyVersion("solo", n), step=n * 10, proven=n < 2) for n in (1, 2)]
    solo.pool.set_good("solo", marks)
    assert solo.pool.good("solo") == marks
    solo.pool.go_back(15)
    assert solo.pool.good("solo") == marks[:1]
