"""Scorers: what each says of an episode, what becomes of it, and the combinations that are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from selfplay.config import load_config
from selfplay.config.schema import ScorerConfig
from selfplay.environment import JuryQuestion
from selfplay.errors import ConfigError, UnknownNameError
from selfplay.scoring import Scores, agents_with_signal, episode_segments, load_panel, scores_fault
from selfplay.scoring.judges import EnvironmentReward, JuryProcess, JuryReward, Legality, Teacher
from selfplay.scoring.scored import rewarded, with_teachers, with_turn_rewards
from selfplay.types import Episode, Match, PolicyVersion, SeatAssignment, Span, Turn


class Served:
    """A model whose logprob of token t is −t/10 and who always says what it is told to."""

    def __init__(self, says: Mapping[str, float] | None = None) -> None:
        self.says, self.asked = says or {}, list[tuple[str, Any]]()

    async def logprobs(self, who: str, ids: Sequence[int]) -> tuple[float, ...]:
        self.asked.append((who, tuple(ids)))
        return tuple(-t / 10 for t in ids[1:])

    async def choose(self, who: str, question: JuryQuestion) -> Mapping[str, float]:
        self.asked.append((who, question.prompt))
        return {label: self.says[label] for label in question.labels}


def turn(
    seat: str, prompt: tuple[int, ...], sampled: tuple[int, ...], *, fork: bool = False, legal: bool = True
) -> Turn:
    return Turn(
        seat=seat, agent=seat, round=0, prompt_ids=prompt, fork=fork, sampled_ids=sampled, logprobs=(-1.0,) * len(sampled),
        spans=(Span(version=0, start=0, end=len(sampled)),), stop_reason="stop", text="x", move="x" if legal else None,
    )  # fmt: skip


GAME = Episode(
    match=Match(
        index=0, env="e-v0", seed=1,
        seats=(
            SeatAssignment(seat="pro", player="llm", agent="pro", trained=True),
            SeatAssignment(seat="con", player="llm", agent="con", pin=3),
        ),
    ),
    env_source="x", rewards={"pro": 1.0, "con": -1.0}, winners=("pro",), ended="natural", reason="",
    turns=(
        turn("pro", (1, 2), (3, 4), legal=False),
        turn("con", (9,), (9,)),
        turn("pro", (5,), (6,)),
        turn("pro", (7, 7), (8,), fork=True),
    ),
)  # fmt: skip


def score(scorer: Any, served: Served | None = None) -> Scores:
    scores: Scores = asyncio.run(scorer.score(GAME, served or Served()))
    assert scores_fault(scores, GAME) == ""
    return scores


def test_the_environment_says_how_the_game_went() -> None:
    assert score(EnvironmentReward(ScorerConfig())).rewards == {"pro": 1.0, "con": -1.0}


def test_legality_rewards_each_turn() -> None:
    scores = score(Legality(ScorerConfig(options={"legal": 0.5, "illegal": 2.0})))
    assert scores.turn_rewards == {"pro": (-2.0, 0.5, 0.5), "con": (0.5,)}


def test_a_jury_rewards_what_is_above_an_even_share() -> None:
    served = Served({"pro": 0.75, "con": 0.25})
    assert score(JuryReward(ScorerConfig(agent="judge@2")), served).rewards == {"pro": 0.5, "con": -0.5}
    who, prompt = served.asked[0]
    assert who == "judge@2"
    assert "Which player played better?" in prompt


def test_a_process_jury_sees_the_game_up_to_the_turn() -> None:
    served = Served({"yes": 0.9, "no": 0.1})
    scores = score(JuryProcess(ScorerConfig()), served)
    assert scores.turn_rewards == {"pro": (0.4,) * 3, "con": (0.4,)}
    assert [prompt.count("pro: x") for _, prompt in served.asked] == [1, 1, 2, 3]


def test_a_teacher_reads_each_context_once_and_forks_apart() -> None:
    served = Served()
    scores = score(Teacher(ScorerConfig(agent="base")), served)
    assert served.asked == [("base", (1, 2, 3, 4, 5, 6)), ("base", (7, 7, 8))], "only the trained seat, one pass each"
    assert scores.teacher_logprobs == {"pro": (-0.3, -0.4, -0.6, -0.8)}


def test_scores_become_rewards_turn_credit_and_token_advantages() -> None:
    said = (
        (Scores(rewards={"pro": 0.5}, turn_rewards={"pro": (1.0, 0.0, -1.0)}), 2.0),
        (Scores(rewards={"pro": 1.0, "con": 1.0}, teacher_logprobs={"pro": (-3.0, -1.0, -1.0, 0.0)}), 0.5),
    )
    assert rewarded(GAME, said).rewards == {"pro": 1.5, "con": 0.5}
    assert rewarded(GAME, ()) is GAME
    credit = with_turn_rewards(GAME, {"pro": 0.25}, said)
    assert credit == {"pro": [2.25, 0.25, -1.75]}
    first, second = with_teachers(episode_segments(GAME, credit), said)
    assert first.advantages == (0, 0, 2.25 + 0.5 * (-3 + 1), 2.25, 0, 0.25)
    assert second.advantages == (0, 0, -1.75 + 0.5 * (0 + 1))


def test_a_teacher_that_agrees_gives_no_signal() -> None:
    same = ((Scores(teacher_logprobs={"pro": (-1.0,) * 4}), 1.0),)
    segments = with_teachers(episode_segments(rewarded(GAME, same), {"pro": 0.0}), same)
    assert agents_with_signal(segments) == ()


@pytest.mark.parametrize(
    ("scores", "fault"),
    [
        (Scores(rewards={"nobody": 1.0}), "scores the seat 'nobody', the episode has con, pro"),
        (Scores(turn_rewards={"pro": (1.0,)}), "3 turns but 1 turn rewards"),
        (Scores(teacher_logprobs={"pro": (1.0,)}), "sampled 4 tokens but there are 1 teacher logprobs"),
        (Scores(rewards={"pro": float("nan")}), "not a finite number"),
    ],
)
def test_scores_that_do_not_fit_are_refused(scores: Scores, fault: str) -> None:
    assert fault in scores_fault(scores, GAME)


def panel(*overrides: str) -> Any:
    return load_panel(load_config(None, ["env=e-v0", *overrides]))


def test_scorers_are_chosen_by_name() -> None:
    assert panel().scorers == {}
    chosen = panel("scorers.t.kind=teacher", "scorers.t.agent=pro@3", "scorers.environment.weight=2")
    assert sorted(chosen.scorers) == ["environment", "t"]
    assert chosen.teachers() == (PolicyVersion("pro", 3),)
    assert (chosen.is_teacher("t"), chosen.is_teacher("environment")) == (True, False)


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["scorers.techer.weight=1"], UnknownNameError, "unknown scorer 'techer'; did you mean 'teacher'"),
        (["scorers.teacher.weight=1"], ConfigError, "scorer teacher needs an agent"),
        (["scorers.teacher.agent=base", "rollout.temperature=0.7"], ConfigError, "rollout.temperature=0.7: set it to 1"),
        (["scorers.jury.agent=pro@1", "scorers.jury.model=tiny"], ConfigError, "is a version of this run, not of model tiny"),
        (["scorers.legality.options={legl=1.0}"], ConfigError, "no parameter 'legl'; did you mean 'legal'"),
    ],
)  # fmt: skip
def test_what_cannot_be_scored_with(overrides: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        panel(*overrides)


def test_a_seat_without_turns_is_scored_too() -> None:
    silent = replace(GAME, turns=())
    for scorer in (Legality(ScorerConfig()), Teacher(ScorerConfig(agent="base"))):
        assert scores_fault(asyncio.run(scorer.score(silent, Served())), silent) == ""
