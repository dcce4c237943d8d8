"""Juries: who answers an environment's questions with probabilities of labels.

A verdict is the probability mass a model puts on each label, read from its distribution and never from text it wrote:
it always exists, and nothing said in the game can forge it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol

from selfplay.agent import Message, PolicyClient
from selfplay.environment import JuryQuestion
from selfplay.errors import EngineError
from selfplay.play.chat_api import ChatApi, TopLogprob


class Jury(Protocol):
    """Answers questions. ``name`` is recorded with every answer."""

    @property
    def name(self) -> str: ...

    async def judge(self, question: JuryQuestion) -> Mapping[str, float]:
        """Label → probability for every label of the question; raises `EngineError` when no answer can come."""
        ...


class PolicyJury:
    """A served model: the frozen base, or ``agent`` at a version (or at the current one, with pin ``turn``)."""

    def __init__(self, policy: PolicyClient, agent: str, pin: Literal["turn", "episode"] | int = "turn") -> None:
        self._policy, self._agent, self._pin = policy, agent, pin
        self.name = agent if isinstance(pin, str) else f"{agent}@{pin}"

    async def judge(self, question: JuryQuestion) -> Mapping[str, float]:
        return await self._policy.choose(self._agent, self._pin, question)


class ApiJury:
    """A model behind an OpenAI-compatible API that returns ``top_logprobs`` of its first token."""

    def __init__(self, api: ChatApi, *, top_logprobs: int = 20) -> None:
        self._api, self._top = api, top_logprobs
        self.name = f"api:{api.model}"

    async def judge(self, question: JuryQuestion) -> Mapping[str, float]:
        """Probabilities from the first token's alternatives; chat APIs take no begun answer, so the prompt asks for it."""
        labels = ", ".join(question.labels)
        prompt = f"{question.prompt}\n\nAnswer with nothing but the label ({labels}) that completes: {question.lead}"
        choice = await self._api.complete(
            [Message("system", question.system), Message("user", prompt)],
            max_tokens=1, temperature=1.0, logprobs=True, top_logprobs=self._top,
        )  # fmt: skip
        masses = label_masses(question.labels, choice.first_top_logprobs())
        total = sum(masses.values())
        if not total > 0.0:
            raise EngineError(
                f"jury {self.name} gave no probability to any of the labels {labels}; "
                f"the API must return top_logprobs, and the model must answer with a label"
            )
        return {label: mass / total for label, mass in masses.items()}


class FixedJury:
    """Gives the answers it was made with, over and over, in order: for tests and for playing without a model."""

    def __init__(self, answers: Iterable[Sequence[float]] = ((0.5, 0.5),), name: str = "fixed") -> None:
        self._answers, self._next, self.name = list(answers), 0, name

    async def judge(self, question: JuryQuestion) -> Mapping[str, float]:
        answer = self._answers[self._next % len(self._answers)]
        self._next += 1
        return dict(zip(question.labels, answer, strict=True))


def label_masses(labels: Sequence[str], alternatives: Iterable[TopLogprob]) -> dict[str, float]:
    """Label → summed probability of the alternatives that say it, spaces and case aside."""
    masses = dict.fromkeys(labels, 0.0)
    by_text = {label.strip().casefold(): label for label in labels}
    for alternative in alternatives:
        label = by_text.get(alternative.token.strip().casefold())
        if label is not None and math.isfinite(alternative.logprob):
            masses[label] += math.exp(min(0.0, alternative.logprob))
    return masses
