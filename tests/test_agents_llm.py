"""The language-model player: what it sends, and that token ids come back exactly as they were."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from selfplay.agent import Answer, Decision, Message, PlayerContext, Sampling
from selfplay.environment import JuryQuestion
from selfplay.errors import ConfigError, UserError
from selfplay.play import PolicyJury, play
from selfplay.types import SeatAssignment, Span
from selfplay_agents.llm import LLMPlayer
from toy_games import Scripted, Turns, match_of


class FakePolicy:
    """Answers with the given texts; ids are running numbers, so every token has a name of its own."""

    def __init__(self, *texts: str, forks: Sequence[bool] = ()) -> None:
        self.texts, self.forks = list(texts), list(forks)
        self.calls: list[dict[str, Any]] = []
        self._next_id = 100

    def _ids(self, num: int) -> tuple[int, ...]:
        ids = tuple(range(self._next_id, self._next_id + num))
        self._next_id += num
        return ids

    async def generate(self, assignment: SeatAssignment, **call: Any) -> Answer:
        self.calls.append({"assignment": assignment, **call})
        n = len(self.calls) - 1
        text = self.texts[min(n, len(self.texts) - 1)]
        sampled = self._ids(2)
        return Answer(
            text=text, prompt_ids=self._ids(3), sampled_ids=sampled, logprobs=(-0.1, -0.2), spans=(Span(7, 0, 2),),
            stop_reason="stop", fork=n < len(self.forks) and self.forks[n],
        )  # fmt: skip

    async def choose(self, agent: str, pin: str | int, question: JuryQuestion) -> Mapping[str, float]:
        self.calls.append({"agent": agent, "pin": pin, "question": question})
        return {label: 1 / len(question.labels) for label in question.labels}


def player_of(policy: FakePolicy | None, sampling: Sampling | None = None, **options: Any) -> LLMPlayer:
    assignment = SeatAssignment(seat="a", player="llm", agent="alpha", options=options)
    return LLMPlayer(
        PlayerContext(
            assignment=assignment, episode_id="4.1", rng=random.Random(0), policy=policy,
            sampling=sampling or Sampling(max_tokens=9), env_id="toy-v0", options=options,
        )
    )  # fmt: skip


def decision(view: str = "view 1", complaint: str = "", legal: tuple[str, ...] | None = ("x", "y")) -> Decision:
    return Decision(seat="a", round=0, rules="the rules", view=view, legal_moves=legal, complaint=complaint)


def ask(player: LLMPlayer, *decisions: Decision) -> list[Answer]:
    async def all_of_them() -> list[Answer]:
        return [await player.decide(d) for d in decisions]

    return asyncio.run(all_of_them())


def test_the_first_request() -> None:
    policy = FakePolicy("x")
    ask(player_of(policy), decision())
    (call,) = policy.calls
    assert call["messages"] == [Message("system", "the rules"), Message("user", "view 1\nLegal moves: x, y")]
    assert (call["known_messages"], tuple(call["prefix_ids"]), call["episode_id"]) == (0, (), "4.1")
    assert call["assignment"].agent == "alpha"
    assert call["sampling"] == Sampling(max_tokens=9)


def test_history_grows_and_every_id_goes_back_as_it_came() -> None:
    policy = FakePolicy("first", "second", "third")
    answers = ask(player_of(policy), decision(), decision("view 2"), decision("view 3"))
    second, third = policy.calls[1:]
    assert [m.role for m in third["messages"]] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert [m.content for m in third["messages"]][2::2] == ["first", "second"]
    assert (second["known_messages"], third["known_messages"]) == (3, 5)
    assert third["messages"][third["known_messages"] - 1] == Message("assistant", "second")
    context: tuple[int, ...] = ()
    for call, answer in zip(policy.calls, answers, strict=True):
        assert tuple(call["prefix_ids"]) == context
        context += answer.prompt_ids + answer.sampled_ids
    assert not any(a.fork for a in answers)


def test_a_fork_starts_the_context_afresh() -> None:
    policy = FakePolicy("x", forks=[False, True, False])
    answers = ask(player_of(policy), decision(), decision(), decision())
    assert tuple(policy.calls[2]["prefix_ids"]) == answers[1].prompt_ids + answers[1].sampled_ids
    assert policy.calls[2]["known_messages"] == 5


def test_a_retry_carries_the_complaint_and_not_the_view_again() -> None:
    policy = FakePolicy("x")
    ask(player_of(policy), decision(), decision(complaint="not a move"))
    assert policy.calls[1]["messages"][-1] == Message("user", "not a move\nLegal moves: x, y")


def test_history_last_starts_over_and_says_so_in_the_token_record() -> None:
    policy = FakePolicy("x")
    answers = ask(player_of(policy, history="last"), decision(), decision(complaint="no"), decision("view 2"))
    assert [c["known_messages"] for c in policy.calls] == [0, 3, 0]
    assert [len(c["messages"]) for c in policy.calls] == [2, 4, 2]
    assert [a.fork for a in answers] == [False, False, True]
    assert tuple(policy.calls[2]["prefix_ids"]) == ()


def test_rules_can_be_left_out() -> None:
    policy = FakePolicy("x")
    ask(player_of(policy, rules="none", history="last"), decision(), decision(complaint="no"), decision("view 2"))
    assert [[m.role for m in c["messages"]] for c in policy.calls] == [
        ["user"],
        ["user", "assistant", "user"],
        ["user"],
    ]
    assert [c["known_messages"] for c in policy.calls] == [0, 2, 0]
    with pytest.raises(ConfigError, match="rules is 'some'; it must be system or none"):
        player_of(policy, rules="some")


@pytest.mark.parametrize(
    ("legal", "view", "listed"),
    [
        ("auto", "x or y?", False), ("auto", "Moves: x, y.", False), ("auto", "xylophone", True),
        ("always", "x or y?", True), ("never", "nothing", False),
    ],
)  # fmt: skip
def test_when_legal_moves_are_listed(legal: str, view: str, listed: bool) -> None:
    policy = FakePolicy("x")
    ask(player_of(policy, legal=legal), decision(view))
    assert ("Legal moves" in policy.calls[0]["messages"][-1].content) is listed


def test_free_text_games_list_nothing() -> None:
    policy = FakePolicy("x")
    ask(player_of(policy, legal="always"), decision(legal=None))
    assert policy.calls[0]["messages"][-1].content == "view 1"


def test_a_sampling_seed_is_spread_over_turns_and_reproducible() -> None:
    def seeds(run_seed: int) -> list[int]:
        policy = FakePolicy("x")
        ask(player_of(policy, Sampling(seed=run_seed)), decision(), decision())
        return [c["sampling"].seed for c in policy.calls]

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2)}) == 4


def test_bad_options_and_no_model() -> None:
    with pytest.raises(ConfigError, match="no parameter 'histori'; did you mean 'history'"):
        player_of(FakePolicy("x"), histori="full")
    with pytest.raises(ConfigError, match="history is 'some'; it must be full or last"):
        player_of(FakePolicy("x"), history="some")
    with pytest.raises(UserError, match="seat a is played by a model"):
        player_of(None)


def test_ids_in_an_episode_are_the_ids_sampled() -> None:
    policy = FakePolicy("bad", "x", "y")
    game = Turns(random.Random(0), length=3)
    episode = asyncio.run(
        play("toy-v0", game, {"a": player_of(policy), "b": Scripted("x")}, match_of("ab"), env_source="t")
    )
    own = [t for t in episode.turns if t.seat == "a"]
    assert [t.move for t in own] == [None, "x", "y"]
    assert [t.sampled_ids for t in own] == [(100, 101), (105, 106), (110, 111)]
    assert all(t.spans == (Span(7, 0, 2),) for t in own)
    assert episode.versions() == {"a": (7, 7)}


def test_the_policy_jury_asks_for_its_agent_and_pin() -> None:
    policy = FakePolicy()
    question = JuryQuestion(system="s", prompt="p", lead="l ", labels=("A", "B"))
    assert asyncio.run(PolicyJury(policy, "base").judge(question)) == {"A": 0.5, "B": 0.5}
    assert PolicyJury(policy, "judge", 3).name == "judge@3"
    assert (policy.calls[0]["agent"], policy.calls[0]["pin"]) == ("base", "turn")
