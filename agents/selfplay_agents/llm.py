"""The language-model player: rules as system message, view as user message, the answer's text left to the game to parse.

The chat grows by one user and one assistant message per decision, and the exact token ids of the context so far go back
with every request, so that nothing sampled is ever tokenised again.
"""

from __future__ import annotations

import msgspec

from selfplay.agent import Answer, Decision, Message, PlayerContext, Sampling
from selfplay.errors import ConfigError, UserError
from selfplay.registry.parameters import Parameter, check_values
from selfplay.types import derive_seed

OPTIONS = (
    Parameter(name="history", kind="str", default="full"),
    Parameter(name="legal", kind="str", default="auto"),
    Parameter(name="rules", kind="str", default="system"),
)


class LLMPlayer:
    """Asks a served policy.

    Options: ``history`` ``full`` (one growing chat per game) or ``last`` (each decision starts a new chat; a further try
    of the same decision continues it). ``legal`` ``auto`` (legal moves are listed unless the view names them all),
    ``always`` or ``never``. ``rules`` ``system`` (the system message) or ``none``: a small model that knows one game only
    learns several times as fast when what it must look at is not hidden behind a text that never changes.
    """

    def __init__(self, context: PlayerContext) -> None:
        options = check_values("agent kind llm", OPTIONS, context.options)
        if context.policy is None:
            raise UserError(f"seat {context.assignment.seat} is played by a model, but no model is served here")
        self._history = _one_of("history", options["history"], ("full", "last"))
        self._legal = _one_of("legal", options["legal"], ("auto", "always", "never"))
        self._rules = _one_of("rules", options["rules"], ("system", "none"))
        self._context, self._policy = context, context.policy
        self._messages: list[Message] = []
        self._ids: tuple[int, ...] = ()
        """The exact context so far: all of ``_messages`` as the model saw and wrote them."""
        self._num_turns = 0

    async def decide(self, decision: Decision) -> Answer:
        restart = not self._messages or (self._history == "last" and not decision.complaint)
        messages = self._opening(decision) if restart else list(self._messages)
        known, prefix = (0, ()) if restart else (len(messages), self._ids)
        messages.append(Message("user", self._prompt(decision)))
        answer = await self._policy.generate(
            self._context.assignment,
            episode_id=self._context.episode_id,
            messages=messages,
            known_messages=known,
            prefix_ids=prefix,
            sampling=self._sampling(),
        )
        if restart and self._num_turns:
            answer = msgspec.structs.replace(answer, fork=True)
        self._messages = [*messages, Message("assistant", answer.text)]
        self._ids = (() if answer.fork else prefix) + answer.prompt_ids + answer.sampled_ids
        self._num_turns += 1
        return answer

    async def close(self) -> None:
        """Nothing is held: the server forgets the episode when the worker says that it ended."""

    def _opening(self, decision: Decision) -> list[Message]:
        return [Message("system", decision.rules)] if self._rules == "system" else []

    def _prompt(self, decision: Decision) -> str:
        # A further try in a running chat need not show the view again: it stands right above.
        parts = [decision.complaint] if decision.complaint else [decision.view]
        if decision.legal_moves is not None and self._lists_legal(decision.view, decision.legal_moves):
            parts.append(f"Legal moves: {', '.join(decision.legal_moves)}")
        return "\n".join(parts)

    def _lists_legal(self, view: str, legal: tuple[str, ...]) -> bool:
        if self._legal == "auto":
            named = {word.strip(".,;:?!") for word in view.split()}
            return not all(move in named for move in legal)
        return self._legal == "always"

    def _sampling(self) -> Sampling:
        """The run's sampling; a seed, where one is set, becomes one per game, seat and turn."""
        sampling = self._context.sampling
        if sampling.seed is None:
            return sampling
        parts = (sampling.seed, self._context.episode_id, self._context.assignment.seat, self._num_turns)
        return msgspec.structs.replace(sampling, seed=derive_seed(*parts) % 2**31)


def _one_of(name: str, value: object, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ConfigError(f"agent kind llm: {name} is {value!r}; it must be {' or '.join(known)}")
    return str(value)
