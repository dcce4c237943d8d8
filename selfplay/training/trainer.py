"""One step on this rank: rows forward and backward, gradients summed over ranks, one update per agent and epoch.

    micro-batches ─► packed rows ─► log π ─► Σ loss_a / normaliser[a] ─► flat.grad of each agent  ◄── next epoch ─┐
                                                                            │ all-reduce, agents in sorted order │
    AgentReport ◄── update of each agent with signal ◄── all gradients finite ◄┘ ─────────────────────────────────┘

Every rank runs the same collectives in the same order, whatever segments it was given: same number of rows, same agents.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from selfplay.config import Config
from selfplay.config.schema import AgentConfig
from selfplay.errors import TrainerError
from selfplay.training.group import RankGroup
from selfplay.training.loss import OF_LAST_EPOCH, SUMS, Computed, Kept, Samples, TokenStats, agent_loss, keep, report
from selfplay.training.model import PackedPolicy, Reference, RowOutput
from selfplay.training.optimizer import AgentOptimizer
from selfplay.training.rows import PackedRow, filler_row, pack_row
from selfplay.types import Segment
from selfplay.wire.messages import AgentReport, TrainStep


class Trainer:
    """The adapters and optimizers of all agents, and the step that changes them."""

    def __init__(self, policy: PackedPolicy, config: Config, group: RankGroup) -> None:
        self.policy, self.group = policy, group
        self.num_steps = 0
        """Steps done, over all starts of the run."""
        self.optimizers = {
            agent: AgentOptimizer(agent, adapter.flat, config.train, config.agents.get(agent, AgentConfig()))
            for agent, adapter in policy.adapters.items()
        }
        self.references: dict[str, Tensor] = {}
        """Agent → flat adapter that a moving reference is at."""
        self._algorithm = config.algorithm
        self._inv_temperature = 1.0 / config.rollout.temperature

    def step(self, message: TrainStep) -> dict[str, AgentReport]:
        """Run one step; raises `TrainerError` before anything is changed when input or first gradient is not sound."""
        self._check(message)
        self.group.require_equal(f"step {message.step}", _plan_fingerprint(message, self.group.device))
        self._renew_references(message.agents)
        rows = [self._pack(segments, message.agents[0]) for segments in message.micro_batches]
        normalisers = self._normalisers(message)
        updates = {agent: _Update() for agent in message.agents}
        for _ in range(self._algorithm.epochs):
            self._epoch(message, rows, normalisers, updates)
        for agent in message.agents:
            self.optimizers[agent].end_step(moved=updates[agent].moved)
        self.num_steps += 1
        return {a: u.report(normalisers[a]) for a, u in updates.items()}

    def accumulate(self, message: TrainStep, *, share: bool = True) -> dict[str, _Stats]:
        """Forward and backward of all rows: gradients pile up in the agents' flat parameters; not yet over ranks.

        Without ``share``, tokens that segments have in common are computed for each of them.
        """
        rows = [self._pack(segments, message.agents[0], share=share) for segments in message.micro_batches]
        return self._pass(rows, message.agents, self._normalisers(message))

    # ── one epoch ────────────────────────────────────────────────────────────────────────────────

    def _epoch(
        self, message: TrainStep, rows: Sequence[_Row], normalisers: Mapping[str, float], updates: Mapping[str, _Update]
    ) -> None:
        for agent in message.agents:
            self.optimizers[agent].forget_grad()
        stats = self._pass(rows, message.agents, normalisers)
        self._reduce(message.agents, stats)
        norms = {agent: self.optimizers[agent].grad_norm(message.step) for agent in message.agents}
        for agent in message.agents:
            updates[agent].add(self.optimizers[agent], norms[agent], stats[agent])

    def _pass(self, rows: Sequence[_Row], agents: Sequence[str], normalisers: Mapping[str, float]) -> dict[str, _Stats]:
        stats = {agent: _Stats(self.group.device) for agent in agents}
        for row in rows:
            self._row(row, normalisers, stats)
        return stats

    def _row(self, row: _Row, normalisers: Mapping[str, float], stats: Mapping[str, _Stats]) -> None:
        config, packed = self._algorithm, row.packed
        out: RowOutput = self.policy(
            packed, self._inv_temperature, reference=self._reference(), reference_hidden=row.reference_hidden,
            trunk=row.trunk, entropy_gradient=config.entropy > 0,
        )  # fmt: skip
        row.reference_hidden, row.trunk = out.reference_hidden, out.trunk
        loss = out.head.logprobs.new_zeros(())
        for agent, start, end in packed.samples:
            at, picks = slice(start, end), packed.picks[start:end]
            samples = Samples(
                rollout_logprobs=packed.rollout_logprobs[at], advantages=packed.advantages[at],
                sequences=packed.sequences[at], weights=packed.weights[at],
            )  # fmt: skip
            computed = Computed(
                logprobs=out.head.logprobs[picks], entropies=out.head.entropies[picks],
                divergences=out.head.divergences[picks],
                reference_logprobs=None if out.reference_logprobs is None else out.reference_logprobs[picks],
            )  # fmt: skip
            kept = row.kept.setdefault(agent, keep(config, samples, computed))
            term, found = agent_loss(config, samples, computed, kept)
            loss = loss + term / normalisers[agent]
            stats[agent].add(found)
        loss.backward()

    def _pack(self, segments: Sequence[Segment], filler: str, *, share: bool = True) -> _Row:
        if not segments:
            return _Row(filler_row(filler, self.group.device))
        config = self._algorithm
        return _Row(
            pack_row(segments, self.group.device, length=config.length, constant=config.length_constant, share=share)
        )

    def _normalisers(self, message: TrainStep) -> dict[str, float]:
        """What each agent's summed loss is divided by: its action tokens or its sequences, over all ranks."""
        counts = message.num_actions if self._algorithm.length == "token" else message.num_sequences
        return {agent: float(counts[agent]) for agent in message.agents}

    # ── references ───────────────────────────────────────────────────────────────────────────────

    def _reference(self) -> Reference | None:
        """What the agents are compared with; None when nothing asks for it. Empty: with the bare base."""
        if not self._algorithm.kl:
            return None
        return self.references if self._algorithm.reference == "moving" else {}

    def _renew_references(self, agents: Sequence[str]) -> None:
        """A moving reference is the agent itself as it was at its last multiple of ``reference_every`` steps."""
        if not self._algorithm.kl or self._algorithm.reference != "moving":
            return
        for agent in agents:
            optimizer = self.optimizers[agent]
            if agent not in self.references or optimizer.num_steps % self._algorithm.reference_every == 0:
                self.references[agent] = optimizer.flat.detach().clone()

    # ── over all ranks ───────────────────────────────────────────────────────────────────────────

    def _reduce(self, agents: Sequence[str], stats: Mapping[str, _Stats]) -> None:
        """One flat all-reduce per agent, also for agents that have no token here; then one for all figures."""
        for agent in agents:
            flat = self.optimizers[agent].flat
            if flat.grad is None:
                flat.grad = torch.zeros_like(flat)
            self.group.sum(flat.grad)
        sums = torch.stack([stats[a].sums for a in agents])
        worst = torch.stack([stats[a].max_abs_dlogp for a in agents])
        self.group.sum(sums)
        self.group.max(worst)
        for i, agent in enumerate(agents):
            stats[agent].sums, stats[agent].max_abs_dlogp = sums[i], worst[i]

    def _check(self, message: TrainStep) -> None:
        where, agents = f"step {message.step}", message.agents
        if not agents or list(agents) != sorted(set(agents)):
            raise TrainerError(f"{where}: agents {list(agents)} are not a sorted list of at least one name")
        unknown = sorted(set(agents) - self.optimizers.keys())
        if unknown:
            raise TrainerError(f"{where}: agents {unknown} are not trained here; trained: {sorted(self.optimizers)}")
        for name, counts in (("num_actions", message.num_actions), ("num_sequences", message.num_sequences)):
            if any(counts.get(a, 0) < 1 for a in agents):
                raise TrainerError(f"{where}: {name} {counts} must count at least one per agent")
        strangers = sorted({s.agent for m in message.micro_batches for s in m} - set(agents))
        if strangers:
            raise TrainerError(
                f"{where}: segments of {strangers}, which are not among the step's agents {list(agents)}"
            )
        largest = max((max(s.ids) for m in message.micro_batches for s in m), default=0)
        if largest >= self.policy.vocab_size:
            raise TrainerError(
                f"{where}: token {largest} is outside the model's vocabulary of {self.policy.vocab_size}"
            )


