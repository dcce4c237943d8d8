"""League records: idempotent, durable, honest about draws, forfeits, mirrors and mixed versions."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from episode_samples import episode, seat, turn
from selfplay.errors import StoreError
from selfplay.league import LeagueRecords, game_record
from selfplay.league.records import SCHEMA
from selfplay.types import Episode

LOSS: dict[str, Any] = {"rewards": {"pro": -1.0, "con": 1.0}, "winners": ("con",)}
DRAW: dict[str, Any] = {"rewards": {"pro": 0.0, "con": 0.0}, "winners": ()}
OLD = (seat("pro"), seat("con", "old", trained=False, pin=0))
MIRROR = (seat("pro", "solo"), seat("con", "solo"))


@pytest.fixture
def records(tmp_path: Path) -> Iterator[LeagueRecords]:
    with LeagueRecords.open(tmp_path / "league.sqlite") as opened:
        yield opened


def test_a_game_comes_back_as_it_was(records: LeagueRecords) -> None:
    records.add([episode(3, versions={"pro": 2, "con": 5})])
    (game,) = records.games()
    assert game == game_record(episode(3, versions={"pro": 2, "con": 5}))
    assert (game.episode_id, game.players, game.winners, game.turns, game.tokens) == (
        "3.0",
        {"pro": "pro@2", "con": "con@5"},
        ("pro",),
        2,
        8,
    )


def test_recording_twice_changes_nothing(records: LeagueRecords, tmp_path: Path) -> None:
    assert records.add([episode(0), episode(1)]) == 2
    assert records.add([episode(1), episode(2)]) == 1
    records.close()
    with LeagueRecords.open(tmp_path / "league.sqlite") as again:
        assert again.add([episode(0)]) == 0
        assert len(again) == 3


def test_one_id_with_two_results_is_a_fault_and_nothing_of_the_batch_is_kept(records: LeagueRecords) -> None:
    records.add([episode(0)])
    with pytest.raises(StoreError, match=r"game 0\.0 is on record with another result"):
        records.add([episode(9), episode(0, **LOSS)])
    assert [g.episode_id for g in records.games()] == ["0.0"]


def test_games_by_environment(records: LeagueRecords) -> None:
    records.add([episode(0), episode(1, env="tictactoe-v0")])
    assert [g.episode_id for g in records.games("tictactoe-v0")] == ["1.0"]


def test_seeds_of_63_bits_survive(records: LeagueRecords) -> None:
    import msgspec

    big = episode(0)
    big = msgspec.structs.replace(big, match=msgspec.structs.replace(big.match, seed=2**63 - 1))
    records.add([big])
    assert next(records.games()).seed == 2**63 - 1


def test_shares_per_seat(records: LeagueRecords) -> None:
    records.add([episode(0), episode(1), episode(2, **LOSS), episode(3, **DRAW)])
    shares = records.seat_shares()
    assert (shares["pro"].wins, shares["pro"].draws, shares["pro"].losses) == (2, 1, 1)
    assert shares["pro"].win_share == 0.625
    assert shares["con"].win_share == 0.375
    assert records.seat_shares(last=2)["pro"].win_share == 0.25
    assert records.seat_shares(last=0) == {}


def test_equal_players_that_only_draw_have_half_each(records: LeagueRecords) -> None:
    records.add([episode(i, **DRAW) for i in range(4)])
    assert {s: share.win_share for s, share in records.seat_shares().items()} == {"pro": 0.5, "con": 0.5}


def test_no_games_no_share(records: LeagueRecords) -> None:
    assert records.seat_shares() == {}
    assert records.payoffs() == {}


def test_forfeits_and_truncated_games_are_counted_apart(records: LeagueRecords) -> None:
    records.add([episode(0, ended="forfeit", offender="con"), episode(1, ended="truncated", **DRAW)])
    shares = records.seat_shares()
    assert (shares["pro"].won_by_forfeit, shares["con"].forfeited, shares["pro"].truncated) == (1, 1, 1)
    assert shares["pro"].played == shares["con"].played == 0
    assert shares["pro"].win_share is None
    cell = records.payoffs()["pro@0", "con@0"]
    assert (cell.won_by_forfeit, cell.truncated, cell.played, cell.mean_reward) == (1, 1, 0, None)


def test_when_both_forfeit_nobody_won(records: LeagueRecords) -> None:
    records.add([episode(0, ended="forfeit", offender="pro", winners=(), rewards={"pro": -1.0, "con": -1.0})])
    shares = records.seat_shares()
    assert [(s.forfeited, s.won_by_forfeit) for s in shares.values()] == [(1, 0), (1, 0)]


def test_the_payoff_matrix_is_between_versions(records: LeagueRecords) -> None:
    records.add(
        [
            episode(0, versions={"pro": 0, "con": 0}),
            episode(1, versions={"pro": 1, "con": 0}),
            episode(2, versions={"pro": 1, "con": 0}, **LOSS),
            episode(3, versions={"pro": 1, "con": 0}, **DRAW),
        ]
    )
    payoffs = records.payoffs()
    assert set(payoffs) == {("pro@0", "con@0"), ("con@0", "pro@0"), ("pro@1", "con@0"), ("con@0", "pro@1")}
    cell, mirror = payoffs["pro@1", "con@0"], payoffs["con@0", "pro@1"]
    assert (cell.wins, cell.draws, cell.losses, cell.mean_reward) == (1, 1, 1, 0.0)
    assert (mirror.wins, mirror.draws, mirror.losses) == (1, 1, 1)


def test_what_is_added_later_is_counted_once_and_changes_no_earlier_answer(
    records: LeagueRecords, tmp_path: Path
) -> None:
    given = []
    for i in range(5):
        records.add([episode(i, versions={"pro": i // 2, "con": 0}), episode(0, versions={"pro": 0, "con": 0})])
        given.append(records.payoffs())
        with LeagueRecords.open(tmp_path / "league.sqlite") as reader:
            assert reader.payoffs() == given[-1]
    assert [sum(p.games for p in payoffs.values()) for payoffs in given] == [2, 4, 6, 8, 10]


def test_a_player_is_not_compared_with_itself(records: LeagueRecords) -> None:
    records.add([episode(0, seats=MIRROR)])
    assert records.payoffs() == {}
    assert records.seat_shares()["pro"].wins == 1


def test_a_seat_of_two_versions_stays_out_of_comparisons(records: LeagueRecords) -> None:
    turns = (turn("pro", (1,), (2,), version=1), turn("con", (1,), (2,)), turn("pro", (1,), (2,), version=2))
    records.add([episode(0, turns=turns)])
    assert next(records.games()).players["pro"] == "pro@1..2"
    assert records.payoffs() == {}
    assert records.seat_shares()["pro"].wins == 1


@pytest.mark.parametrize(
    ("assignment", "player"),
    [
        (seat("con", "random", trained=False, player="random"), "random"),
        (seat("con", "base", trained=False), "base"),
        (seat("con", "old", trained=False, pin=7), "old@7"),
        (seat("con"), "con@?"),
    ],
)
def test_names_of_players_that_sampled_nothing(assignment: Any, player: str) -> None:
    only_pro = (turn("pro", (1,), (2,)),)
    assert game_record(episode(seats=(seat("pro"), assignment), turns=only_pro)).players["con"] == player


def three(index: int, winners: tuple[str, ...], rewards: tuple[float, float, float]) -> Episode:
    seats = (seat("a"), seat("b"), seat("c"))
    return episode(index, seats=seats, winners=winners, rewards=dict(zip("abc", rewards, strict=True)))


def test_three_seats_are_compared_pair_by_pair(records: LeagueRecords) -> None:
    records.add([three(0, ("a",), (2, -1, -1)), three(1, ("a", "b"), (1, 1, -2)), three(2, ("a", "b", "c"), (0, 0, 0))])
    payoffs = records.payoffs()
    ab, bc = payoffs["a@0", "b@0"], payoffs["b@0", "c@0"]
    assert (ab.wins, ab.draws, ab.losses) == (1, 2, 0)
    assert (bc.wins, bc.draws, bc.losses) == (1, 2, 0)
    shares = records.seat_shares()
    assert (shares["a"].wins, shares["a"].draws, shares["c"].losses) == (2, 1, 2)


# ── the file ─────────────────────────────────────────────────────────────────────────────────────


def test_no_side_files_are_left(records: LeagueRecords, tmp_path: Path) -> None:
    records.add([episode(0)])
    records.close()
    assert [p.name for p in tmp_path.iterdir()] == ["league.sqlite"]


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "league.sqlite"
    path.write_bytes(b"not a database, not at all" * 100)
    with pytest.raises(StoreError, match=r"league\.sqlite cannot be read or written: file is not a database"):
        LeagueRecords.open(path)


def test_a_newer_layout_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "league.sqlite"
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version={SCHEMA + 1}")
    db.close()
    with pytest.raises(StoreError, match="use a newer selfplay"):
        LeagueRecords.open(path)


def test_an_unwritable_place_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="unable to open database file"):
        LeagueRecords.open(tmp_path / "absent" / "league.sqlite")


def test_a_damaged_row_is_named(records: LeagueRecords, tmp_path: Path) -> None:
    records.add([episode(0)])
    db = sqlite3.connect(tmp_path / "league.sqlite")
    with db:
        db.execute("UPDATE games SET players = 'x'")
    db.close()
    with pytest.raises(StoreError, match="cannot be read"):
        list(records.games())


def test_a_full_disk_is_named_as_that_and_what_was_there_stays(records: LeagueRecords) -> None:
    records.add([episode(0)])
    (pages,) = records._db.execute("PRAGMA page_count").fetchone()
    records._db.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(StoreError, match="full"):
        records.add([episode(i) for i in range(1, 500)])
    assert [g.episode_id for g in records.games()] == ["0.0"]


def test_an_interrupted_transaction_leaves_no_half_batch(records: LeagueRecords, tmp_path: Path) -> None:
    def games() -> Iterator[Episode]:
        yield episode(0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        records.add(games())
    assert len(records) == 0
    assert records.add([episode(0)]) == 1
    assert os.listdir(tmp_path) == ["league.sqlite"]  # noqa: PTH208 - the plain names are wanted
