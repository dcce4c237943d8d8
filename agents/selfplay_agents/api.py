"""A model behind an OpenAI-compatible API. The key comes from the environment variable SELFPLAY_API_KEY alone."""

from __future__ import annotations

from selfplay.agent import Answer, Decision, Message, PlayerContext
from selfplay.errors import ConfigError
from selfplay.play.chat_api import ChatApi, api_base
from selfplay.registry.parameters import Parameter, check_values

OPTIONS = (
    Parameter(name="base", kind="str", default=""),
    Parameter(name="model", kind="str", default=""),
    Parameter(name="timeout_s", kind="float", default=60.0),
    Parameter(name="retries", kind="int", default=3),
)


class APIPlayer:
    """Keeps one chat per game. Options: ``base`` (or SELFPLAY_API_BASE), ``model``, ``timeout_s``, ``retries``.

    A request that fails for good raises `EngineError`: the game is void, never lost.
    """

    def __init__(self, context: PlayerContext) -> None:
        options = check_values("agent kind api", OPTIONS, context.options)
        timeout_s, retries = float(options["timeout_s"]), int(options["retries"])
        if timeout_s <= 0 or not 0 <= retries <= 20:
            raise ConfigError(
                f"agent kind api: timeout_s is {timeout_s:g} and retries {retries}; they must be > 0 and 0 to 20"
            )
        self._api = ChatApi(api_base(str(options["base"])), str(options["model"]), timeout_s=timeout_s, retries=retries)
        self._sampling = context.sampling
        self._messages: list[Message] = []

    async def decide(self, decision: Decision) -> Answer:
        if not self._messages:
            self._messages.append(Message("system", decision.rules))
        messages = [*self._messages, Message("user", _prompt(decision))]
        sampling = self._sampling
        choice = await self._api.complete(
            messages, temperature=sampling.temperature, top_p=sampling.top_p, max_tokens=sampling.max_tokens
        )
        self._messages = [*messages, Message("assistant", choice.text)]
        return Answer(text=choice.text, stop_reason="length" if choice.finish_reason == "length" else "stop")

    async def close(self) -> None:
        """Nothing is held: a cancelled request has closed its connection."""


def _prompt(decision: Decision) -> str:
    parts = [decision.complaint] if decision.complaint else [decision.view]
    if decision.legal_moves is not None:
        parts.append(f"Legal moves: {', '.join(decision.legal_moves)}")
    return "\n".join(parts)
