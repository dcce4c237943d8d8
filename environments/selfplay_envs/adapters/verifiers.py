"""Environments written for the verifiers library: ``verifiers:NAME``, one seat.

NAME is what ``verifiers.load_environment`` takes: an installed module with a function ``load_environment``. An example of
its dataset is drawn per game; the library's own rollout runs (its stop conditions, its replies, its tools), with a client in
the place of the model's that hands every request to the seat; the reward is its rubric's, of a group of one.

    rollout ── chat.completions.create ──► Client ──question──► view of the seat
            ◄──── ChatCompletion ───────────┘  ◄────move────────┘

The library is of one conversation per model: a system message becomes the rules, what is new since the last answer the
view. Tools are offered as text, and called with ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``. An error that the
library logs and passes over (a reward function that raises counts as 0 there) fails the game here.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from selfplay.environment import Environment, Forfeit, Outcome
from selfplay.errors import ConfigError
from selfplay.types import Scalar
from selfplay_envs.adapters import verifiers_library as installed
from selfplay_envs.adapters.common import with_parameters
from selfplay_envs.adapters.conversation import Ask, Conversation
from selfplay_envs.adapters.verifiers_forms import as_completion, as_text, new_messages, tool_rules

MODEL = "selfplay"
MAX_TURNS = 100
_NUM_SUGGESTIONS = 40

Question = Mapping[str, Any]
"""What a rollout asks: ``messages`` (or ``prompt``, in the completion style) and ``tools``."""


class Client:
    """Stands where the library has its client of a model: every request becomes a question to the seat."""

    def __init__(self, ask: Ask[Question]) -> None:
        self._ask = ask
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._chat))
        self.completions = SimpleNamespace(create=self._complete)

    async def _chat(self, *, messages: Sequence[Any], tools: Sequence[Any] = (), **_sampling: object) -> Any:
        return as_completion(
            await self._ask({"messages": list(messages), "tools": tuple(tools)}), chat=True, tools=bool(tools)
        )

    async def _complete(self, *, prompt: str, **_sampling: object) -> Any:
        return as_completion(await self._ask({"messages": [{"role": "user", "content": prompt}]}), chat=False)


class VerifiersGame(Environment):
    """An environment of verifiers. Subclasses, made by `VerifiersAdapter`, name it."""

    seats: Sequence[str] = ("player",)
    zero_sum = False
    reward_range = (-1e6, 1e6)
    forfeit = Forfeit(retries=0, offender=0.0, others=0.0)
    max_turns = MAX_TURNS
    max_move_tokens = 512
    global_random = True
    name = ""

    @classmethod
    def load(cls, arguments: Mapping[str, Scalar]) -> Any:
        """The library's environment; all games of one set of parameters share one, as in the library."""
        return installed.loaded(cls.name, tuple(sorted(arguments.items())))

    def __init__(self, rng: random.Random, split: str = "train", example: int = -1, **arguments: Scalar) -> None:
        super().__init__(rng)
        self.env = self.load(arguments)
        self._row = self._drawn(split, example)
        self._said: list[str] = []
        self._begun: Conversation[Question, Any] | None = None
        self._seen: list[Any] = []
        self._rules = self._view = ""

    @property
    def _talk(self) -> Conversation[Question, Any]:
        """The rollout, begun when the game is first looked at: one that is never played holds nothing."""
        if self._begun is None:
            with installed.errors_heard():
                self._begun = Conversation(self._rollout)
            self._look()
        return self._begun

    async def _rollout(self, ask: Ask[Question]) -> Any:
        """The library's own rollout and its rubric's score; its state with ``reward`` and ``metrics``."""
        state = await self.env.rollout(dict(self._row), Client(ask), MODEL, {})
        if (error := state.get("error")) is not None:
            raise error
        await self.env.rubric.score_group([state], score_sem=contextlib.nullcontext())
        return state

    def rules(self, seat: str) -> str:
        return self._rules  # to_move(), which comes first, has begun the rollout

    def to_move(self) -> Sequence[str]:
        return () if self._talk.question is None else self.seats

    def view(self, seat: str) -> str:
        return self._view

    def parse(self, seat: str, text: str) -> str:
        return text

    def suggestions(self, seat: str) -> Sequence[str]:
        """Words of what was said last, then the example's own answer: enough to see both ends of the rewards."""
        words = re.findall(r"\w+", self._view)[-_NUM_SUGGESTIONS:]
        return list(dict.fromkeys([*words, str(self._row.get("answer") or "yes")]))

    def step(self, moves: Mapping[str, str]) -> None:
        self._said.append(moves["player"])
        talk = self._talk
        with installed.errors_heard():
            talk.answer(moves["player"])
        self._look()

    def outcome(self) -> Outcome:
        state: Any = self._talk.result
        metrics = {str(k): float(v) for k, v in (state["metrics"] or {}).items()}
        reward = float(state["reward"])
        return Outcome(
            rewards={"player": reward}, reason=f"{state['stop_condition']}: reward {reward:g}",
            info={**metrics, "example_id": int(state["example_id"])},
        )  # fmt: skip

    def transcript(self) -> str:
        return "\n".join(self._said)

    def close(self) -> None:
        if self._begun is not None:
            self._begun.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> VerifiersGame:
        """A new rollout of the same example, told the same answers: a conversation cannot be copied where it stands."""
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        memo[id(self)] = twin
        twin.rng = random.Random()
        twin.rng.setstate(self.rng.getstate())
        twin._said, twin._begun, twin._seen = [], None, []
        for text in self._said:
            twin.step({"player": text})
        return twin

    def _drawn(self, split: str, example: int) -> Mapping[str, Any]:
        if split not in ("train", "eval"):
            raise ConfigError(f"split is {split!r}; it must be train or eval")
        rows = self.env.get_dataset() if split == "train" else self.env.get_eval_dataset()
        if not -1 <= example < len(rows):
            raise ConfigError(f"example is {example}; {split} has 0 to {len(rows) - 1}, and -1 draws one")
        row: Mapping[str, Any] = rows[self.rng.randrange(len(rows)) if example < 0 else example]
        return row

    def _look(self) -> None:
        """What the seat is to be told of the open question."""
        question = None if self._begun is None else self._begun.question
        if question is None:
            return
        messages = question["messages"]
        if not self._seen:
            system = [m for m in messages if m.get("role") == "system"]
            told = [as_text(system), tool_rules(question.get("tools", ()))]
            self._rules = "\n\n".join(t for t in told if t)
            self._view = as_text([m for m in messages if m not in system])
        else:
            self._view = as_text(new_messages(self._seen, messages))
        self._seen = messages


class VerifiersAdapter:
    """Entry point of the scheme ``verifiers``."""

    distribution = "verifiers"

    def names(self) -> Sequence[str]:
        """Installed distributions that ask for verifiers: an environment has the name of its distribution."""
        return installed.names()

    def environment(self, name: str) -> type[VerifiersGame]:
        """The class of an environment; the plain parameters of its ``load_environment`` become the class's."""
        distribution, source, arguments = installed.found(name)
        members: dict[str, Any] = {"name": name, "__doc__": f"{name} of verifiers."}
        members |= {"distribution": distribution} if distribution else {"data_files": (source,)}
        kind = type("VerifiersGame", (VerifiersGame,), members)
        kind.__module__ = __name__

        def init(self: VerifiersGame, rng: random.Random, **values: Scalar) -> None:
            VerifiersGame.__init__(self, rng, **values)  # type: ignore[arg-type]

        kind.__init__ = with_parameters(init, {"split": "train", "example": -1, **arguments})  # type: ignore[misc]
        return kind


ADAPTER = VerifiersAdapter()
