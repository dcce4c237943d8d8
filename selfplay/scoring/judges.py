"""The scorers that come with the package: the environment, legality, two kinds of jury, and a teacher."""

from __future__ import annotations

from collections.abc import Sequence

from selfplay.config.schema import ScorerConfig
from selfplay.environment import JuryQuestion
from selfplay.errors import ConfigError
from selfplay.registry.parameters import Parameter, check_values
from selfplay.scoring.scorers import ScorerContext, Scores
from selfplay.types import Episode, Turn

MAX_SHOWN = 6000
"""Characters of a game that a jury is shown, its end."""


class EnvironmentReward:
    """What the environment itself says: how the game went."""

    def __init__(self, config: ScorerConfig) -> None:
        check_values("scorer environment", (), config.options)

    async def score(self, episode: Episode, context: ScorerContext) -> Scores:  # noqa: ARG002
        return Scores(rewards=dict(episode.rewards))


class Legality:
    """A process reward without a model: each turn gains ``legal``, or loses ``illegal``, by whether the game took it."""

    def __init__(self, config: ScorerConfig) -> None:
        known = (
            Parameter(name="legal", kind="float", default=0.0),
            Parameter(name="illegal", kind="float", default=1.0),
        )
        options = check_values("scorer legality", known, config.options)
        self._legal, self._illegal = float(options["legal"]), float(options["illegal"])

    async def score(self, episode: Episode, context: ScorerContext) -> Scores:  # noqa: ARG002
        return Scores(
            turn_rewards={
                seat: tuple(self._legal if t.legal else -self._illegal for t in turns)
                for seat, turns in _turns_by_seat(episode).items()
            }
        )


class JuryReward:
    """A served model says which seat did best; a seat's reward is its probability above an even share, from −1 to 1."""

    def __init__(self, config: ScorerConfig) -> None:
        known = (Parameter(name="question", kind="str", default="Which player played better?"),)
        self._question = str(check_values("scorer jury", known, config.options)["question"])
        self._agent = config.agent

    async def score(self, episode: Episode, context: ScorerContext) -> Scores:
        seats = [s.seat for s in episode.match.seats]
        if len(seats) < 2:
            return Scores()
        question = JuryQuestion(
            system="You watch a game and judge it.", prompt=f"{transcript(episode.turns)}\n\n{self._question}",
            lead="The better player is ", labels=tuple(seats),
        )  # fmt: skip
        shares = await context.choose(self._agent, question)
        even = 1.0 / len(seats)
        return Scores(rewards={seat: (shares[seat] - even) / (1.0 - even) for seat in seats})


class JuryProcess:
    """A process reward from a served model: is this turn good? Each turn gets its probability of yes, less a half."""

    def __init__(self, config: ScorerConfig) -> None:
        known = (Parameter(name="question", kind="str", default="Was the last answer a good move?"),)
        self._question = str(check_values("scorer process", known, config.options)["question"])
        self._agent = config.agent

    async def score(self, episode: Episode, context: ScorerContext) -> Scores:
        values = [await self._turn(episode.turns[: i + 1], context) for i in range(len(episode.turns))]
        by_seat: dict[str, list[float]] = {}
        for turn, value in zip(episode.turns, values, strict=True):
            by_seat.setdefault(turn.seat, []).append(value)
        return Scores(turn_rewards={seat: tuple(v) for seat, v in by_seat.items()})

    async def _turn(self, turns: Sequence[Turn], context: ScorerContext) -> float:
        question = JuryQuestion(
            system="You watch a game and judge each answer.", prompt=f"{transcript(turns)}\n\n{self._question}",
            lead="", labels=("yes", "no"),
        )  # fmt: skip
        return (await context.choose(self._agent, question))["yes"] - 0.5


class Teacher:
    """On-policy distillation: the log-probability a teacher gives to every token that a trained seat sampled."""

    def __init__(self, config: ScorerConfig) -> None:
        check_values("scorer teacher", (), config.options)
        if not config.agent:
            raise ConfigError("scorer teacher needs an agent: base, agent@n, or a trained agent")
        self._agent = config.agent

    async def score(self, episode: Episode, context: ScorerContext) -> Scores:
        turns = _turns_by_seat(episode)
        trained = [s.seat for s in episode.match.seats if s.trained and s.seat in turns]
        return Scores(teacher_logprobs={seat: await self._seat(turns[seat], context) for seat in trained})

    async def _seat(self, turns: Sequence[Turn], context: ScorerContext) -> tuple[float, ...]:
        """One pass per context: a fork begins another."""
        out: list[float] = []
        ids: list[int] = []
        actions: list[int] = []
        for turn in turns:
            if turn.fork and actions:
                out += await self._actions(ids, actions, context)
            if turn.fork:
                ids, actions = [], []
            ids += turn.prompt_ids
            actions += range(len(ids), len(ids) + len(turn.sampled_ids))
            ids += turn.sampled_ids
        return (*out, *(await self._actions(ids, actions, context) if actions else ()))

    async def _actions(self, ids: Sequence[int], actions: Sequence[int], context: ScorerContext) -> list[float]:
        logprobs = await context.logprobs(self._agent, ids[: actions[-1] + 1])
        return [logprobs[t - 1] for t in actions]


def transcript(turns: Sequence[Turn]) -> str:
    """What was said, one line per turn; the end of it where it is long."""
    text = "\n".join(f"{t.seat}: {t.text.strip() or '(nothing)'}" for t in turns)
    return text if len(text) <= MAX_SHOWN else f"[...]{text[-MAX_SHOWN:]}"


def _turns_by_seat(episode: Episode) -> dict[str, list[Turn]]:
    out: dict[str, list[Turn]] = {}
    for turn in episode.turns:
        out.setdefault(turn.seat, []).append(turn)
    return out
