"""What the trainer tests share: sample segments, rank configs, a plain peft reference, and real rank processes."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import zmq
from tests.patience import PATIENCE_S

from selfplay.config import Config
from selfplay.config.load import config_from_tree
from selfplay.config.schema import AlgorithmConfig
from selfplay.process import Child, RuntimeDir, spawn
from selfplay.scoring.packing import plan_micro_batches
from selfplay.training.config import RankConfig
from selfplay.types import Segment
from selfplay.wire.codec import Codec
from selfplay.wire.messages import FromTrainer, Stop, ToTrainer, TrainerFailed, TrainerHello, TrainStep

AGENTS = ("con", "pro")


def config(**sections: Any) -> Config:
    """A config with large steps, so that differences show."""
    tree: dict[str, Any] = {
        "model": "tiny",
        "seed": 7,
        "train": {"lr": 3e-3, "timeout_s": 60.0, "micro_batch_tokens": 64},
    }
    for name, value in sections.items():
        if isinstance(value, dict):
            tree.setdefault(name, {}).update(value)
        else:
            tree[name] = value
    return config_from_tree(tree)


def rank_config(model: Path, place: Path, settings: Config, **changes: Any) -> RankConfig:
    """Rank 0 of 1 on the tiny model unless ``changes`` say otherwise."""
    values: dict[str, Any] = {
        "model": str(model), "config": settings, "dtype": "float32", "bucket_dtype": "float32", "rank": 0, "world_size": 1,
        "controller": "ipc:///nobody", "runtime_dir": str(place), "adapters": str(place / "adapters"), "agents": AGENTS,
        "versions": dict.fromkeys(AGENTS, 0),
    }  # fmt: skip
    return RankConfig(**(values | changes))


def segment(agent: str, seed: int, *, turns: int = 3) -> Segment:
    """Prompt tokens and sampled tokens in turns, with noise as logprobs and advantages."""
    rng = random.Random(seed)
    ids: list[int] = []
    mask: list[int] = []
    for _ in range(turns):
        prompt, sampled = rng.randint(2, 6), rng.randint(1, 5)
        ids += [rng.randrange(256) for _ in range(prompt + sampled)]
        mask += [0] * prompt + [1] * sampled
    return Segment(
        episode_id=f"{seed}.0", agent=agent, seat=agent, ids=tuple(ids), mask=tuple(mask), versions=(0, 0),
        logprobs=tuple(-5.5 + rng.gauss(0, 0.8) if m else 0.0 for m in mask),
        advantages=tuple(rng.gauss(0, 1) if m else 0.0 for m in mask),
    )  # fmt: skip


def segments(step: int, agents: Sequence[str] = AGENTS, *, each: int = 4) -> list[Segment]:
    return [segment(agent, 1000 * step + 10 * i + AGENTS.index(agent)) for i in range(each) for agent in agents]


def train_steps(
    chosen: Sequence[Segment], *, step: int, ranks: int = 1, request: int = 0, max_tokens: int = 64
) -> list[TrainStep]:
    """The message of each rank."""
    agents = tuple(sorted({s.agent for s in chosen}))
    tokens = {a: sum(s.num_actions for s in chosen if s.agent == a) for a in agents}
    sequences = {a: sum(s.agent == a for s in chosen) for a in agents}
    plan = plan_micro_batches(chosen, ranks=ranks, max_tokens=max_tokens)
    return [
        TrainStep(
            request=request,
            step=step,
            agents=agents,
            micro_batches=batches,
            num_actions=tokens,
            num_sequences=sequences,
        )
        for batches in plan
    ]


def peft_gradients(
    model: Path, settings: Config, tensors: Mapping[str, Any], chosen: Sequence[Segment], normaliser: float
) -> dict[str, Any]:
    """Gradient by PEFT name of one agent's loss as the formulas say it, by peft, full logits and plain autograd: one
    sequence at a time, nothing of ours."""
    import torch
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    lora = settings.lora
    policy = get_peft_model(
        base,
        LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            use_rslora=lora.rslora,
            target_modules=list(lora.targets),
            layers_to_transform=list(range(base.config.num_hidden_layers))[-lora.layers :] if lora.layers else None,
            task_type="CAUSAL_LM",
        ),
    )
    set_peft_model_state_dict(policy, dict(tensors))

    def logs(ids: Any) -> Any:
        return torch.log_softmax(
            policy(input_ids=ids, use_cache=False).logits[0, :-1] / settings.rollout.temperature, -1
        )

    for s in chosen:
        ids = torch.tensor([s.ids])
        all_logs = logs(ids)
        with torch.no_grad(), policy.disable_adapter():
            base_logs = logs(ids)
        at = torch.tensor([t - 1 for t, m in enumerate(s.mask) if m])
        sampled = torch.tensor([x for x, m in zip(s.logprobs, s.mask, strict=True) if m])
        advantages = torch.tensor([x for x, m in zip(s.advantages, s.mask, strict=True) if m])
        loss = plain_loss(settings.algorithm, all_logs[at], base_logs[at], ids[0, at + 1], sampled, advantages)
        (loss / normaliser).backward()
    return {n.replace(".default.", "."): p.grad for n, p in policy.named_parameters() if p.grad is not None}


def plain_loss(
    settings: AlgorithmConfig, logs: Any, base_logs: Any, targets: Any, sampled: Any, advantages: Any
) -> Any:
    """The loss of one sequence of C actions from its log-probabilities [C, V], written out by name."""
    import torch

    logp = logs.gather(1, targets[:, None])[:, 0]
    reference = base_logs.gather(1, targets[:, None])[:, 0]
    now = logp.detach()
    r, one = (now - sampled).exp(), torch.ones_like(now)
    inside = (r >= settings.keep_ratio[0]) & (r <= settings.keep_ratio[1])
    mean_r = (now - sampled).mean().exp()
    weight = {
        "none": one, "importance": r, "token_tis": r.clamp(max=settings.tis_cap),
        "sequence_tis": one * r.prod().clamp(max=settings.tis_cap), "icepop": r * inside,
        "geometric": one * bool(settings.keep_mean_ratio[0] <= mean_r <= settings.keep_mean_ratio[1]),
    }[settings.correction]  # fmt: skip
    anchor = now if settings.anchor == "trainer" else sampled
    ratio = (logp - anchor).exp()
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    sequence_ratio = (now - anchor).mean().exp() * (logp - now).exp()
    moved = now.exp() - anchor.exp()
    far = ((advantages > 0) & (moved > settings.tv_bound)) | ((advantages < 0) & (moved < -settings.tv_bound))
    gain = {
        "reinforce": ratio.detach() * advantages * logp,
        "ppo": torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages),
        "gspo": torch.minimum(sequence_ratio * advantages, sequence_ratio.clamp(low, high) * advantages),
        "cispo": ratio.detach().clamp(low, high) * advantages * logp,
        "dppo_tv": ratio * advantages * ~far,
    }[settings.loss]
    log_q_over_p = reference - logp
    kl = {
        "full": (logs.exp() * (logs - base_logs)).sum(-1), "k1": -log_q_over_p, "k2": log_q_over_p**2 / 2,
        "k3": log_q_over_p.exp() - 1 - log_q_over_p,
    }[settings.kl_estimator]  # fmt: skip
    if settings.kl_in == "reward":  # through the advantage only; written for the plain policy gradient
        gain, kl = gain - settings.kl * kl.detach() * logp, torch.zeros_like(kl)
    entropy = -(logs.exp() * logs).sum(-1)
    per_token = -weight * gain + settings.kl * kl - settings.entropy * entropy
    length = {"token": 1.0, "sequence": float(len(targets)), "constant": settings.length_constant}[settings.length]
    return per_token.sum() / length


def worst_relative(found: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """Largest ‖found − expected‖ / ‖expected‖ over tensors, which must be the same ones and not all zero."""
    assert found.keys() == expected.keys()
    assert all(float(e.norm()) > 0 for e in expected.values())
    return max(float((found[n] - e).norm() / e.norm()) for n, e in expected.items())


class Ranks:
    """Real rank processes behind a plain ROUTER socket; a test speaks to each by number.

    >>> with Ranks(model, folder, settings, world_size=2) as ranks:
    ...     ranks.ask_all([message_for_0, message_for_1])
    """

    def __init__(self, model: Path, place: Path, settings: Config, *, world_size: int, **changes: Any) -> None:
        self.runtime = RuntimeDir.create()
        self._place = place
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        address = self.runtime.endpoint("trainer")
        self._socket.bind(address)
        self._out: Codec[Any] = Codec(ToTrainer)
        self._in: Codec[Any] = Codec(FromTrainer)
        self._identities: dict[int, bytes] = {}
        self.hellos: dict[int, TrainerHello] = {}
        changes = {"controller": address, "runtime_dir": str(self.runtime.path), "world_size": world_size} | changes
        changes.setdefault("adapters", str(place / "adapters"))
        configs = [rank_config(model, place, settings, rank=r, **changes) for r in range(world_size)]
        self.children = [
            spawn(f"trainer-{c.rank}", "selfplay.training.rank", msgspec.json.encode(c).decode(), log=self.log(c.rank))
            for c in configs
        ]

    def __enter__(self) -> Ranks:
        try:
            while len(self.hellos) < len(self.children):
                self._greet(*self.receive())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for child in self.children:
            child.stop(0.5)
        self._socket.close()
        self._context.term()
        self.runtime.remove()

    def log(self, rank: int) -> Path:
        return self._place / f"trainer-{rank}.log"

    def send(self, rank: int, message: Any) -> None:
        self._socket.send_multipart([self._identities[rank], self._out.encode(message)])

    def receive(self, timeout_s: float = PATIENCE_S) -> tuple[bytes, Any]:
        """(identity, message) of the next one; fails the test when a rank died or nothing comes."""
        deadline = time.monotonic() + timeout_s
        while not self._socket.poll(200):
            dead = [c for c in self.children if c.exit_code() is not None]
            if time.monotonic() > deadline or (dead and not self._socket.poll(500)):
                raise AssertionError("no message; " + "; ".join(c.describe_exit() for c in dead))
        identity, data = self._socket.recv_multipart()
        return identity, self._in.decode(data)

    def receive_from_survivor(self) -> Any:
        """The next message, although a rank is known to be dead or dying."""
        assert self._socket.poll(int(PATIENCE_S * 1000)), "nothing came"
        return self._in.decode(self._socket.recv_multipart()[1])

    def ask_all(self, messages: Sequence[Any]) -> list[Any]:
        """Send ``messages[rank]`` to each rank; their answers by rank."""
        for rank, message in enumerate(messages):
            self.send(rank, message)
        answers: dict[int, Any] = {}
        while len(answers) < len(messages):
            identity, answer = self.receive()
            if isinstance(answer, TrainerFailed):
                raise AssertionError(
                    f"rank {answer.rank} failed: {answer.message}\n{self.log(answer.rank).read_text()}"
                )
            answers[self._rank_of(identity)] = answer
        return [answers[r] for r in range(len(messages))]

    def ask(self, message: Any, rank: int = 0) -> Any:
        self.send(rank, message)
        return self.receive()[1]

    def everyone(self, message: Any) -> list[Any]:
        return self.ask_all([message] * len(self.children))

    def stop(self) -> list[int | None]:
        """Ask all to leave; their exit codes."""
        self.everyone(Stop(request=99))
        return [wait_for_exit(child) for child in self.children]

    def _greet(self, identity: bytes, hello: Any) -> None:
        if not isinstance(hello, TrainerHello):
            raise AssertionError(f"expected a hello, got {hello}")
        self._identities[hello.rank], self.hellos[hello.rank] = identity, hello

    def _rank_of(self, identity: bytes) -> int:
        return next(r for r, i in self._identities.items() if i == identity)


def wait_for_exit(child: Child, timeout_s: float = PATIENCE_S) -> int | None:
    deadline = time.monotonic() + timeout_s
    while child.exit_code() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return child.exit_code()
