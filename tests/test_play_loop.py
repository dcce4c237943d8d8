"""The play loop: turns, retries, forfeits, caps, simultaneous moves, and that players are closed however it ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence

import pytest

from selfplay.agent import Answer, Decision
from selfplay.environment import Forfeit, Outcome
from selfplay.errors import EngineError, IllegalMove, UserError
from selfplay.play import play
from selfplay.play.loop import MAX_NOTE
from selfplay.types import Limits, Span, Turn, episode_faults
from toy_games import Scripted, Simultaneous, Turns, match_of, play_toy, seated

RNG = random.Random(0)


def test_a_whole_game_is_one_sound_episode() -> None:
    game = Turns(RNG)
    players = {
        "a": Scripted(Answer(text="x", prompt_ids=(1, 2), sampled_ids=(3,), logprobs=(-0.5,), spans=(Span(4, 0, 1),), stop_reason="stop")),
        "b": Scripted("y"),
    }  # fmt: skip
    episode = play_toy(game, players)
    assert episode_faults(episode) == []
    assert [(t.seat, t.round, t.move) for t in episode.turns] == [
        ("a", 0, "x"),
        ("b", 1, "y"),
        ("a", 2, "x"),
        ("b", 3, "y"),
    ]
    assert episode.turns[0].sampled_ids == (3,)
    assert episode.versions() == {"a": (4, 4)}
    assert (episode.ended, episode.winners, episode.rewards) == ("natural", ("a",), {"a": 1.0, "b": -1.0})
    assert (episode.reason, episode.env_source, episode.offender) == ("the first seat wins", "toys 1.0", None)
    assert [p.closed for p in players.values()] == [1, 1]


def test_each_seat_gets_its_own_rules_view_and_moves() -> None:
    class Own(Turns):
        def legal_moves(self, seat: str) -> Sequence[str]:
            return (f"{seat}1", f"{seat}2")

    game = Own(RNG, seats=("a", "b", "c"), length=6)
    players = seated(game, lambda s: Scripted(f"{s}1"))
    play_toy(game, players)
    for seat, player in players.items():
        first, second = player.asked
        assert first.rules == second.rules == f"rules for {seat}"
        assert first.view.startswith(f"view of {seat}")
        assert first.legal_moves == (f"{seat}1", f"{seat}2")
        assert (first.complaint, second.complaint) == ("", "")


def test_an_eliminated_seat_is_never_asked_again() -> None:
    class Elimination(Turns):
        """b is out as soon as a has moved once."""

        def to_move(self) -> Sequence[str]:
            order = ("a", "c", "a", "c")
            return () if len(self.played) == 4 else (order[len(self.played)],)

    game = Elimination(RNG, seats=("a", "b", "c"))
    players = seated(game)
    episode = play_toy(game, players)
    assert players["b"].asked == []
    assert players["b"].closed == 1
    assert set(episode.rewards) == {"a", "b", "c"}


# ── illegal moves ─────────────────────────────────────────────────────────────────────────────────


def test_a_retry_is_told_why_and_the_first_try_is_kept() -> None:
    game = Turns(RNG, length=2)
    players = {"a": Scripted("nonsense", "I say y"), "b": Scripted("x")}
    episode = play_toy(game, players)
    bad, good, _ = episode.turns
    assert (bad.move, good.move) == (None, "y")
    assert (bad.round, good.round) == (0, 0)
    assert players["a"].asked[1].complaint == bad.note == "not a legal move; answer with one of: x, y, z"
    assert players["a"].asked[1].view == players["a"].asked[0].view
    assert episode.ended == "natural"


def test_the_first_try_of_the_game_is_told_too() -> None:
    players = {"a": Scripted("?", "x"), "b": Scripted("x")}
    play_toy(Turns(RNG, length=1), players)
    assert players["a"].asked[1].complaint


@pytest.mark.parametrize("seats", [("a", "b"), ("a", "b", "c", "d")])
@pytest.mark.parametrize("retries", [0, 1, 3])
def test_rubbish_forfeits_as_declared(seats: tuple[str, ...], retries: int) -> None:
    game = Turns(RNG, seats=seats, length=9)
    game.forfeit = Forfeit(retries=retries)
    players = seated(game, lambda s: Scripted("rubbish" if s == "b" else "x"))
    episode = play_toy(game, players)
    assert (episode.ended, episode.offender) == ("forfeit", "b")
    assert episode.rewards == {s: -1.0 if s == "b" else 1.0 / (len(seats) - 1) for s in seats}
    assert episode.winners == tuple(s for s in seats if s != "b")
    assert len(players["b"].asked) == retries + 1
    assert f"b made no legal move in {retries + 1} tries" in episode.reason
    assert all(p.closed == 1 for p in players.values())


def test_an_empty_answer_is_an_illegal_move() -> None:
    stop_only = Answer(
        text="", prompt_ids=(1,), sampled_ids=(2,), logprobs=(-0.1,), spans=(Span(0, 0, 1),), stop_reason="stop"
    )
    episode = play_toy(Turns(RNG), {"a": Scripted(stop_only), "b": Scripted("x")})
    assert (episode.ended, episode.offender) == ("forfeit", "a")
    assert episode_faults(episode) == []


def test_a_length_cut_is_its_own_class() -> None:
    cut = Answer(text="I think that", sampled_ids=(1, 2, 3, 4, 5), logprobs=(-1.0,) * 5, stop_reason="length")
    players = {"a": Scripted(cut, "x"), "b": Scripted("x")}
    episode = play_toy(Turns(RNG, length=1), players)
    assert episode.turns[0].stop_reason == "length"
    assert episode.turns[0].note.startswith("the answer was cut at 5 tokens: ")
    assert players["a"].asked[1].complaint == episode.turns[0].note
    assert episode.ended == "natural"


def test_a_length_cut_that_names_a_move_stands() -> None:
    cut = Answer(text="x because", sampled_ids=(1, 2), logprobs=(-1.0,) * 2, stop_reason="length")
    episode = play_toy(Turns(RNG, length=1), {"a": Scripted(cut), "b": Scripted("x")})
    assert (episode.ended, episode.turns[0].move) == ("natural", "x")


def test_a_full_context_truncates_and_is_no_loss() -> None:
    full = Answer(text="", stop_reason="context")
    episode = play_toy(Turns(RNG), {"a": Scripted("x"), "b": Scripted(full)})
    assert (episode.ended, episode.winners, episode.rewards) == ("truncated", (), {"a": 0.0, "b": 0.0})
    assert episode.reason == "context: seat b reached the model's context length"
    assert len(episode.turns) == 2  # not tried again: it would be as full


def test_a_full_context_with_a_legal_move_plays_on() -> None:
    episode = play_toy(Turns(RNG), {"a": Scripted("x"), "b": Scripted(Answer(text="y", stop_reason="context"))})
    assert episode.ended == "natural"


def test_a_long_complaint_is_cut_to_fit() -> None:
    class Wordy(Turns):
        def parse(self, seat: str, text: str) -> str:
            raise IllegalMove("word " * 2000)

    episode = play_toy(Wordy(RNG), {"a": Scripted("x"), "b": Scripted("x")})
    assert len(episode.turns[0].note) == MAX_NOTE


def test_text_is_cleaned_and_a_giant_answer_is_refused() -> None:
    game = Turns(RNG)
    episode = play_toy(game, {"a": Scripted("x\ud83d y\0"), "b": Scripted("w" * 1_000_001)})
    assert episode.turns[0].text == "x� y�"
    assert episode.offender == "b"
    assert "1000001 characters" in episode.turns[1].note
    assert len(episode.turns[1].text) == 1_000_000


# ── simultaneous moves ────────────────────────────────────────────────────────────────────────────


def test_no_seat_is_shown_a_move_of_its_round() -> None:
    game = Simultaneous(RNG, length=3)
    game.result = Outcome(rewards={"a": 0.0, "b": 0.0})
    players = {"a": Scripted("x", "y", "z", delay_s=0.02), "b": Scripted("z", "y", "x")}
    episode = play_toy(game, players)
    assert [t.seat for t in episode.turns] == ["a", "b"] * 3  # in seat order, although b was quicker
    for player in players.values():
        assert [d.view for d in player.asked] == [f"played: {game.played[:k]}" for k in range(3)]
    assert game.played[0] == {"a": "x", "b": "z"}


def test_seats_of_a_round_are_asked_at_once() -> None:
    class Waits(Scripted):
        """Answers only when the other has been asked too."""

        def __init__(self, mine: asyncio.Event, other: asyncio.Event) -> None:
            super().__init__("x")
            self.mine, self.other = mine, other

        async def decide(self, decision: Decision) -> Answer:
            self.mine.set()
            await self.other.wait()
            return await super().decide(decision)

    game = Simultaneous(RNG, length=1)
    first, second = asyncio.Event(), asyncio.Event()
    episode = play_toy(game, {"a": Waits(first, second), "b": Waits(second, first)}, limits=Limits(time_s=5.0))
    assert episode.ended == "natural"


def test_a_retry_in_a_simultaneous_round_sees_nothing_either() -> None:
    game = Simultaneous(RNG, length=1)
    players = {"a": Scripted("bad", "x", delay_s=0.02), "b": Scripted("y")}
    play_toy(game, players)
    assert [d.view for d in players["a"].asked] == ["played: []", "played: []"]


def test_several_forfeits_in_one_round() -> None:
    three = Simultaneous(RNG, seats=("a", "b", "c"))
    episode = play_toy(three, seated(three, lambda s: Scripted("x" if s == "c" else "bad")))
    assert episode.rewards == {"a": -0.5, "b": -0.5, "c": 1.0}  # the sum is zero and c wins no more than declared
    assert episode.winners == ("c",)
    cooperative = Simultaneous(RNG, seats=("a", "b", "c"))
    cooperative.zero_sum = False
    episode = play_toy(cooperative, seated(cooperative, lambda s: Scripted("x" if s == "c" else "bad")))
    assert episode.rewards == {"a": -1.0, "b": -1.0, "c": 1.0}
    everyone = Simultaneous(RNG)
    episode = play_toy(everyone, seated(everyone, lambda s: Scripted("bad")))
    assert (episode.rewards, episode.winners, episode.offender) == ({"a": 0.0, "b": 0.0}, (), "a")


def test_one_failing_player_cancels_its_round() -> None:
    game = Simultaneous(RNG)
    players = {"a": Scripted(EngineError("gone")), "b": Scripted("x", delay_s=30.0)}
    with pytest.raises(EngineError, match="gone"):
        play_toy(game, players)
    assert players["b"].cancelled == 1
    assert [p.closed for p in players.values()] == [1, 1]


# ── caps ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_game_that_is_over_on_the_cap_turn_has_its_result() -> None:
    episode = play_toy(Turns(RNG, length=4), {"a": Scripted("x"), "b": Scripted("x")}, limits=Limits(max_turns=4))
    assert (episode.ended, episode.winners) == ("natural", ("a",))


def test_the_turn_cap_truncates_without_an_invented_loss() -> None:
    episode = play_toy(Turns(RNG, length=5), {"a": Scripted("x"), "b": Scripted("x")}, limits=Limits(max_turns=4))
    assert (episode.ended, episode.winners, episode.rewards) == ("truncated", (), {"a": 0.0, "b": 0.0})
    assert episode.reason == "turns: the cap of 4 was reached"
    assert len(episode.turns) == 4


def test_the_turn_cap_is_not_passed_by_a_simultaneous_round() -> None:
    game = Simultaneous(RNG, seats=("a", "b", "c"), length=9)
    episode = play_toy(game, seated(game), limits=Limits(max_turns=7))
    assert (episode.ended, len(episode.turns)) == ("truncated", 6)


def test_a_game_that_ignores_its_own_end_is_capped() -> None:
    episode = play_toy(Turns(RNG, length=10**9), {"a": Scripted("x"), "b": Scripted("x")}, limits=Limits(max_turns=300))
    assert episode.ended == "truncated"


def test_the_token_cap_counts_prompts_and_samples_of_all_seats() -> None:
    answer = Answer(text="x", prompt_ids=(1,) * 6, sampled_ids=(2,) * 4, logprobs=(-1.0,) * 4, stop_reason="stop")
    players = {"a": Scripted(answer), "b": Scripted(answer)}
    episode = play_toy(Turns(RNG, length=9), players, limits=Limits(max_tokens=30))
    assert (episode.ended, len(episode.turns)) == ("truncated", 3)
    assert episode.reason == "tokens: 30 were used, the cap is 30"
    exact = play_toy(Turns(RNG, length=3), {"a": Scripted(answer), "b": Scripted(answer)}, limits=Limits(max_tokens=30))
    assert exact.ended == "natural"


def test_the_time_cap_cancels_the_player_that_is_waited_for() -> None:
    players = {"a": Scripted("x"), "b": Scripted("x", delay_s=60.0)}
    episode = play_toy(Turns(RNG), players, limits=Limits(time_s=0.05))
    assert (episode.ended, episode.reason) == ("truncated", "time: the cap of 0.05 s was reached")
    assert [t.seat for t in episode.turns] == ["a"]
    assert (players["b"].cancelled, players["b"].closed) == (1, 1)


def test_the_time_cap_also_ends_players_that_never_wait() -> None:
    class Quick(Scripted):
        async def decide(self, decision: Decision) -> Answer:
            return Answer(text="x")

    episode = play_toy(
        Turns(RNG, length=10**9), {"a": Quick(), "b": Quick()}, limits=Limits(time_s=0.1, max_turns=100_000)
    )
    assert episode.ended == "truncated"


def test_two_episodes_share_the_loop_although_players_never_wait() -> None:
    finished: list[str] = []

    class Quick(Scripted):
        async def decide(self, decision: Decision) -> Answer:
            return Answer(text="x")

    async def one(name: str, length: int) -> None:
        players = {"a": Quick(), "b": Quick()}
        await play(
            "toy-v0",
            Turns(RNG, length=length),
            players,
            match_of("ab", limits=Limits(max_turns=100_000)),
            env_source="t",
        )
        finished.append(name)

    async def both() -> None:
        await asyncio.gather(one("long", 5000), one("short", 1))

    asyncio.run(both())
    assert finished == ["short", "long"]


def test_a_players_own_timeout_is_not_taken_for_the_cap() -> None:
    with pytest.raises(TimeoutError, match="mine"):
        play_toy(Turns(RNG), {"a": Scripted(TimeoutError("mine")), "b": Scripted("x")})


# ── failures and closing ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("error", [EngineError("server gone"), ValueError("a bot's bug")])
def test_a_failing_player_is_never_a_result(error: Exception) -> None:
    players = {"a": Scripted("x"), "b": Scripted(error)}
    with pytest.raises(type(error), match=str(error)):
        play_toy(Turns(RNG), players)
    assert [p.closed for p in players.values()] == [1, 1]


def test_an_aborted_answer_is_an_infrastructure_failure() -> None:
    with pytest.raises(EngineError, match=r"seat a in episode 0\.0 was aborted"):
        play_toy(Turns(RNG), {"a": Scripted(Answer(text="x", stop_reason="abort")), "b": Scripted("x")})


def test_cancelling_closes_the_players() -> None:
    players = {"a": Scripted("x"), "b": Scripted("x", delay_s=60.0)}

    async def cancelled() -> None:
        task = asyncio.create_task(play("toy-v0", Turns(RNG), players, match_of("ab"), env_source="t"))
        while not players["b"].asked:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert [p.closed for p in players.values()] == [1, 1]
    assert players["b"].cancelled == 1


def test_a_close_that_fails_hides_no_first_error_and_no_other_close() -> None:
    class Clings(Scripted):
        async def close(self) -> None:
            await super().close()
            raise RuntimeError("will not close")

    players = {"a": Clings("x"), "b": Scripted(EngineError("first"))}
    with pytest.raises(EngineError, match="first"):
        play_toy(Turns(RNG), players)
    assert players["b"].closed == 1
    with pytest.raises(RuntimeError, match="will not close"):
        play_toy(Turns(RNG), {"a": Clings("x"), "b": Scripted("x")})


def test_seats_that_do_not_fit_are_named() -> None:
    with pytest.raises(UserError, match="toy-v0 has the seats a, b, but the match fills a, c"):
        play_toy(Turns(RNG), {"a": Scripted("x"), "c": Scripted("x")})


def test_watch_hears_every_try_after_its_round() -> None:
    heard: list[tuple[str, str, bool]] = []

    def watch(decision: Decision, turn: Turn) -> None:
        heard.append((decision.seat, turn.text, turn.legal))

    players: Mapping[str, Scripted] = {"a": Scripted("bad", "x"), "b": Scripted("y")}
    asyncio.run(play("toy-v0", Turns(RNG, length=2), players, match_of("ab"), env_source="t", watch=watch))
    assert heard == [("a", "bad", False), ("a", "x", True), ("b", "y", True)]
