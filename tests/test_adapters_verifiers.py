"""verifiers: a conversation asked for one move at a time, with a stand-in where the library's environment would be.

The real library is compared by ``selfplay bench envs-compat``: it is no part of a usual installation.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from selfplay.errors import UserError
from selfplay.registry.environments import make_environment
from selfplay.registry.isolation import Isolation
from selfplay_envs.adapters import verifiers_library
from selfplay_envs.adapters.conversation import Conversation
from selfplay_envs.adapters.verifiers import ADAPTER, VerifiersGame
from selfplay_envs.adapters.verifiers_forms import CLOSE, OPEN, as_text, new_messages, split_calls

Ask = Callable[[str], Awaitable[str]]


async def _two_questions(ask: Ask) -> str:
    first = await ask("first")
    await asyncio.sleep(0)
    return first + await ask(f"after {first}")


def test_a_conversation_stops_at_each_question() -> None:
    talk: Conversation[str, str] = Conversation(_two_questions)
    assert talk.question == "first"
    talk.answer("a")
    assert talk.question == "after a"
    talk.answer("b")
    assert (talk.question, talk.result) == (None, "ab")
    talk.close()
    with pytest.raises(ValueError, match="over"):
        talk.answer("c")


def test_two_conversations_do_not_touch_each_other() -> None:
    one: Conversation[str, str] = Conversation(_two_questions)
    other: Conversation[str, str] = Conversation(_two_questions)
    one.answer("1")
    other.answer("2")
    assert (one.question, other.question) == ("after 1", "after 2")
    other.close()
    one.answer("1")
    assert one.result == "11"


@pytest.mark.parametrize("error", [KeyError("bad card 53"), SystemExit(3)])
def test_what_it_raises_is_raised_at_the_answer_and_ends_no_other(error: BaseException) -> None:
    async def breaks(ask: Ask) -> None:
        await ask("?")
        raise error

    talk: Conversation[str, None] = Conversation(breaks)
    with pytest.raises((KeyError, RuntimeError), match=r"bad card 53|SystemExit"):
        talk.answer("x")
    talk.close()
    with contextlib.closing(Conversation[str, str](_two_questions)) as other:
        assert other.question == "first"


def test_closing_in_the_middle_lets_it_clean_up() -> None:
    cleaned = []

    async def holds(ask: Ask) -> None:
        try:
            await ask("?")
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    Conversation[str, None](holds).close()
    assert cleaned == [True]


def test_the_callers_state_of_the_generators_holds_inside() -> None:
    async def draws(ask: Ask) -> float:
        await ask("?")
        return random.random()

    def drawn() -> float | None:
        own = Isolation(5)
        with own:
            talk: Conversation[str, float] = Conversation(draws)
        random.random()
        with own:
            talk.answer("x")
        return talk.result

    assert drawn() == drawn() == random.Random(5).random()


ROWS = [{"prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+3"}], "answer": "5"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


class _Library:
    """What the adapter uses of an environment of the library: a rollout that asks a client, and a rubric."""

    def __init__(self, tools: bool) -> None:
        self.rubric, self._tools = self, tools

    def get_dataset(self) -> list[dict[str, Any]]:
        return ROWS

    async def rollout(self, row: dict[str, Any], client: Any, _model: str, _sampling: object) -> dict[str, Any]:
        messages, more = list(row["prompt"]), {"tools": TOOLS} if self._tools else {}
        for _ in range(3):
            reply = await client.chat.completions.create(model="m", messages=messages, **more)
            said = reply.choices[0].message
            messages = [*messages, {"role": "assistant", "content": said.content}]
            if said.content == row["answer"]:
                break
            results = [f"{c.function.name} of {c.function.arguments}" for c in said.tool_calls or ()]
            messages = [*messages, {"role": "user", "content": "; ".join(results) or f"not {said.content}"}]
        return {"said": said.content, "answer": row["answer"], "stop_condition": "said", "example_id": 0}

    async def score_group(self, states: list[dict[str, Any]], score_sem: Any) -> None:
        async with score_sem:
            for state in states:
                if state["said"] == "raise":
                    logging.getLogger("verifiers.rubric").error("Error calling reward function: no such card")
                state["reward"] = 1.0 if state["said"] == state["answer"] else 0.0
                state["metrics"] = {"length": len(state["said"])}


def _game(tools: bool = False) -> VerifiersGame:
    kind = type("Game", (VerifiersGame,), {"load": classmethod(lambda _cls, _values: _Library(tools))})
    return kind(random.Random(1))


def _told(game: VerifiersGame, *answers: str) -> list[str]:
    views = []
    for answer in answers:
        assert list(game.to_move()) == ["player"]
        views.append(game.view("player"))
        game.step({"player": answer})
    return views


def test_a_rollout_becomes_turns_and_its_score_the_reward() -> None:
    game = _game()
    assert _told(game, "4", "5") == ["2+3", "not 4"]
    assert game.rules("player") == "Add."
    assert not game.to_move()
    outcome = game.outcome()
    assert outcome.rewards == {"player": 1.0}
    assert outcome.info == {"length": 1.0, "example_id": 0}


def test_a_call_of_a_tool_is_read_from_the_text() -> None:
    game = _game(tools=True)
    call = f'{OPEN}{{"name": "add", "arguments": {{"a": 2}}}}{CLOSE}'
    assert _told(game, f"so: {call}{call}", "5") == ["2+3", 'add of {"a": 2}; add of {"a": 2}']
    assert '"name": "add"' in game.rules("player")


def test_a_copy_goes_on_from_the_same_point() -> None:
    game = _game()
    _told(game, "4")
    with contextlib.closing(game), contextlib.closing(game.__deepcopy__({})) as twin:
        _told(twin, "5")
        assert twin.outcome().rewards == {"player": 1.0}
        assert game.view("player") == "not 4"


def test_a_reward_that_could_not_be_computed_is_no_reward() -> None:
    game = _game()
    _told(game, "a", "b")
    game.to_move()
    with pytest.raises(RuntimeError, match="no such card"):
        game.step({"player": "raise"})


def test_calls_are_read_in_linear_time_and_odd_ones_stay_text() -> None:
    assert split_calls("no call") == ("no call", [])
    for odd in (OPEN, f"{OPEN}[]{CLOSE}", f'{OPEN}{{"name": 3}}{CLOSE}', f"{OPEN}{'[' * 100_000}{CLOSE}"):
        assert split_calls(odd) == (odd, [])
    many = OPEN * 100_000
    assert split_calls(many) == (many, [])
    said, calls = split_calls(f'a {OPEN}{{"name": "f"}}{CLOSE} b')
    assert (said, calls[0]["function"], calls[0]["id"]) == ("a  b", {"name": "f", "arguments": "{}"}, "call_0")


def test_new_messages_are_what_follows_the_answer_or_all_of_a_rewritten_conversation() -> None:
    user, said, more = ({"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"), ("user", "c")))
    assert new_messages([user], [user, said, more]) == [more]
    assert new_messages([more], [user, said]) == [user, said]
    assert as_text([user, more]) == "user: a\nuser: c"
    with pytest.raises(ValueError, match="only text"):
        as_text([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])


def test_loading_leaves_generators_and_signals_as_they_were_and_is_the_same_whenever_it_is() -> None:
    def loads() -> float:
        with verifiers_library._undone():
            signal.signal(signal.SIGTERM, lambda *_: None)
            return random.random() + float(np.random.random())

    random.seed(7)
    before = random.getstate(), np.random.get_state()[1].tolist(), signal.getsignal(signal.SIGTERM)
    first = loads()
    assert (random.getstate(), np.random.get_state()[1].tolist(), signal.getsignal(signal.SIGTERM)) == before
    random.random()
    assert loads() == first


def test_without_the_library_its_ids_say_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    verifiers_library._library.cache_clear()
    monkeypatch.setitem(sys.modules, "verifiers", None)
    for call in (ADAPTER.names, lambda: make_environment("verifiers:sums", {}, 0)):
        with pytest.raises(UserError, match=r"'verifiers'.*\[verifiers\]"):
            call()


def test_other_lines_of_the_library_are_refused_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    verifiers_library._library.cache_clear()
    monkeypatch.setitem(sys.modules, "verifiers", json)
    monkeypatch.setattr(verifiers_library.metadata, "version", lambda _name: "0.4.0")
    with pytest.raises(UserError, match=r"verifiers 0\.4\.0 .*0\.1\.9"):
        ADAPTER.names()
