"""Who meets whom is as the rule says; the pool and the watch remember and decide as told."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
from scipy import stats

from selfplay.config import Config
from selfplay.config.league import LeagueConfig
from selfplay.errors import ConfigError, MissingExtraError, StoreError
from selfplay.league import GameRecord, LeagueRecords, Matchmaker
from selfplay.league.league import League, check_league, league_slots
from selfplay.league.opponents import Tally, normalised, weights
from selfplay.league.pool import Snapshot, SnapshotPool
from selfplay.league.skill import Skills
from selfplay.league.watch import CollapseWatch, WatchLimits
from selfplay.registry import describe
from selfplay.types import Episode, Match, PolicyVersion, SeatAssignment, Span, Turn

AGENTS = ("player_0", "player_1")
NUM = 4000


@pytest.fixture(scope="module")
def maker() -> Matchmaker:
    spec = describe("kuhn-poker-v0", {})
    return Matchmaker(spec, Config(env="kuhn-poker-v0", seed=3), known_players=("llm", "random", "equilibrium"))


def game(number: int, players: tuple[str, str], winner: int, ended: str = "natural") -> GameRecord:
    seats = dict(zip(AGENTS, players, strict=True))
    return GameRecord(
        episode_id=f"{number}.0", env="e", env_source="s", seed=1, players=seats, ended=ended, reason="", offender=None,  # type: ignore[arg-type]
        winners=(AGENTS[winner],), rewards={AGENTS[winner]: 1.0, AGENTS[1 - winner]: -1.0}, turns=1, tokens=1,
    )  # fmt: skip


class Site:
    """A league with three snapshots of each agent and a record between them."""

    def __init__(self, folder: Path, maker: Matchmaker, **config: object) -> None:
        self.records = LeagueRecords.open(folder / "league.sqlite")
        self.pool = SnapshotPool(folder / "league.sqlite")
        self.league = League(maker, LeagueConfig(**config), self.pool, self.records, seed=3)  # type: ignore[arg-type]
        for n in range(3):
            for agent in AGENTS:
                self.league.add_snapshot(PolicyVersion(agent, n), n * 10, f"digest-{agent}-{n}")

    def met(self, num: int = NUM, first: int = 0) -> Counter[str]:
        """Opponents of player_0 in its own matches."""
        out = Counter[str]()
        for index in range(first, first + num, 2):
            match = self.league.match(index)
            other = match.assignment("player_1")
            assert match.assignment("player_0").trained
            out[f"{other.agent}@{other.pin}" if isinstance(other.pin, int) else other.agent] += 1
        return out


def ladder(number: int, wins: tuple[int, ...], version: int = 7) -> list[GameRecord]:
    """20 rounds in which player_0 meets each snapshot of player_1; so many of them it wins, at regular intervals."""
    rounds = [(k, n, won * k // 20 == won * (k + 1) // 20) for k in range(20) for n, won in enumerate(wins)]
    return [
        game(number + i, (f"player_0@{version}", f"player_1@{n}"), int(lost)) for i, (_, n, lost) in enumerate(rounds)
    ]


def record(site: Site, games: list[GameRecord]) -> None:
    with site.records._transaction():
        for row in games:
            site.records._insert(row)
    site.league.refresh()


def as_expected(found: Counter[str], expected: dict[str, float]) -> bool:
    """A chi-squared test at one in a thousand; nobody else was met."""
    assert set(found) <= set(expected), found
    counts = [found[k] for k in expected]
    total = sum(counts)
    return bool(stats.chisquare(counts, [p * total for p in expected.values()]).pvalue > 1e-3)


def test_latest_leaves_matches_alone(tmp_path: Path, maker: Matchmaker) -> None:
    site = Site(tmp_path, maker)
    assert all(site.league.match(i) == maker.match(i) for i in range(20))
    assert not site.league.due(10)


def test_mirror_seats_the_learner_everywhere(tmp_path: Path, maker: Matchmaker) -> None:
    site = Site(tmp_path, maker, opponents="mirror")
    for index in range(10):
        match = site.league.match(index)
        assert {s.agent for s in match.seats} == {AGENTS[index % 2]}
        assert all(s.trained for s in match.seats)


def test_uniform_past_and_anchors(tmp_path: Path, maker: Matchmaker) -> None:
    site = Site(tmp_path, maker, opponents="uniform_past", anchors=("random",))
    names = [f"past-player_1@{n}" for n in range(3)] + ["random"]
    assert as_expected(site.met(), dict.fromkeys(names, 0.25))


def test_fixed(tmp_path: Path, maker: Matchmaker) -> None:
    site = Site(tmp_path, maker, opponents="fixed", fixed=("random", "base"))
    assert as_expected(site.met(), {"random": 0.5, "base": 0.5})


@pytest.mark.parametrize(
    ("rule", "shape"), [("pfsp_hard", lambda p: (1 - p) ** 2), ("pfsp_even", lambda p: p * (1 - p))]
)
def test_pfsp_follows_the_record(tmp_path: Path, maker: Matchmaker, rule: str, shape: object) -> None:
    site = Site(tmp_path, maker, opponents=rule)
    record(site, ladder(1, (18, 10, 2)))
    rates = [(w + 1) / 22 for w in (18, 10, 2)]
    masses = [shape(p) for p in rates]  # type: ignore[operator]
    expected = {f"past-player_1@{n}": m / sum(masses) for n, m in enumerate(masses)}
    assert as_expected(site.met(), expected)


def test_psro_meets_the_equilibrium_of_the_past() -> None:
    cycle = {}
    for a, b in (("x@0", "x@1"), ("x@1", "x@2"), ("x@2", "x@0")):
        cycle[a, b], cycle[b, a] = Tally(50, 50), Tally(0, 50)
    names = ["x@0", "x@1", "x@2"]
    assert weights("psro_nash", "y", names, cycle) == pytest.approx([1 / 3] * 3, abs=1e-3)
    ladder = {
        ("x@2", "x@0"): Tally(50, 50),
        ("x@0", "x@2"): Tally(0, 50),
        ("x@2", "x@1"): Tally(50, 50),
        ("x@1", "x@2"): Tally(0, 50),
    }
    assert weights("psro_nash", "y", names, ladder)[2] > 0.99
    with pytest.raises(ValueError, match="no candidates"):
        weights("uniform_past", "y", [], {})


def test_openskill_meets_who_is_near_in_strength(tmp_path: Path, maker: Matchmaker) -> None:
    """The second snapshot is level, the others are beaten or never beaten; later the learner has grown to the third's strength."""
    site = Site(tmp_path, maker, opponents="openskill")
    names = [f"player_1@{n}" for n in range(3)]
    record(site, ladder(1, (20, 10, 0)))
    skills = Skills()
    skills.add(g for _, g in site.records.after(0))
    shares = normalised(skills.closeness("player_0", names))
    assert shares[1] > 3 * max(shares[0], shares[2])
    assert as_expected(site.met(), {f"past-{n}": w for n, w in zip(names, shares, strict=True)})
    record(site, ladder(1001, (20, 20, 10), version=8))
    skills.add(g for row, g in site.records.after(60))
    later = normalised(skills.closeness("player_0", names))
    assert later[2] > shares[2]
    assert later[2] > later[1] > later[0]
    assert as_expected(site.met(first=NUM), {f"past-{n}": w for n, w in zip(names, later, strict=True)})


