"""From chats to token deltas: sampled ids are never made from text again, and text never becomes control tokens.

In: all messages so far, how many of them the model's context already holds, and that context's exact ids. Out: the ids to
append, or, when the chat template rewrote history, the whole context afresh (a *fork*).

Why a delta is exact. Let ``open`` be the template's text up to where the model began its last answer, ``prev`` the text
including that answer, ``now`` the text of the whole chat with the generation prompt. When ``open`` begins ``prev`` and
``prev`` begins ``now``, nothing that the model has seen was changed; what is new is the end of its turn and everything
after. The end-of-turn token is dropped from the delta when the model sampled it, so it stands in the context once; when
the answer was cut it comes with the delta, as a prompt token, and is never trained.

Why text stays text. Strings of special tokens inside a message are replaced by sentinels before the template runs, and
encoded in pieces that no control token matches; all other text takes the ordinary path, together with its surroundings.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from selfplay.agent import Message
from selfplay.environment import JuryQuestion
from selfplay.wire.codec import clean_text

ROLES = ("system", "user", "assistant")
_PRIVATE_USE = range(0xE000, 0xF900)
MAX_RENDERED = 2048
"""Chats whose tokens are remembered."""


class ChatError(Exception):
    """The request cannot be rendered; the message says what is wrong with it."""


class ChatTokenizer(Protocol):
    """A tokenizer with a chat template."""

    control: Mapping[str, int]
    """Every string that the tokenizer turns into one token of its own: special and added tokens."""
    hidden: Collection[str]
    """Those of ``control`` that `decode` leaves out (turn markers, not think marks)."""
    stop_ids: tuple[int, ...]
    """Tokens that end an answer."""
    vocab_size: int

    def template(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The chat as text; raises `ChatError` when the template refuses it."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids; strings of ``control`` become control tokens, nothing is added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text without hidden control tokens."""
        ...


@dataclass(frozen=True, kw_only=True)
class Delta:
    """Token ids [P] to append to the context; the whole context when ``fork``."""

    ids: tuple[int, ...]
    fork: bool


@dataclass(frozen=True, kw_only=True)
class Question:
    """A jury question as tokens: the context, and each label's continuation of it."""

    ids: tuple[int, ...]
    labels: tuple[tuple[int, ...], ...]


