"""How a conversation in the form of chat messages reads as text, and text as a model's reply.

In: messages and tools as verifiers hands them to a client of a model. Out: rules and views. In: a seat's answer. Out: the
reply object that such a client gives back.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
Message = Mapping[str, Any]


def as_text(messages: Sequence[Message]) -> str:
    """What messages say; who says it is told where there are several."""
    if len(messages) == 1:
        return _content(messages[0])
    return "\n".join(f"{m.get('role')}: {_content(m)}" for m in messages)


def new_messages(seen: Sequence[Message], messages: Sequence[Message]) -> Sequence[Message]:
    """What follows the seat's own answer to ``seen``; all of it where the environment has rewritten the conversation."""
    begins = list(messages[: len(seen)]) == list(seen)
    answered = len(messages) > len(seen) and messages[len(seen)].get("role") == "assistant"
    return messages[len(seen) + 1 :] if begins and answered else messages


def tool_rules(tools: Sequence[Message]) -> str:
    """What the seat is told of its tools; empty where there are none."""
    if not tools:
        return ""
    told = "\n".join(json.dumps(t.get("function", t), sort_keys=True) for t in tools)
    return f'Tools, one a line:\n{told}\nTo call one write {OPEN}{{"name": ..., "arguments": {{...}}}}{CLOSE}'


def as_completion(text: str, *, chat: bool, tools: bool = False) -> Any:
    """``ChatCompletion`` or ``Completion`` of the OpenAI client library: what verifiers takes a model's reply to be."""
    common = {"id": "selfplay", "created": 0, "model": "selfplay"}
    if not chat:
        kind = importlib.import_module("openai.types").Completion
        choice = {"index": 0, "text": text, "finish_reason": "stop", "logprobs": None}
        return kind.model_validate({**common, "object": "text_completion", "choices": [choice]})
    said, calls = split_calls(text) if tools else (text, [])
    message = {"role": "assistant", "content": said, "tool_calls": calls or None}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop", "logprobs": None}
    kind = importlib.import_module("openai.types.chat").ChatCompletion
    return kind.model_validate({**common, "object": "chat.completion", "choices": [choice]})


def split_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """(what is no call, the calls). A call that cannot be read stays in the text. Linear in the text."""
    first, *rest = text.split(OPEN)
    said, calls = [first], list[dict[str, Any]]()
    for part in rest:
        body, closed, after = part.partition(CLOSE)
        if closed and (call := _call(body, len(calls))) is not None:
            calls.append(call)
            said.append(after)
        else:
            said.append(OPEN + part)
    return "".join(said).strip(), calls


def _call(body: str, number: int) -> dict[str, Any] | None:
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(asked, dict) or not isinstance(asked.get("name"), str):
        return None
    arguments = json.dumps(asked.get("arguments", {}))
    return {"id": f"call_{number}", "type": "function", "function": {"name": asked["name"], "arguments": arguments}}


def _content(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return content or ""
    parts = [p.get("text") for p in content if isinstance(p, Mapping)]
    if None in parts or len(parts) != len(content):
        raise ValueError(f"a message of role {message.get('role')!r} holds more than text; only text can be shown")
    return "\n".join(map(str, parts))
