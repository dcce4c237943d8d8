"""The adapter of the verifiers library against the library itself.

In: the installed library, and `selfplay.bench.verifiers_sums` in a folder where it is found. Out: one row per environment: it
passes when ``selfplay env check`` finds it sound and, for every example and several scripts of answers, the game asks the
same and pays the same as the library's own rollout and rubric do with a client of the library's kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from selfplay.bench import verifiers_sums
from selfplay.bench.report import Row
from selfplay.check import check_environment
from selfplay.registry import make_environment

ENV = "verifiers:selfplay-sums"
STYLES = ("single", "multi", "tools")
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


def run(num_games: int) -> list[Row]:
    """A row per environment; one that says so where the library is not installed."""
    if importlib.util.find_spec("verifiers") is None:
        missing = "not run: the package 'verifiers' is not installed"
        return [Row(name="verifiers", value=0.0, unit="passes", reference=missing)]
    with _findable():
        return [_row(style, num_games) for style in STYLES]


def _row(style: str, num_games: int) -> Row:
    faults = [
        f"{c.name}: {c.text[:120]}"
        for c in check_environment(ENV, {"style": style}, num_games=num_games, limit_s=120.0).faults
    ]
    for example in range(verifiers_sums.NUM_EXAMPLES):
        for answers in _scripts(style, example):
            ours, theirs = _through_adapter(style, example, answers), asyncio.run(_alone(style, example, answers))
            if ours != theirs:
                faults.append(f"example {example}, answers {answers}: {ours}, but the library alone {theirs}")
    return Row(name=f"{ENV} style={style}", value=float(not faults), unit="passes", reference="; ".join(faults)[:500])


def _scripts(style: str, example: int) -> Sequence[Sequence[str]]:
    answer = str(example + example * 7 % 5)
    if style == "tools":
        return (CALL, f"It is {answer}"), (f"Two: {CALL}{CALL}", CALL, CALL, CALL), ("none",)
    return (answer, answer, answer), ("1", answer, "2"), ("x", "y", "z")


def _through_adapter(style: str, example: int, answers: Sequence[str]) -> tuple[list[str], float, dict[str, float]]:
    """(what was asked each time, the reward, the rubric's figures) of a game."""
    game = make_environment(ENV, {"style": style, "example": example}, 0)
    asked, script = [], iter(answers)
    while game.to_move():
        asked.append(game.view("player"))
        game.step({"player": next(script)})
    outcome = game.outcome()
    metrics = {k: float(v) for k, v in outcome.info.items() if k != "example_id"}
    return asked, outcome.rewards["player"], metrics


async def _alone(style: str, example: int, answers: Sequence[str]) -> tuple[list[str], float, dict[str, float]]:
    """The same from the library: its rollout with a client that reads from the script, its rubric's score."""
    env = verifiers_sums.load_environment(style)
    asked: list[str] = []
    script = iter(answers)

    async def create(*, messages: Sequence[Mapping[str, Any]], **_rest: object) -> Any:
        asked.append("\n".join(_told(messages, len(asked))))
        return _completion(next(script), style)

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    state = await env.rollout(dict(env.get_dataset()[example]), client, "script", {})
    await env.rubric.score_group([state], score_sem=contextlib.nullcontext())
    return asked, state["reward"], state["metrics"]


def _told(messages: Sequence[Mapping[str, Any]], num_answers: int) -> list[str]:
    """What is new in a request: all but the system's words before the first answer, else what follows the last one."""
    if not num_answers:
        return [str(m["content"]) for m in messages if m["role"] != "system"]
    last = max(i for i, m in enumerate(messages) if m["role"] == "assistant")
    new = messages[last + 1 :]
    return [str(m["content"]) if len(new) == 1 else f"{m['role']}: {m['content']}" for m in new]


def _completion(text: str, style: str) -> Any:
    """What a server of models would have replied."""
    types: Any = importlib.import_module("openai.types.chat")
    num_calls = text.count(CALL) if style == "tools" else 0
    function = {"name": "add", "arguments": '{"a": 2, "b": 3}'}
    calls = [{"id": f"c{i}", "type": "function", "function": function} for i in range(num_calls)]
    said = text.replace(CALL, "").strip() if num_calls else text
    message = {"role": "assistant", "content": said, "tool_calls": calls or None}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    return types.ChatCompletion.model_validate(
        {"id": "1", "created": 0, "model": "script", "object": "chat.completion", "choices": [choice]}
    )


@contextlib.contextmanager
def _findable() -> Iterator[None]:
    """The environments' file as a module of its own, for this process and its children."""
    before = os.environ.get("PYTHONPATH")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(verifiers_sums.__file__, Path(folder, "selfplay_sums.py"))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, before)))
        sys.path.insert(0, folder)
        try:
            yield
        finally:
            sys.path.remove(folder)
            os.environ.pop("PYTHONPATH")
            if before is not None:
                os.environ["PYTHONPATH"] = before
