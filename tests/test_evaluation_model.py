"""From a scorer to an exploitability report: prompts, spellings, illegal mass, other ways to ask; and a served model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

import pytest

from selfplay.agent import Message, Sampling
from selfplay.errors import EngineError
from selfplay.evaluation import ExploitReport, build_tree, exploitability
from selfplay.evaluation.exploit import as_played, renormalised
from selfplay.evaluation.prompts import prompt_of
from selfplay.evaluation.relabel import relabellings
from selfplay.evaluation.tree import GameTree
from selfplay.launch.serve import open_policy
from selfplay.pool.policy_client import ZmqPolicyClient
from selfplay.types import SeatAssignment

Masses = Callable[[Sequence[Message], str], float]


@pytest.fixture(scope="module")
def tree() -> GameTree:
    return build_tree("kuhn-poker-v0")


def report(tree: GameTree, masses: Masses, **settings: object) -> ExploitReport:
    async def score(seat: int, messages: Sequence[Message], answers: Sequence[str]) -> Sequence[float]:
        return [math.log(masses(messages, a)) if masses(messages, a) else -math.inf for a in answers]

    return asyncio.run(exploitability(tree, score, **settings))  # type: ignore[arg-type]


def test_prompts_are_those_of_play(tree: GameTree) -> None:
    second = next(s for s in tree.states if s.past)
    chat = asyncio.run(prompt_of(tree, second))
    assert [m.role for m in chat] == ["system", "user", "assistant", "user"]
    assert chat[2].content == "pass"
    assert chat[3].content == second.decision.view
    last = asyncio.run(prompt_of(tree, second, options={"history": "last"}))
    assert [m.role for m in last] == ["system", "user"]


def test_common_spellings_that_the_game_understands_count(tree: GameTree) -> None:
    assert tree.states[0].answers == (
        ("pass", "Pass", "PASS", "pass.", "Pass.", "PASS."), ("bet", "Bet", "BET", "bet.", "Bet.", "BET."),
    )  # fmt: skip
    found = report(tree, lambda _, a: 0.25 if a in ("bet", "Bet.", "pass", "PASS") else 0.0)
    assert found.headline == pytest.approx(11 / 12)
    assert found.legal_mass == pytest.approx(1.0)


def test_illegal_mass_is_sent_where_the_environment_sends_it(tree: GameTree) -> None:
    masses = [[0.3, 0.3], [0.0, 0.0]]
    assert renormalised(masses) == [[0.5, 0.5], [0.5, 0.5]]
    assert as_played(masses, retries=1)[0] == pytest.approx([0.42, 0.42])
    found = report(tree, lambda _, a: 0.3 if a in ("bet", "pass") else 0.0)
    assert found.headline is None
    assert found.legal_mass == pytest.approx(0.6)
    assert found.renormalised.nash_conv == pytest.approx(11 / 12)
    assert found.as_played.nash_conv > 11 / 12
    assert report(tree, lambda _, a: 0.3 if a in ("bet", "pass") else 0.0, min_legal=0.5).headline is not None


def test_a_model_that_plays_the_word_and_not_the_game_is_found_out(tree: GameTree) -> None:
    """It says the move that is offered last; the other order turns it from always bet to always pass."""

    def last_offered(messages: Sequence[Message], answer: str) -> float:
        return float(messages[-1].content.rstrip("?").endswith(answer))

    found = report(tree, last_offered)
    assert {v.kind: v.nash_conv for v in found.variants} == pytest.approx({"order": 2 / 3, "label": 2.0})
    assert found.renormalised.nash_conv == pytest.approx(2.0)
    assert found.spread == pytest.approx((2 / 3, 2.0))
    assert report(tree, last_offered, variants=False).spread is None


def test_relabelling_keeps_the_writing_and_leaves_history_alone() -> None:
    order, label = relabellings(("pass", "bet"))
    chat = [Message("user", "Card: J. History: pass, bet. Pass or bet? BET!")]
    assert order.chat(chat)[0].content == "Card: J. History: pass, bet. Bet or pass? BET!"
    assert label.chat(chat)[0].content == "Card: J. History: bet, pass. Bet or pass? PASS!"
    assert (order.answer("Pass."), label.answer("Pass.")) == ("Pass.", "Bet.")
    listed = [Message("user", "Legal moves: a, b, c\na, b")]
    turned = next(r for r in relabellings(("a", "b", "c")) if r.names == {"a": "c", "b": "b", "c": "a"})
    assert turned.chat(listed)[0].content == "Legal moves: c, b, a\na, b"
    assert relabellings([str(i) for i in range(9)]) == []


def test_a_score_that_is_no_number_is_a_fault(tree: GameTree) -> None:
    with pytest.raises(EngineError, match="scored"):
        report(tree, lambda *_: math.nan)


@pytest.mark.engine
def test_a_served_model_is_scored_as_it_samples(tree: GameTree) -> None:
    """The tiny model, for real: how often it says a letter is what its score for that letter says."""

    async def ask() -> tuple[float, float, ExploitReport]:
        chat = [Message("system", "say a letter"), Message("user", "go")]
        async with open_policy(model="tiny", run=None, versions=(), say=lambda _: None) as client:
            assert isinstance(client, ZmqPolicyClient)
            (ended,) = await client.score("base", 0, chat, [""])
            seat = SeatAssignment(seat="x", player="llm", agent="base")
            answers = await asyncio.gather(
                *(
                    client.generate(
                        seat, episode_id=f"{i}.0", messages=chat, known_messages=0, prefix_ids=(), sampling=Sampling(max_tokens=1)
                    )
                    for i in range(1500)
                )
            )  # fmt: skip
            share = sum(not a.text and a.stop_reason == "stop" for a in answers) / len(answers)

            async def score(seat: int, messages: Sequence[Message], answers: Sequence[str]) -> Sequence[float]:
                return await client.score("base", 0, messages, answers)

            return math.exp(ended), share, await exploitability(tree, score, variants=False)

    expected, share, found = asyncio.run(ask())
    assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / 1500)
    assert found.headline is None
    assert 0 < found.legal_mass < 1e-3
    assert found.as_played.values == pytest.approx((-2.0, 2.0), abs=1e-2)