class Renderer:
    """Renders the chats of one tokenizer."""

    def __init__(self, chat: ChatTokenizer) -> None:
        self._chat = chat
        self._control_ids = frozenset(chat.control.values())
        self._hidden_ids = frozenset(chat.control[s] for s in chat.hidden)
        self._any = _alternatives(chat.control)
        self._hidden = _alternatives(chat.hidden)
        self._is_ordinary = lru_cache(maxsize=4096)(self._has_no_control)
        self._rendered = lru_cache(maxsize=MAX_RENDERED)(self._render)

    def render(self, messages: Sequence[Message], known: int, prefix_ids: Sequence[int]) -> Delta:
        """The ids to append to ``prefix_ids``, which hold the first ``known`` messages. Raises `ChatError`."""
        _check(messages, known, prefix_ids)
        return self._rendered(tuple(messages), known, prefix_ids[-1] if prefix_ids else None)

    def _render(self, messages: tuple[Message, ...], known: int, last: int | None) -> Delta:
        """Of the context only its last token matters, so games that repeat are rendered once."""
        safe, marks = self._protect(messages)
        if last is None:
            return Delta(ids=tuple(self._whole(safe, marks)), fork=False)
        tail = self._extension(safe, marks, known, last)
        if tail is None:
            return Delta(ids=tuple(self._whole(safe, marks)), fork=True)
        return Delta(ids=tuple(tail), fork=False)

    def question(self, question: JuryQuestion) -> Question:
        """The chat of a jury question up to where its labels differ. Raises `ChatError`."""
        if len(set(question.labels)) < 2 or len(set(question.labels)) < len(question.labels):
            raise ChatError(f"a question needs at least two different labels, not {question.labels}")
        messages = [Message("system", question.system)] if question.system else []
        safe, marks = self._protect([*messages, Message("user", question.prompt)])
        answers = [self.encode_plain(clean_text(question.lead + label)) for label in question.labels]
        shared = _common_prefix(answers)
        labels = tuple(tuple(a[shared:]) for a in answers)
        if not all(labels):
            raise ChatError(f"one of the labels {question.labels} begins another as tokens: use other labels")
        return Question(ids=(*self._whole(safe, marks), *answers[0][:shared]), labels=labels)

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of ``text`` with no control token among them."""
        ids: list[int] = []
        for piece in re.split(f"({self._any.pattern})", text):
            if self._any.fullmatch(piece):
                # Neither half is a control string, so each is ordinary text.
                ids += self._encode_carefully(piece[:1]) + self._encode_carefully(piece[1:])
            elif piece:
                ids += self._encode_carefully(piece)
        return ids

    # ── text that stays text ──────────────────────────────────────────────────────────────────────

    def _protect(self, messages: Sequence[Message]) -> tuple[list[Message], _Marks]:
        cleaned = [Message(m.role, clean_text(m.content)) for m in messages]
        marks = _Marks("".join(m.content for m in cleaned))
        return [Message(m.role, self._protected(m, marks)) for m in cleaned], marks

    def _protected(self, message: Message, marks: _Marks) -> str:
        # The model's own answers keep their visible marks (such as <think>): templates look for them.
        own = message.role == "assistant"
        text = (self._hidden if own else self._any).sub(lambda m: marks.hide(m.group()), message.content)
        if self._is_ordinary(marks.without(text), own):
            return text
        return marks.hide(message.content)  # a normaliser would turn other characters into a control string

    def _has_no_control(self, text: str, own: bool) -> bool:
        return not (self._hidden_ids if own else self._control_ids).intersection(self._chat.encode(text))

    def _encode_carefully(self, text: str) -> list[int]:
        ids = self._chat.encode(text)
        if not self._control_ids.intersection(ids):
            return ids
        ids = [i for c in text for i in self._chat.encode(c)]
        if self._control_ids.intersection(ids):
            raise ChatError(f"this tokenizer has no plain tokens for {text[:80]!r}")
        return ids

    def _encode(self, text: str, marks: _Marks) -> list[int]:
        ids: list[int] = []
        for piece, hidden in marks.pieces(text):
            ids += self.encode_plain(piece) if hidden else self._chat.encode(piece) if piece else []
        return ids

    # ── contexts ──────────────────────────────────────────────────────────────────────────────────

    def _whole(self, safe: Sequence[Message], marks: _Marks) -> list[int]:
        return self._encode(self._chat.template(safe, add_generation_prompt=True), marks)

    def _extension(self, safe: Sequence[Message], marks: _Marks, known: int, last: int) -> list[int] | None:
        """The delta after a context that ends with token ``last``; None when history was rewritten."""
        end_of_turn = self._end_of_turn(safe, marks, known)
        try:
            opened = self._chat.template(safe[: known - 1], add_generation_prompt=True)
            before = self._chat.template(safe[:known], add_generation_prompt=False)
        except ChatError:
            return None  # a template that cannot show history up to here cannot prove that it left it alone
        now = self._chat.template(safe, add_generation_prompt=True)
        if not (before.startswith(opened) and before.endswith(end_of_turn) and now.startswith(before)):
            return None
        answer = before[len(opened) : len(before) - len(end_of_turn)]
        if answer.strip() != safe[known - 1].content.strip():
            return None
        return self._after_turn(end_of_turn, end_of_turn + now[len(before) :], marks, last)

    def _end_of_turn(self, safe: Sequence[Message], marks: _Marks, known: int) -> str:
        """What the template writes after an answer that is the last message."""
        marked = marks.hide("answer")
        try:
            text = self._chat.template([*safe[: known - 1], Message("assistant", marked)], add_generation_prompt=False)
        except ChatError:
            return ""
        return text.rpartition(marked)[2]

    def _after_turn(self, end_of_turn: str, rest: str, marks: _Marks, last: int) -> list[int] | None:
        ids = self._encode(rest, marks)
        if last not in self._chat.stop_ids:
            return ids
        end = self._chat.encode(end_of_turn) if end_of_turn else []
        at = next((i for i, token in enumerate(end) if token in self._chat.stop_ids), None)
        if at is None:
            return ids  # this template ends turns without a token; the sampled one stands alone
        if end[at] != last or self._chat.decode(end[:at]).strip() or ids[: at + 1] != end[: at + 1]:
            return None
        return ids[at + 1 :]


class _Marks:
    """Sentinels for pieces of text that the template must carry through unread."""

    def __init__(self, text: str) -> None:
        self._edge = next((chr(c) for c in _PRIVATE_USE if chr(c) not in text), "")
        if not self._edge:
            raise ChatError("the chat uses every private-use character; none is left to mark text with")
        self._hidden: list[str] = []
        self._pattern = re.compile(f"{self._edge}([0-9]+){self._edge}")

    def hide(self, text: str) -> str:
        """A sentinel that stands for ``text`` (which may hold sentinels itself)."""
        self._hidden.append(self._pattern.sub(lambda m: self._hidden[int(m[1])], text))
        return f"{self._edge}{len(self._hidden) - 1}{self._edge}"

    def without(self, text: str) -> str:
        """``text`` with a space in place of each sentinel."""
        return self._pattern.sub(" ", text)

    def pieces(self, text: str) -> list[tuple[str, bool]]:
        """``text`` in order: (piece, whether it was hidden)."""
        out = []
        for i, piece in enumerate(self._pattern.split(text)):
            out.append((self._hidden[int(piece)], True) if i % 2 else (piece, False))
        return out


def fit_budget(num_context: int, max_tokens: int, max_model_len: int) -> int:
    """How many tokens may be sampled after a context of ``num_context``; 0 or less when there is no room at all."""
    return min(max_tokens, max_model_len - num_context)


def find_stop_ids(chat: ChatTokenizer, eos_ids: Sequence[int]) -> tuple[int, ...]:
    """The tokenizer's own end tokens, and the control token with which the template ends an answer."""
    mark = chr(_PRIVATE_USE.start)
    dialogue = [Message("user", "?"), Message("assistant", mark)]
    after = chat.template(dialogue, add_generation_prompt=False).rpartition(mark)[2]
    hidden = {chat.control[s] for s in chat.hidden}
    ends = [i for i in chat.encode(after) if i in hidden] if after else []
    return tuple(sorted({*eos_ids, *ends[:1]}))


def _check(messages: Sequence[Message], known: int, prefix_ids: Sequence[int]) -> None:
    if not messages:
        raise ChatError("a chat needs at least one message")
    for message in messages:
        if message.role not in ROLES:
            raise ChatError(f"message role {message.role[:40]!r} is not one of {', '.join(ROLES)}")
    if not prefix_ids and not known:
        return
    if not 1 < known < len(messages) or not prefix_ids:
        raise ChatError(
            f"{known} known messages of {len(messages)} with {len(prefix_ids)} prefix tokens: a prefix covers a message "
            "and the model's answer to it, and at least one message is new"
        )
    if messages[known - 1].role != "assistant":
        raise ChatError(f"the last known message is the model's own answer, not one of role {messages[known - 1].role}")


def _alternatives(strings: Collection[str]) -> re.Pattern[str]:
    """Matches any of ``strings``, the longest first; nothing at all when there are none."""
    return re.compile("|".join(map(re.escape, sorted(strings, key=len, reverse=True))) or r"(?!)")


def _common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    length = min(map(len, sequences))
    return next((i for i in range(length) if len({s[i] for s in sequences}) > 1), length)
