"""``selfplay bench train``: the packed trainer against the usual padded one, and several agents against one.

Both trainers compute the same gradients of the same trajectories on the same base (smollm2-135m) with one thread; that
they are the same is checked in the run that is timed, and again in float32, where rounding leaves no room. Speed is in
trajectory tokens, each counted once however often a trainer computes it, per second of processor time: with one thread
that is the work itself, whatever else the machine is busy with. The base has the dtype that a run would give it here:
bfloat16, or float32 on processors that only emulate bfloat16.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from selfplay.bench import trie
from selfplay.bench.report import Row
from selfplay.config import Config
from selfplay.errors import RunError
from selfplay.models import resolve_model
from selfplay.models.machine import auto_dtype
from selfplay.scoring import action_counts, sequence_counts
from selfplay.scoring.packing import plan_micro_batches
from selfplay.types import Segment

if TYPE_CHECKING:
    from torch import Tensor

    from selfplay.bench.padded import PaddedTrainer
    from selfplay.training.trainer import Trainer
    from selfplay.wire.messages import TrainStep

MODEL = "smollm2-135m"
AGENTS = ("con", "pro")
FOUR = ("east", "north", "south", "west")
RULES_TOKENS, VIEW_TOKENS, MOVE_TOKENS = 100, 24, 24
"""Of a game's first prompt, of what a seat sees each later turn, and of what it says."""
MIN_COSINE = {"float32": 0.999999, "bfloat16": 0.99}
"""Between the two trainers' gradients; bfloat16 rounds at each step of two different routes."""


Dtype = Literal["float32", "bfloat16"]


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured."""

    episodes: int
    turns: int
    repeats: int


FULL, QUICK = Size(episodes=1, turns=6, repeats=3), Size(episodes=1, turns=3, repeats=1)


def run(quick: bool) -> list[Row]:
    """Rows ``packed_vs_naive``, ``trie_vs_packed`` (higher is better) and ``n_adapters_vs_one`` (1 is best)."""
    import torch

    model = resolve_model(MODEL)
    size, folder, dtype = QUICK if quick else FULL, model.path, auto_dtype(model.default_dtype)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        check_same_gradients(folder)
        return [
            packed_vs_naive(folder, size, dtype), n_adapters_vs_one(folder, size, dtype), *trie_vs_packed(folder, quick)
        ]  # fmt: skip
    finally:
        torch.set_num_threads(threads)


def check_same_gradients(folder: Path) -> None:
    """One short game in float32."""
    segments = trajectories(AGENTS, Size(episodes=1, turns=2, repeats=1))
    packed, naive = _packed(folder, "float32", AGENTS), _padded(folder, "float32")
    _start_alike(packed, naive)
    num_actions = action_counts(segments, AGENTS)
    packed.accumulate(_message(segments))
    naive.accumulate(segments, num_actions, cap=Config().algorithm.tis_cap)
    _require_same(packed, naive, "float32")


def packed_vs_naive(folder: Path, size: Size, dtype: Dtype) -> Row:
    """Trajectory tokens per CPU second, forward and backward of one batch."""
    segments = trajectories(AGENTS, size)
    packed, naive = _packed(folder, dtype, AGENTS), _padded(folder, dtype)
    _start_alike(packed, naive)
    message, num_actions, cap = _message(segments), action_counts(segments, AGENTS), Config().algorithm.tis_cap

    def packed_pass() -> None:
        for optimizer in packed.optimizers.values():
            optimizer.forget_grad()
        packed.accumulate(message)

    def naive_pass() -> None:
        naive.forget_gradients()
        naive.accumulate(segments, num_actions, cap=cap)

    packed_s, naive_s = _side_by_side(packed_pass, naive_pass, size.repeats)
    _require_same(packed, naive, dtype)
    num_tokens = sum(len(s.ids) for s in segments)
    return Row(
        name="packed_vs_naive", value=num_tokens / packed_s, unit="tok/CPU-s", ratio=naive_s / packed_s, repeats=size.repeats,
        reference=f"padded trainer, one sample per turn, full logits, peft, both {dtype}",
    )  # fmt: skip


def n_adapters_vs_one(folder: Path, size: Size, dtype: Dtype) -> Row:
    """Time of a whole step whose tokens belong to four agents, against the same tokens of one agent."""
    trainer = _packed(folder, dtype, FOUR)
    of_four = trajectories(FOUR, size)
    of_one = [msgspec.structs.replace(s, agent=FOUR[0]) for s in of_four]
    four_s, one_s = _side_by_side(_step(trainer, of_four), _step(trainer, of_one), size.repeats)
    return Row(
        name="n_adapters_vs_one", value=four_s, unit="CPU-s/step", ratio=four_s / one_s, repeats=size.repeats,
        reference=f"the same tokens, all of one agent, {dtype}",
    )  # fmt: skip


def trie_vs_packed(folder: Path, quick: bool) -> list[Row]:
    """Shared beginnings computed once against every segment computed whole, in float32, where gradients can be compared."""
    batches = [
        (
            "trie_vs_packed",
            "a group of 8 debates of one motion",
            trie.debate_group(AGENTS, turns=1 if quick else trie.TURNS),
        ),
        ("trie_vs_packed_kuhn", "a batch of Kuhn poker", trie.kuhn_batch(folder, 16 if quick else 128)),
    ]
    rows = []
    for name, what, segments in batches:
        trainer = _packed(folder, "float32", sorted({s.agent for s in segments}))
        found: dict[bool, dict[str, Tensor]] = {}
        shared, whole = trie.passes(trainer, segments)
        shared_s, whole_s = _side_by_side(
            _gradients(trainer, shared, found, share=True), _gradients(trainer, whole, found, share=False), 1
        )
        trie.require_same(found[True], found[False])
        num, distinct = trie.tokens(segments)
        rows.append(Row(
            name=name, value=num / shared_s, unit="tok/CPU-s", ratio=whole_s / shared_s,
            reference=f"each segment computed whole: {what}, {num} tokens of which {distinct} distinct, float32",
        ))  # fmt: skip
    return rows


def _gradients(
    trainer: Trainer, message: TrainStep, found: dict[bool, dict[str, Tensor]], *, share: bool
) -> Callable[[], None]:
    """A forward and backward pass that leaves its gradients in ``found``."""

    def work() -> None:
        for optimizer in trainer.optimizers.values():
            optimizer.forget_grad()
        trainer.accumulate(message, share=share)
        found[share] = {a: o.flat.grad.clone() for a, o in trainer.optimizers.items() if o.flat.grad is not None}

    return work


def trajectories(agents: Sequence[str], size: Size) -> list[Segment]:
    """Whole trajectories of made-up games: every seat reads the rules once, then sees and speaks in turn."""
    rng = random.Random(0)

    def tokens(mean: int) -> list[int]:
        return [rng.randrange(5, 49_000) for _ in range(rng.randint(mean // 2, mean * 3 // 2))]

    segments = []
    for episode in range(size.episodes):
        for agent in agents:
            ids, mask = tokens(RULES_TOKENS), []
            mask += [0] * len(ids)
            for _ in range(size.turns):
                seen, said = tokens(VIEW_TOKENS), tokens(MOVE_TOKENS)
                ids += seen + said
                mask += [0] * len(seen) + [1] * len(said)
            advantage = rng.choice((-1.0, 1.0))
            segments.append(Segment(
                episode_id=f"{episode}.0", agent=agent, seat=agent, ids=tuple(ids), mask=tuple(mask),
                logprobs=tuple(m * -rng.uniform(9.0, 13.0) for m in mask), advantages=tuple(m * advantage for m in mask),
                versions=(0, 0),
            ))  # fmt: skip
    return segments


def _packed(folder: Path, dtype: str, agents: Sequence[str]) -> Trainer:
    """The trainer of a single rank."""
    import torch

    from selfplay.training.group import RankGroup
    from selfplay.training.model import load_policy
    from selfplay.training.trainer import Trainer

    config = Config()
    policy = load_policy(
        folder, dtype=getattr(torch, dtype), adapters=dict.fromkeys(agents, config.lora), seed=config.seed
    )
    return Trainer(policy, config, RankGroup())


def _padded(folder: Path, dtype: str) -> PaddedTrainer:
    from selfplay.bench.padded import PaddedTrainer

    return PaddedTrainer(folder, dtype=dtype, lora=Config().lora, agents=AGENTS)


def _start_alike(packed: Trainer, naive: PaddedTrainer) -> None:
    """The same adapters for both, with B away from zero so that A gets a gradient, too."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for agent, adapter in packed.policy.adapters.items():
        flat = adapter.flat
        flat.data.add_(torch.empty(flat.shape).uniform_(-0.02, 0.02, generator=generator))
        naive.load(agent, adapter.tensors())