def test_online_ratings_pass_from_version_to_version() -> None:
    skills = Skills()
    skills.add(ladder(1, (20, 20, 20)))
    grown = skills.rating("player_0@7")
    assert grown[0] > skills.rating("player_1@2")[0]
    assert skills.rating("player_0") == skills.rating("player_0@9") == grown
    assert skills.rating("player_0@6") == skills.rating("anybody")
    before = dict(skills._ratings)
    mixed = [game(1, ("player_0@?", "player_1@1"), 0), game(2, ("player_1@1", "player_1@1"), 0)]
    skills.add([*mixed, game(3, ("player_0@7", "player_1@1"), 0, "truncated")])
    assert skills._ratings == before
    skills.add([game(4, ("player_0@7..9", "player_1@1"), 0)])
    assert set(skills._ratings) - set(before) == {"player_0@9"}


def test_online_ratings_are_for_matchmaking_alone() -> None:
    rooms = Path(__file__).parent.parent / "selfplay"
    users = {str(p.relative_to(rooms)) for p in rooms.rglob("*.py") if "import Skills" in p.read_text("utf-8")}
    assert users == {"league/league.py"}


def test_openskill_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"league.opponents=openskill.*openskill"):
        check_league(LeagueConfig(mix={"openskill": 1.0}, opponents="mix"), AGENTS, ())


def test_mix_and_rules_of_an_agents_own(tmp_path: Path, maker: Matchmaker) -> None:
    site = Site(
        tmp_path,
        maker,
        opponents="mix",
        mix={"latest": 1.0, "fixed": 3.0},
        fixed=("random",),
        rules={"player_1": "mirror"},
    )
    assert as_expected(site.met(), {"player_1": 0.25, "random": 0.75})
    assert {s.agent for s in site.league.match(1).seats} == {"player_1"}


def test_the_next_attempt_meets_the_same_and_a_resumed_league_draws_from_the_same_pool(
    tmp_path: Path, maker: Matchmaker
) -> None:
    site = Site(tmp_path, maker, opponents="uniform_past", pool=2)
    assert [str(s.version) for s in site.league.snapshots if s.version.agent == "player_1"] == [
        "player_1@1",
        "player_1@2",
    ]
    before = [site.league.match(i).seats for i in range(40)]
    assert [site.league.match(i, 3).seats for i in range(40)] == before
    site.pool.close()
    site.records.close()
    records, pool = LeagueRecords.open(tmp_path / "league.sqlite"), SnapshotPool(tmp_path / "league.sqlite")
    again = League(maker, LeagueConfig(opponents="uniform_past", pool=2), pool, records, seed=3)
    assert [again.match(i).seats for i in range(40)] == before
    pool.go_back(10)
    again.refresh()
    assert [s.step for s in again.snapshots] == [10, 10]