def _plan_fingerprint(message: TrainStep, device: torch.device) -> Tensor:
    """What all ranks must agree on before their collectives are allowed to pair up: else agent A could get B's gradient."""
    counts = (sorted(message.num_actions.items()), sorted(message.num_sequences.items()))
    plan = (message.step, message.agents, len(message.micro_batches), counts)
    return torch.tensor([zlib.crc32(repr(plan).encode())], device=device)


class _Stats:
    """Running sums of one agent's action tokens."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self.max_abs_dlogp = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, new: TokenStats) -> None:
        self.sums = self.sums + new.sums
        self.max_abs_dlogp = torch.maximum(self.max_abs_dlogp, new.max_abs_dlogp)


@dataclass
class _Row:
    """A packed row and what its first epoch fixed, by agent."""

    packed: PackedRow
    kept: dict[str, Kept] = field(default_factory=dict)
    reference_hidden: Tensor | None = None
    """[M, D]: the reference stays where it is for a step."""
    trunk: Tensor | None = None
    """[1, T, D]: what the layers below all adapters made of it."""


@dataclass
class _Update:
    """What the epochs of a step did to one agent. A gradient of exactly zero carries no signal and changes nothing of
    the agent, not even its momentum."""

    moved: bool = False
    grad_norm: float = 0.0
    lr: float = 0.0
    stats: _Stats | None = None

    def add(self, optimizer: AgentOptimizer, grad_norm: float, stats: _Stats) -> None:
        """Update the agent once; the report is of the first epoch, but for what only the last one can say."""
        lr = optimizer.step(grad_norm) if grad_norm > 0.0 else optimizer.lr
        optimizer.forget_grad()
        self.moved = self.moved or grad_norm > 0.0
        if self.stats is None:
            self.grad_norm, self.lr, self.stats = grad_norm, lr, stats
        for name in OF_LAST_EPOCH:
            self.stats.sums[SUMS.index(name)] = stats.sums[SUMS.index(name)]

    def report(self, normaliser: float) -> AgentReport:
        if self.stats is None:
            raise TrainerError("a step of no epochs has nothing to report")
        t = report(self.stats.sums, float(self.stats.max_abs_dlogp), normaliser)
        return AgentReport(
            moved=self.moved, loss=t.loss, grad_norm=self.grad_norm, lr=self.lr, kl=t.kl,
            mean_abs_dlogp=t.mean_abs_dlogp, max_abs_dlogp=t.max_abs_dlogp, clip_fraction=t.clip_fraction,
            mask_fraction=t.mask_fraction, ess=t.ess, entropy=t.entropy, reference_kl=t.reference_kl, num_actions=t.num,
        )  # fmt: skip