def _message(segments: Sequence[Segment]) -> TrainStep:
    """One step of a single rank."""
    from selfplay.wire.messages import TrainStep

    agents = tuple(sorted({s.agent for s in segments}))
    (rows,) = plan_micro_batches(segments, ranks=1, max_tokens=Config().train.micro_batch_tokens)
    return TrainStep(
        request=0, step=0, agents=agents, micro_batches=rows, num_actions=action_counts(segments, agents),
        num_sequences=sequence_counts(segments, agents),
    )  # fmt: skip


def _step(trainer: Trainer, segments: Sequence[Segment]) -> Callable[[], None]:
    message = _message(segments)
    return lambda: _discard(trainer.step(message))


def _side_by_side(first: Callable[[], None], second: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Median CPU seconds of each, in turn, so that a slow minute of the machine falls on both."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        stamps = [time.process_time()]
        for work in (first, second):
            work()
            stamps.append(time.process_time())
        for kept, (start, end) in zip(times, pairwise(stamps), strict=True):
            kept.append(end - start)
    return statistics.median(times[0]), statistics.median(times[1])


def _require_same(packed: Trainer, naive: PaddedTrainer, dtype: str) -> None:
    """Raise `RunError` unless both trainers have the same gradient of each agent: a faster wrong one is no result."""
    for agent, adapter in packed.policy.adapters.items():
        expected = naive.gradients(agent)
        cosine = _cosine(adapter.flat.grad, [expected[name] for name in adapter.tensors()])
        if not cosine >= MIN_COSINE[dtype]:
            raise RunError(
                f"gradients of {agent} differ between the packed and the padded trainer in {dtype}: cosine {cosine:.6f}, "
                f"at least {MIN_COSINE[dtype]} is expected"
            )


def _cosine(flat: Tensor | None, parts: Sequence[Tensor]) -> float:
    """Cosine of two gradients, times the smaller over the larger norm: 1 only where both direction and size agree."""
    import torch

    if flat is None:
        return 0.0
    a, b = flat.double(), torch.cat([p.reshape(-1) for p in parts]).double()
    return float(a @ b / max(float(a @ a), float(b @ b)))


def _discard(_: Mapping[str, object]) -> None:
    """A step is timed, its report is not needed."""
