"""Three environments of the verifiers library, as its users write them: one turn, several turns, a tool.

`selfplay.bench.verifiers_compat` puts this file where the library finds its environments.
"""

from __future__ import annotations

import importlib
from typing import Any

NUM_EXAMPLES = 12


def load_environment(style: str = "single") -> Any:
    """``single``, ``multi`` (up to three tries, told each time what was wrong) or ``tools`` (an adder)."""
    vf: Any = importlib.import_module("verifiers")
    rows = [{"question": f"What is {i} + {i * 7 % 5}?", "answer": str(i + i * 7 % 5)} for i in range(NUM_EXAMPLES)]
    data = importlib.import_module("datasets").Dataset.from_list(rows)
    rubric = vf.Rubric(funcs=[right, num_chars], weights=[1.0, 0.01])
    if style == "tools":
        return vf.ToolEnv(dataset=data, tools=[add], rubric=rubric, max_turns=4)
    if style == "single":
        return vf.SingleTurnEnv(dataset=data, system_prompt="Answer with a number.", rubric=rubric)

    class SeveralTries(vf.MultiTurnEnv):  # type: ignore[misc]
        async def env_response(self, messages: Any, state: Any, **_rest: Any) -> Any:
            said = messages[-1]["content"]
            if said.strip() == state["answer"]:
                state["final_env_response"] = [{"role": "user", "content": "Right."}]
                return state["final_env_response"]
            return [{"role": "user", "content": f"{said} is wrong. Again."}]

    return SeveralTries(dataset=data, rubric=rubric, max_turns=3)


def right(completion: Any, answer: str) -> float:
    """1 where the seat's last words hold the answer."""
    said = [m["content"] for m in completion if m["role"] == "assistant"]
    return float(answer in said[-1].split())


async def num_chars(completion: Any) -> float:
    """Length of the conversation."""
    return float(sum(len(m.get("content") or "") for m in completion))


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b