def test_a_snapshot_is_needed_until_the_games_drawn_with_it_have_ended(tmp_path: Path, maker: Matchmaker) -> None:
    site = Site(tmp_path, maker, opponents="uniform_past")
    pins = {i: site.league.match(i).assignment("player_1").pin for i in range(0, 20, 2)}
    for version in range(3):
        drawn = [i for i, pin in pins.items() if pin == version]
        assert site.league.is_used(PolicyVersion("player_1", version), drawn[:1])
        assert not site.league.is_used(PolicyVersion("player_1", version), set(pins) - set(drawn))


def test_frozen_stays_frozen(tmp_path: Path, maker: Matchmaker) -> None:
    site = Site(tmp_path, maker, opponents="uniform_past")
    site.pool.add(
        Snapshot(version=PolicyVersion("player_0", 1), step=10, digest="digest-player_0-1", standing="member")
    )
    with pytest.raises(StoreError, match="frozen"):
        site.pool.add(Snapshot(version=PolicyVersion("player_0", 1), step=10, digest="another", standing="member"))


def test_snapshots_are_recorded_by_their_real_name(tmp_path: Path, maker: Matchmaker) -> None:
    site = Site(tmp_path, maker, opponents="uniform_past")
    match = site.league.match(0)
    pin = match.assignment("player_1").pin
    episode = msgspec.structs.replace(sample_episode(), match=match)
    site.records.add([episode])
    (record,) = site.records.games()
    assert record.players["player_1"] == f"player_1@{pin}"


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"rules": {"player_9": "latest"}}, "no trained agent"),
        ({"opponents": "mix"}, "needs league.mix"),
        ({"opponents": "mix", "mix": {"pfsp": 1.0}}, "pfsp_hard"),
        ({"opponents": "mix", "mix": {"latest": 0.0}}, "above 0"),
        ({"opponents": "fixed"}, "needs league.fixed"),
        ({"opponents": "fixed", "fixed": ("randm",)}, "random"),
        ({"anchors": ("base",)}, "not a bot"),
    ],
)
def test_leagues_that_cannot_be_are_refused(config: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_league(LeagueConfig(**config), AGENTS, ("llm", "random", "human"))  # type: ignore[arg-type]


def test_slots_are_counted_before_they_are_promised() -> None:
    assert league_slots(LeagueConfig(), 2) == 0
    assert league_slots(LeagueConfig(opponents="pfsp_hard", pool=3), 2) == 8


def sample_episode(text: str = "bet", legal: bool = True, logprob: float = -0.5, winner: str = "player_0") -> Episode:
    seats = (
        SeatAssignment(seat="player_0", player="llm", agent="player_0", trained=True),
        SeatAssignment(seat="player_1", player="random", agent="random"),
    )
    turn = Turn(
        seat="player_0", agent="player_0", round=0, prompt_ids=(1,), sampled_ids=(1, 2), logprobs=(logprob, logprob),
        spans=(Span(0, 0, 2),), stop_reason="stop", text=text, move=text if legal else None,
    )  # fmt: skip
    return Episode(
        match=Match(index=0, env="kuhn-poker-v0", seed=1, seats=seats), env_source="s", turns=(turn,),
        rewards={"player_0": 1.0, "player_1": -1.0}, winners=(winner,), ended="natural", reason="",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("limits", "late", "told"),
    [
        ({"min_anchor_share": 0.4}, {"winner": "player_1"}, "win share"),
        ({"min_entropy": 0.1}, {"logprob": -0.01}, "entropy"),
        ({"max_illegal": 0.5}, {"legal": False}, "illegal"),
        ({"max_repetition": 0.9}, {"text": "bet"}, "the same"),
    ],
)
def test_the_watch_sees_a_collapse(limits: dict[str, float], late: dict[str, object], told: str) -> None:
    watch = CollapseWatch("player_0", WatchLimits(window=20, **limits), anchors=("random",))  # type: ignore[arg-type]
    watch.add(sample_episode(text=("pass", "bet")[k % 2]) for k in range(20))
    assert watch.alarms() == {}
    assert watch.is_healthy
    watch.add(sample_episode(**late) for _ in range(19))  # type: ignore[arg-type]
    watch.add([sample_episode(**late)])  # type: ignore[arg-type]
    ((_, alarm),) = watch.alarms().items()
    assert not watch.is_healthy
    assert told in alarm
    assert np.isfinite(watch.health().entropy or 0.0)
