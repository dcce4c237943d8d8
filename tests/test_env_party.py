"""Rules of the party games: Connect Four, negotiation, liar's dice, signalling, taboo, werewolf; and their strategies."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pyspiel
import pytest

from selfplay.agent import Sampling
from selfplay.errors import ConfigError, IllegalMove
from selfplay.play import play, sit_down
from selfplay.registry import make_environment
from selfplay.types import Episode, Match, Scalar, SeatAssignment
from selfplay_envs.connect_four import ConnectFour
from selfplay_envs.liars_dice import LiarsDice
from selfplay_envs.negotiation import ITEMS, Negotiation
from selfplay_envs.taboo import Taboo, cards
from selfplay_envs.werewolf import Werewolf


def game_between(env_id: str, kinds_of: tuple[str, ...], seed: int, **params: Scalar) -> Episode:
    game = make_environment(env_id, params, seed)
    kinds = kinds_of * len(game.seats) if len(kinds_of) == 1 else kinds_of
    seats = tuple(SeatAssignment(seat=s, player=p, agent=p) for s, p in zip(game.seats, kinds, strict=True))
    match = Match(index=0, env=env_id, env_params=params, seed=seed, seats=seats)
    return asyncio.run(play(env_id, game, sit_down(match, None, Sampling(), game), match, env_source="t"))


# ── Connect Four ──────────────────────────────────────────────────────────────────────────────────


def test_connect_four_is_openspiels() -> None:
    theirs, rng = pyspiel.load_game("connect_four"), random.Random(0)
    results = set()
    for _ in range(150):
        mine, state = ConnectFour(random.Random(0)), theirs.new_initial_state()
        while not state.is_terminal():
            (seat,) = mine.to_move()
            assert "xo".index(seat) == state.current_player()
            assert [int(m) - 1 for m in mine.legal_moves(seat)] == state.legal_actions()
            move = rng.choice(list(mine.legal_moves(seat)))
            mine.step({seat: move})
            state.apply_action(int(move) - 1)
        assert mine.to_move() == ()
        assert list(mine.outcome().rewards.values()) == state.returns()
        results.add(mine.outcome().winners)
    assert {("x",), ("o",)} <= results


def test_connect_four_draw() -> None:
    game = ConnectFour(random.Random(0))
    columns = [*"121212", *"212121", *"343434", *"434343", *"565656", *"656565", *"777777"]
    for i, column in enumerate(columns):
        game.step({"xo"[i % 2]: column})
    assert game.to_move() == ()
    assert game.outcome().winners == ()
    assert game.outcome().rewards == {"x": 0.0, "o": 0.0}


def test_the_search_takes_a_win_and_stops_one() -> None:
    for seed in range(3):
        assert game_between("connect-four-v0", ("scripted", "random"), seed).winners == ("x",)
        assert game_between("connect-four-v0", ("random", "scripted"), seed).winners == ("o",)


# ── negotiation ───────────────────────────────────────────────────────────────────────────────────


def test_items_and_values_are_drawn_as_published() -> None:
    for seed in range(60):
        game = Negotiation(random.Random(seed))
        assert 5 <= sum(game._counts) <= 7
        assert min(game._counts) >= 1
        for values in game._values:
            assert sum(n * v for n, v in zip(game._counts, values, strict=True)) == 10
        assert all(a or b for a, b in zip(*game._values, strict=True))
        assert any(a and b for a, b in zip(*game._values, strict=True))


def test_a_deal_divides_everything() -> None:
    game = Negotiation(random.Random(1))
    everything = "".join(map(str, game._counts))
    game.step({"player_0": everything})
    assert game.legal_moves("player_1")[0] == "accept"
    game.step({"player_1": "accept"})
    assert game.outcome().rewards == {"player_0": 1.0, "player_1": 0.0}
    assert game.outcome().winners == ("player_0",)


def test_no_deal_is_nothing_for_both() -> None:
    game = Negotiation(random.Random(1), offers=2)
    assert "accept" not in game.legal_moves("player_0")
    game.step({"player_0": "000"})
    game.step({"player_1": "000"})
    assert game.to_move() == ()
    assert game.outcome().rewards == {"player_0": 0.0, "player_1": 0.0}
    assert len(ITEMS) == 3


def test_fair_players_agree() -> None:
    deals = [game_between("negotiation-v0", ("scripted",), seed) for seed in range(10)]
    assert all(d.ended == "natural" for d in deals)
    assert sum(bool(d.info.get("deal")) for d in deals) >= 8
    assert sum(sum(d.rewards.values()) for d in deals) / len(deals) > 1.1


# ── liar's dice ───────────────────────────────────────────────────────────────────────────────────


def test_a_bid_is_true_or_a_lie() -> None:
    for dice, loser in (([[3], [3]], 1), ([[3], [5]], 0)):
        game = LiarsDice(random.Random(0), dice=1)
        game._dice = dice
        game.step({"player_0": "2x3"})
        assert game.legal_moves("player_1") == ["2x4", "2x5", "2x6", "liar"]
        game.step({"player_1": "liar"})
        assert game.to_move() == ()
        assert game.outcome().winners == (f"player_{1 - loser}",)


def test_ones_are_wild_and_the_out_are_not_asked() -> None:
    game = LiarsDice(random.Random(0), players=3, dice=1, wild=True)
    game._dice = [[1], [4], [2]]
    game.step({"player_0": "2x4"})
    game.step({"player_1": "liar"})  # a four and a wild one: true
    assert game.to_move() == ("player_2",)
    for _ in range(2):
        (seat,) = game.to_move()
        assert seat != "player_1"
        game.step({seat: game.legal_moves(seat)[0]})
    assert "player_1 0" in game.transcript()


def test_liars_dice_always_ends_in_time() -> None:
    for seed in range(30):
        episode = game_between("liars-dice-v0", ("random",), seed, players=4, dice=3)
        assert episode.ended == "natural"
        assert sum(episode.rewards.values()) == pytest.approx(0.0)


# ── signalling, taboo ─────────────────────────────────────────────────────────────────────────────


def test_a_convention_is_perfect_and_chance_is_not() -> None:
    assert all(
        game_between("signalling-v0", ("scripted",), s).rewards == {"sender": 1.0, "receiver": 1.0} for s in range(5)
    )
    chance = [game_between("signalling-v0", ("random",), s).rewards["sender"] for s in range(60)]
    assert sum(chance) / 60 == pytest.approx(0.25, abs=0.08)


def test_the_receiver_is_not_shown_the_object() -> None:
    game = make_environment("signalling-v0", {}, 0)
    game.step({"sender": "ka"})
    assert "Object:" not in game.view("receiver")
    assert "Word: ka." in game.view("receiver")


def test_words_may_not_be_said() -> None:
    game = Taboo(random.Random(3))
    card = game._card
    for clue in (card.word, card.taboo[0], card.word + "s", "two words", "", "1234", card.word[:-1]):
        with pytest.raises(IllegalMove):
            game.parse("giver", clue)
    assert game.parse("giver", f"{card.hints[0].upper()}!") == card.hints[0]
    game.step({"giver": card.hints[0]})
    wrong = next(w for w in game.legal_moves("guesser") or () if w != card.word)
    game.step({"guesser": wrong})
    with pytest.raises(IllegalMove, match="was said already"):
        game.parse("giver", card.hints[0])
    game.step({"giver": card.hints[1]})
    assert wrong not in (game.legal_moves("guesser") or ())
    game.step({"guesser": card.word})
    assert game.outcome().rewards == {"giver": 0.6, "guesser": 0.6}


def test_the_word_list_keeps_its_own_rules() -> None:
    assert len(cards()) >= 30
    assert len({c.word for c in cards()}) == len(cards())
    assert Counter(h for c in cards() for h in c.hints).most_common(1)[0][1] == 1
    for card in cards():
        assert len(card.taboo) == 5
        assert len(card.hints) >= 4
        for hint in card.hints:
            assert not any(w in hint or hint in w for w in (card.word, *card.taboo)), (card.word, hint)
    assert all(game_between("taboo-v0", ("scripted",), s).rewards["giver"] == 1.0 for s in range(8))


# ── werewolf ──────────────────────────────────────────────────────────────────────────────────────


def test_roles_and_knowledge() -> None:
    for players, wolves in ((4, 1), (6, 1), (7, 2), (9, 2)):
        game = Werewolf(random.Random(players), players=players)
        roles = Counter(game._roles.values())
        assert (roles["wolf"], roles["seer"]) == (wolves, 1)
        assert set(game.to_move()) == {s for s, r in game._roles.items() if r != "villager"}
    pack = [s for s, r in game._roles.items() if r == "wolf"]
    assert f"You know: {pack[1]} is a wolf" in game.view(pack[0])
    assert pack[1] not in game.legal_moves(pack[0])
    villager = next(s for s, r in game._roles.items() if r == "villager")
    assert "wolf" not in game.view(villager)


def test_a_vote_that_is_even_sends_nobody_and_the_dead_are_not_asked() -> None:
    game = Werewolf(random.Random(0), players=5)
    wolf = next(s for s, r in game._roles.items() if r == "wolf")
    victim = next(s for s in game.seats if s != wolf)
    game.step({s: victim if s == wolf else wolf for s in game.to_move()})
    alive = [s for s in game.seats if s != victim]
    for seat in alive:
        assert game.to_move() == (seat,)
        game.step({seat: next(s for s in alive if s != seat)})
    assert game.to_move() == alive
    game.step(dict(zip(alive, [alive[1], alive[0], alive[1], alive[0]], strict=True)))
    assert "nobody goes" in game.transcript()
    assert victim not in game.to_move()


def test_teams_win_together() -> None:
    outcomes = Counter()
    for seed in range(40):
        episode = game_between("werewolf-v0", ("scripted",), seed, players=6)
        assert episode.ended == "natural"
        assert set(episode.rewards.values()) == {1.0, -1.0}
        outcomes[len(episode.winners)] += 1
    assert set(outcomes) == {1, 5}  # the wolf alone, or the village


@pytest.mark.parametrize(
    ("env_id", "params"),
    [
        ("werewolf-v0", {"players": 3}), ("taboo-v0", {"words": 1}), ("signalling-v0", {"objects": 9}),
        ("liars-dice-v0", {"players": 7}), ("liars-dice-v0", {"dice": 0}), ("negotiation-v0", {"offers": 1}),
    ],
)  # fmt: skip
def test_parameters_that_cannot_be_played(env_id: str, params: dict[str, Scalar]) -> None:
    with pytest.raises(ConfigError, match=f"{env_id}: {next(iter(params))} is"):
        make_environment(env_id, params, 0)
