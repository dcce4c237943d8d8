"""From what the engine was given to what the trainer is given, over three chat templates: token for token the same.

Real tokenizers and templates, the real server logic, player, play loop and segments; only the engine is a fake, which writes
down every context it is given and answers with ids that no tokenizer would make of their text.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.policy_samples import CHATML, LLAMA3, QWEN3, write_tokenizer
from tests.test_rendering_chat import CHATML_SPECIALS, LLAMA3_SPECIALS
from tests.toy_games import Turns

from selfplay.agent import Answer, PlayerContext, Sampling
from selfplay.play import play
from selfplay.policy.chat import HfChat
from selfplay.policy.engine import Sampled
from selfplay.policy.fake import FakeEngine
from selfplay.policy.service import PolicyService
from selfplay.policy.settings import PolicyServerConfig
from selfplay.scoring import episode_segments
from selfplay.types import Episode, Match, SeatAssignment, Segment
from selfplay.wire.messages import Generate
from selfplay_agents.llm import LLMPlayer

NUM_TURNS = 6
TEMPLATES = {
    "chatml": (CHATML, CHATML_SPECIALS, "<|im_end|>", ()),
    "llama3": (LLAMA3, LLAMA3_SPECIALS, "<|eot_id|>", ()),
    "qwen3": (QWEN3, CHATML_SPECIALS, "<|im_end|>", ("<think>", "</think>")),
}


class Writing(FakeEngine):
    """Answers ``says`` byte by byte (a merge of the tokenizer is never used), and keeps each context with its answer."""

    def __init__(self, chat: HfChat, says: str, *, stops: bool) -> None:
        super().__init__()
        self.chat, self.says, self.stops = chat, says, stops
        self.seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    async def generate(
        self, request: str, ids: Sequence[int], sampling: Sampling, stop_ids: Sequence[int], adapter: str | None
    ) -> Sampled:
        answer: list[int] = []
        for piece in self.says.split("|"):
            own = [self.chat.control[piece]] if piece in self.chat.control else []
            answer += own or [i for c in piece for i in self.chat.encode(c)]
        answer += [self.chat.stop_ids[-1]] if self.stops else []
        finish = "stop" if self.stops and len(answer) <= sampling.max_tokens else "length"
        answer = answer[: sampling.max_tokens]
        self.seen.append((tuple(ids), tuple(answer)))
        return Sampled(ids=tuple(answer), logprobs=(-0.5,) * len(answer), finish=finish)  # type: ignore[arg-type]


class Direct:
    """`PolicyClient` without a wire."""

    def __init__(self, service: PolicyService) -> None:
        self.service = service

    async def generate(self, assignment: SeatAssignment, **fields: Any) -> Answer:
        for name in ("messages", "prefix_ids"):
            fields[name] = tuple(fields[name])
        message = Generate(request=1, agent=assignment.agent, pin="turn", timeout_s=5.0, **fields)
        reply: Any = await self.service.handle(message)
        answer: Answer = reply.answer
        return answer

    async def choose(self, agent: str, pin: str | int, question: Any) -> Any:
        raise AssertionError("nobody asks")


def game(
    place: Path, template: str, says: str, *, stops: bool, table: Turns | None = None, max_model_len: int = 4096
) -> tuple[Episode, Writing]:
    text, specials, eos, added = TEMPLATES[template]
    chat = HfChat(str(write_tokenizer(place, text, specials, eos, added=added)))
    engine = Writing(chat, says, stops=stops)
    config = PolicyServerConfig(address="", runtime_dir="", model="m", max_model_len=max_model_len)
    policy = Direct(PolicyService(config, engine, asyncio.run(engine.start()), chat, None))
    seats = tuple(SeatAssignment(seat=s, player="llm", agent="base", trained=True) for s in ("a", "b"))
    match = Match(index=0, env="turns-v0", seed=0, seats=seats)
    players = {
        s.seat: LLMPlayer(
            PlayerContext(
                assignment=s, episode_id="0.0", rng=random.Random(0), policy=policy, sampling=Sampling(), env_id="turns-v0",
                options={},
            )
        )
        for s in seats
    }  # fmt: skip
    table = table or Turns(random.Random(0), length=NUM_TURNS)
    episode = asyncio.run(play("turns-v0", table, players, match, env_source="test"))
    return episode, engine


def trained_contexts(segments: Sequence[Segment]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(context, tokens) of every run of actions."""
    out = []
    for segment in segments:
        start = None
        for t in range(len(segment.ids) + 1):
            is_action = t < len(segment.ids) and bool(segment.mask[t])
            if is_action and start is None:
                start = t
            if not is_action and start is not None:
                out.append((segment.ids[:start], segment.ids[start:t]))
                start = None
    return out


@pytest.mark.parametrize("stops", [True, False], ids=["stopped", "cut"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_every_trained_token_stands_behind_what_it_was_sampled_from(tmp_path: Path, template: str, stops: bool) -> None:
    says = "<think>|hello or not|</think>|x" if template == "qwen3" else "x"
    if template != "qwen3":
        says = "hello x"
    episode, engine = game(tmp_path, template, says, stops=stops)
    sampled = [t for t in episode.turns if t.sampled_ids]
    assert len(sampled) == len(engine.seen) == NUM_TURNS

    segments = episode_segments(episode, {"a": 1.0, "b": 1.0})
    assert sorted(trained_contexts(segments)) == sorted(engine.seen), "no token added, lost, merged or moved"
    assert sum(s.num_actions for s in segments) == sum(len(answer) for _, answer in engine.seen)
    stop = engine.chat.stop_ids[-1]
    for segment in segments:
        trained_stops = sum(m for i, m in zip(segment.ids, segment.mask, strict=True) if i == stop)
        answers = len(trained_contexts([segment]))
        assert trained_stops == (answers if stops else 0), "the sampled stop token is trained, an added one never"
    canonical = engine.chat.encode(engine.chat.decode(engine.seen[0][1]))
    assert list(engine.seen[0][1])[: len(canonical)] != canonical, (
        "the ids are not what a tokenizer would make of the text"
    )


def test_stripped_thinking_forks_and_nothing_else_does(tmp_path: Path) -> None:
    episode, _ = game(tmp_path / "q", "qwen3", "<think>|hello|</think>|x", stops=True)
    by_seat = [[t.fork for t in episode.turns if t.seat == seat] for seat in ("a", "b")]
    assert all(forks[0] is False and all(forks[1:]) for forks in by_seat), "each later turn is a context of its own"
    episode, _ = game(tmp_path / "c", "chatml", "hello x", stops=True)
    assert not any(t.fork for t in episode.turns)
    assert len(episode_segments(episode, {"a": 1.0, "b": 1.0})) == 2, "one segment per seat"
