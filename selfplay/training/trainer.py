"""One optimizer step on this rank: rows forward and backward, gradients summed over ranks, one update per agent.

    micro-batches ─► packed rows ─► log π ─► Σ loss_a / num_actions[a] ─► flat.grad of each agent
                                                                             │ all-reduce, agents in sorted order
    AgentReport ◄── update of each agent with signal ◄── all gradients finite ◄┘

Every rank runs the same collectives in the same order, whatever segments it was given: same number of rows, same agents.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from selfplay.config import Config
from selfplay.config.schema import AgentConfig
from selfplay.errors import TrainerError
from selfplay.training.group import RankGroup
from selfplay.training.loss import SUMS, report, tis_loss, token_stats
from selfplay.training.model import PackedPolicy
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
        self._cap = config.algorithm.tis_cap
        self._inv_temperature = 1.0 / config.rollout.temperature

    def step(self, message: TrainStep) -> dict[str, AgentReport]:
        """Run one step; raises `TrainerError` before anything is changed when input or gradient is not sound."""
        self._check(message)
        self.group.require_equal(f"step {message.step}", _plan_fingerprint(message, self.group.device))
        stats = self._accumulate(message)
        self._reduce(message.agents, stats)
        norms = {agent: self.optimizers[agent].grad_norm(message.step) for agent in message.agents}
        reports = {a: self._update(a, norms[a], stats[a], message.num_actions[a]) for a in message.agents}
        self.num_steps += 1
        return reports

    def accumulate(
        self, micro_batches: Sequence[Sequence[Segment]], num_actions: Mapping[str, int], filler: str
    ) -> dict[str, _Stats]:
        """Forward and backward of all rows: gradients pile up in the agents' flat parameters; not yet over ranks."""
        stats = {agent: _Stats(self.group.device) for agent in num_actions}
        for segments in micro_batches:
            row = pack_row(segments, self.group.device) if segments else filler_row(filler, self.group.device)
            self._row(row, num_actions, stats)
        return stats

    def _accumulate(self, message: TrainStep) -> dict[str, _Stats]:
        for agent in message.agents:
            self.optimizers[agent].forget_grad()
        num_actions = {agent: message.num_actions[agent] for agent in message.agents}
        return self.accumulate(message.micro_batches, num_actions, message.agents[0])

    def _row(self, row: PackedRow, num_actions: Mapping[str, int], stats: Mapping[str, _Stats]) -> None:
        logprobs, entropies = self.policy(row, self._inv_temperature)
        loss = logprobs.new_zeros(())
        for agent, start, end in row.actions:
            at = slice(start, end)
            sampled, advantages = row.rollout_logprobs[at], row.advantages[at]
            loss = loss + tis_loss(logprobs[at], sampled, advantages, cap=self._cap) / num_actions[agent]
            stats[agent].add(logprobs[at].detach(), sampled, advantages, entropies[at], self._cap)
        loss.backward()

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

    def _update(self, agent: str, grad_norm: float, stats: _Stats, num_actions: int) -> AgentReport:
        """A gradient of exactly zero carries no signal: nothing of the agent changes, not even its momentum."""
        optimizer, moved, lr = self.optimizers[agent], grad_norm > 0.0, self.optimizers[agent].lr
        if moved:
            lr = optimizer.step(grad_norm)
        optimizer.forget_grad()
        tokens = report(stats.sums, float(stats.max_abs_dlogp), num_actions)
        return AgentReport(
            moved=moved, loss=tokens.loss, grad_norm=grad_norm, lr=lr, kl=tokens.kl,
            mean_abs_dlogp=tokens.mean_abs_dlogp, max_abs_dlogp=tokens.max_abs_dlogp,
            clip_fraction=tokens.clip_fraction, ess=tokens.ess, entropy=tokens.entropy, num_actions=tokens.num,
        )  # fmt: skip

    def _check(self, message: TrainStep) -> None:
        where, agents = f"step {message.step}", message.agents
        if not agents or list(agents) != sorted(set(agents)):
            raise TrainerError(f"{where}: agents {list(agents)} are not a sorted list of at least one name")
        unknown = sorted(set(agents) - self.optimizers.keys())
        if unknown:
            raise TrainerError(f"{where}: agents {unknown} are not trained here; trained: {sorted(self.optimizers)}")
        if any(message.num_actions.get(a, 0) < 1 for a in agents):
            raise TrainerError(f"{where}: num_actions {message.num_actions} must count at least one action per agent")
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
    plan = (message.step, message.agents, len(message.micro_batches), sorted(message.num_actions.items()))
    return torch.tensor([zlib.crc32(repr(plan).encode())], device=device)


class _Stats:
    """Running sums of one agent's action tokens."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self.max_abs_dlogp = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, logprobs: Tensor, sampled: Tensor, advantages: Tensor, entropies: Tensor, cap: float) -> None:
        new = token_stats(logprobs, sampled, advantages, entropies, cap=cap)
        self.sums = self.sums + new.sums
        self.max_abs_dlogp = torch.maximum(self.max_abs_dlogp, new.max_abs_dlogp)
