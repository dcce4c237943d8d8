"""What is played, what was played, and that nothing is lost or counted twice."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from selfplay.config import Config
from selfplay.config.schema import JuryConfig
from selfplay.errors import StoreError, UserError
from selfplay.launch.tournament import Played, new_folder, play_tournament
from selfplay.ratings.shares import wilson
from selfplay.tournament.gamelog import LOG_NAME, GameLine, GameLog, read_episode, read_lines
from selfplay.tournament.results import conclude, payoff_csv, read_tournament, write_results
from selfplay.tournament.scheduler import Scheduler, _neighbours
from selfplay.tournament.spec import Entrant, TournamentSpec, all_tables
from selfplay.tournament.standings import standings

BOTS = (
    Entrant(name="random", player="random"),
    Entrant(name="eq", player="equilibrium"),
    Entrant(name="bluff", player="equilibrium", options={"alpha": 0.3}),
)


def kuhn(**changes: object) -> TournamentSpec:
    spec = TournamentSpec(
        env="kuhn-poker-v0", env_source="test", seats=("player_0", "player_1"), players=BOTS, pairs=3, concurrency=4
    )
    return msgspec.structs.replace(spec, **changes)


def play(spec: TournamentSpec, folder: Path) -> Played:
    return asyncio.run(play_tournament(spec, folder, config=Config(), say=lambda _: None))


def line(game: str, pair: int, players: tuple[str, str], winner: int = 0) -> GameLine:
    seats = dict(zip(("player_0", "player_1"), players, strict=True))
    names = tuple(seats)
    return GameLine(
        game=game, cluster=f"{'|'.join(sorted(players))}#{pair}", table=tuple(sorted(players)), pair=pair, seats=seats,
        seed=1, ended="natural", reason="", winners=(names[winner],), rewards={names[winner]: 1.0, names[1 - winner]: -1.0},
        turns=2,
    )  # fmt: skip


def test_a_pair_is_one_deal_in_both_seatings_and_ids_are_hashes() -> None:
    spec = kuhn()
    first, second = spec.table_games(("random", "eq"), 1)
    assert (first.seating, second.seating) == (("random", "eq"), ("eq", "random"))
    assert (
        spec.match(first, 0).seed
        == spec.match(second, 3).seed
        != spec.match(spec.table_games(("random", "eq"), 2)[0], 0).seed
    )
    assert first.id == kuhn().table_games(("random", "eq"), 1)[0].id
    assert first.id != kuhn(seed=1).table_games(("random", "eq"), 1)[0].id
    assert first.cluster == second.cluster


def test_the_same_game_before_another_jury_is_another_game() -> None:
    judges = (
        {}, {"jury": JuryConfig(agent="api", api_model="a")}, {"jury": JuryConfig(agent="api", api_model="b")},
        {"jury": JuryConfig(agent="j@1"), "judge": Entrant(name="j", player="llm", digest="one")},
        {"jury": JuryConfig(agent="j@1"), "judge": Entrant(name="j", player="llm", digest="two")},
    )  # fmt: skip
    ids = {kuhn(**changes).table_games(("random", "eq"), 1)[0].id for changes in judges}
    assert len(ids) == len(judges)


def test_tables_of_many_seats() -> None:
    assert len(all_tables("abcd", 3)) == 4
    assert all_tables("ab", 3) == [("a", "a", "b"), ("a", "b", "b")]
    three = kuhn(seats=("player_0", "player_1", "player_2"))
    assert len({g.seating for g in three.table_games(("random", "eq", "bluff"), 0)}) == 3
    assert len(three.table_games(("random", "random", "eq"), 0)) == 3


def test_every_game_of_a_round_robin_is_played_once_and_resumed_without_playing(tmp_path: Path) -> None:
    spec = kuhn()
    folder = new_folder(tmp_path / "t", spec)
    assert play(spec, folder).num_new == 18
    whole = folder.joinpath(LOG_NAME).read_bytes()
    folder.joinpath(LOG_NAME).write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    assert any(
        "1 pair without a result in every seating" in r for r in conclude(read_tournament(folder)).ratings.remarks
    )
    folder.joinpath(LOG_NAME).write_bytes(whole)
    assert not any("every seating" in r for r in conclude(read_tournament(folder)).ratings.remarks)
    again = play(TournamentSpec.load(folder), folder)
    assert (again.num_new, again.num_games, again.outcome) == (0, 18, "finished")
    lines = read_lines(folder)
    assert Counter(line.cluster for line in lines) == Counter({c: 2 for c in {line.cluster for line in lines}})
    episode = read_episode(folder, lines[0].episode or 0)
    assert tuple(a.agent for a in episode.match.seats)
    with pytest.raises(UserError, match="resume"):
        new_folder(folder, spec)


def test_the_same_tournament_gives_the_same_games(tmp_path: Path) -> None:
    results = []
    for name in ("a", "b"):
        spec = kuhn(concurrency=1 if name == "a" else 16)
        folder = new_folder(tmp_path / name, spec)
        play(spec, folder)
        results.append({x.game: (x.rewards, x.winners, x.reason) for x in read_lines(folder)})
    assert results[0] == results[1]


def test_a_torn_last_line_is_played_over_and_an_unlisted_episode_is_listed(tmp_path: Path) -> None:
    spec = kuhn()
    folder = new_folder(tmp_path / "t", spec)
    play(spec, folder)
    path = folder / LOG_NAME
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    assert len(read_lines(folder)) == 17
    found = play(spec, folder)
    assert found.num_games == 18
    assert {x.game for x in read_lines(folder)} == {msgspec.json.decode(x)["game"] for x in whole.splitlines()}
    assert max(Counter(x.episode for x in read_lines(folder)).values()) == 1


def test_damage_inside_the_log_and_a_game_twice_are_errors(tmp_path: Path) -> None:
    lines = [msgspec.json.encode(line(f"{k:016x}", k, ("eq", "random"))) for k in range(3)]
    path = tmp_path / LOG_NAME
    path.write_bytes(b"\n".join([lines[0], b"{broken", lines[2], b""]))
    with pytest.raises(StoreError, match="line 2"):
        read_lines(tmp_path)
    path.write_bytes(b"\n".join([lines[0], lines[0], b""]))
    with pytest.raises(StoreError, match="twice"):
        read_lines(tmp_path)
    path.write_bytes(b"\n".join([*lines, b""]))
    log = GameLog.open(tmp_path, print)
    with pytest.raises(ValueError, match="recorded already"):
        log.add_lines([line(f"{0:016x}", 0, ("eq", "random"))])
    log.close()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    import fcntl

    spec = kuhn()
    folder = new_folder(tmp_path / "t", spec)
    fd = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(UserError, match="another process"):
        play(spec, folder)
    os.close(fd)


def test_budgets_stop_and_a_resume_goes_on(tmp_path: Path) -> None:
    spec = kuhn(budget_time_s=0.001, pairs=200)
    folder = new_folder(tmp_path / "t", spec)
    first = play(spec, folder)
    assert first.outcome == "budget: time"
    assert 0 < first.num_games < 1200
    second = play(msgspec.structs.replace(spec, budget_time_s=0.0, pairs=20), folder)
    assert second.outcome == "finished"


def every_game(spec: TournamentSpec, lines: dict[str, GameLine] | None = None) -> list[tuple[str, ...]]:
    """Games in order when each is finished before the next is asked for; the first seat wins."""
    lines = {} if lines is None else lines
    scheduler, out = Scheduler(spec, lines), []
    while (game := scheduler.next()) is not None:
        out.append(game.seating)
        names = (game.seating[0], game.seating[1])
        winner = 0 if names[0] < names[1] else 1
        found = line(game.id, game.pair, names, winner)
        lines[game.id] = msgspec.structs.replace(found, table=game.table, cluster=game.cluster)
    return out


def test_a_gauntlet_is_the_first_player_against_the_rest() -> None:
    games = every_game(kuhn(schedule="gauntlet"))
    assert len(games) == 12
    assert all("random" in g for g in games)


def test_swiss_lets_everybody_play_and_meet_anew() -> None:
    players = tuple(Entrant(name=n, player="random", options={}) for n in "abcde")
    spec = kuhn(schedule="swiss", players=players, pairs=4)
    games = every_game(spec)
    assert len(games) == 4 * 2 * 2
    met = Counter(frozenset(g) for g in games)
    assert set(met.values()) == {2}, met  # both seatings of each pair, and no pair met twice
    played = Counter(p for g in games for p in g)
    assert max(played.values()) - min(played.values()) <= 2


def fewest(order: list[str], met: Counter[frozenset[str]]) -> int:
    """Repeated meetings of the best pairing there is, by trying all."""
    if not order:
        return 0
    first, rest = order[0], order[1:]
    return min(met[frozenset((first, b))] + fewest([x for x in rest if x != b], met) for b in rest)


@pytest.mark.parametrize("seed", range(60))
def test_a_swiss_round_repeats_as_few_meetings_as_can_be(seed: int) -> None:
    rng = random.Random(seed)
    order = [f"p{i}" for i in range(rng.choice([4, 6, 8]))]
    met = Counter({frozenset(pair): rng.choice([0, 0, 1, 2]) for pair in itertools.combinations(order, 2)})
    rng.shuffle(order)
    pairs = _neighbours(order, 2, met)
    assert sorted(itertools.chain(*pairs)) == sorted(order)
    assert sum(met[frozenset(pair)] for pair in pairs) == fewest(order, met)


def test_a_first_swiss_round_pairs_neighbours() -> None:
    assert _neighbours(["a", "b", "c", "d"], 2, Counter()) == [("a", "b"), ("c", "d")]


def test_active_plays_the_comparison_that_was_asked_for() -> None:
    players = tuple(Entrant(name=n, player="random") for n in "abcd")
    spec = kuhn(schedule="active", players=players, pairs=10, compare=("b", "c"))
    lines: dict[str, GameLine] = {}
    games = Counter(frozenset(g) for g in every_game(spec, lines))
    assert sum(games.values()) == 10 * 6 * 2
    assert games[frozenset("bc")] > 3 * sum(games.values()) / 6
    assert min(games.values()) >= 4
    half = dict(list(lines.items())[:41])
    rest = every_game(spec, half)
    assert len(rest) == 120 - 41


def test_merging_and_what_does_not_belong_together(tmp_path: Path) -> None:
    one, two = kuhn(pairs=2), kuhn(pairs=2, seed=5)
    folders = [new_folder(tmp_path / str(i), spec) for i, spec in enumerate((one, two))]
    for folder, spec in zip(folders, (one, two), strict=True):
        play(spec, folder)
    found = read_tournament(folders[0], [folders[1]])
    assert len(found.lines) == 24
    result = conclude(found)
    assert result.ratings.num_games == 24
    other = new_folder(tmp_path / "x", kuhn(env="tictactoe-v0", seats=("x", "o")))
    with pytest.raises(UserError, match="tictactoe"):
        read_tournament(folders[0], [other])
    twin = new_folder(tmp_path / "y", kuhn(players=(Entrant(name="eq", player="equilibrium", options={"alpha": 0.1}),)))
    with pytest.raises(UserError, match="another player"):
        read_tournament(folders[0], [twin])


def test_results_are_files_that_hold_together(tmp_path: Path) -> None:
    evil = Entrant(name="<script>alert(1)</script>", player="random")
    spec = kuhn(players=(*BOTS, evil), pairs=5)
    folder = new_folder(tmp_path / "t", spec)
    play(spec, folder)
    found = read_tournament(folder)
    result = conclude(found)
    write_results(folder, found, result)
    html = (folder / "report.html").read_text("utf-8")
    assert "<script" not in html
    assert "http" not in html.replace("http-equiv", "")
    assert "&lt;script&gt;" in html
    assert html.count("<svg") >= 5
    rows = payoff_csv(spec, result).splitlines()
    assert len(rows) == 5
    assert msgspec.json.decode((folder / "ratings.json").read_bytes())["ratings"]["num_games"] == 60
    assert sum(r.mean for r in result.rewards.values()) == pytest.approx(0.0, abs=1e-9)
    assert set(result.seat_scores) == {"player_0", "player_1"}
    assert len(result.by_seat) == 4 * 3 * 2


def test_a_record_by_seat_counts_each_game_from_both_sides() -> None:
    """random as player_0: 2 won, 1 lost, 1 drawn of 4; never as player_1."""
    games = [line(str(k), k, ("random", "eq"), winner) for k, winner in enumerate((0, 0, 1))]
    drawn = msgspec.structs.replace(
        games[0], game="3", cluster=games[1].cluster, winners=(), rewards={"player_0": 0.0, "player_1": 0.0}
    )
    unscored = msgspec.structs.replace(games[0], game="4", ended="truncated")
    records = standings([*games, drawn, unscored], ["random", "eq"], {}).by_seat
    assert [(r.player, r.opponent, r.seat, r.games) for r in records] == [
        ("eq", "random", "player_1", 4), ("random", "eq", "player_0", 4),
    ]  # fmt: skip
    assert [(r.won.share, r.drawn.share, r.not_lost.share) for r in records] == [(0.25, 0.25, 0.5), (0.5, 0.25, 0.75)]
    deals = {g.cluster for g in games}
    assert (records[1].not_lost.low, records[1].not_lost.high) == pytest.approx(wilson(3 * len(deals) / 4, len(deals)))
