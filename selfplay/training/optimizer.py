"""One AdamW per agent, on its flat parameter: own learning rate, clip norm, warm-up and step count.

An optimizer that is not stepped changes nothing: no weight, no momentum, no learning-rate step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from selfplay.config.schema import AgentConfig, TrainConfig
from selfplay.errors import TrainerError

_EPS = 1e-6


class AgentOptimizer:
    """Clips, steps and remembers the state of one agent's adapter."""

    def __init__(self, agent: str, flat: nn.Parameter, train: TrainConfig, own: AgentConfig) -> None:
        self.agent, self.flat = agent, flat
        self.num_steps = 0
        self._lr = own.lr if own.lr is not None else train.lr
        self._clip_norm = own.clip_norm if own.clip_norm is not None else train.clip_norm
        self._warmup_steps = train.warmup_steps
        self._adam = torch.optim.AdamW([flat], lr=self._lr, betas=train.betas, weight_decay=train.weight_decay)
        self.restore(torch.zeros_like(flat), torch.zeros_like(flat), 0)

    @property
    def lr(self) -> float:
        """Learning rate of the next step: linear warm-up from lr/W, then constant."""
        return self._lr * min(1.0, (self.num_steps + 1) / self._warmup_steps) if self._warmup_steps else self._lr

    def grad_norm(self, step: int) -> float:
        """L2 norm of the gradient; raises `TrainerError` naming agent and step when it is not finite."""
        if self.flat.grad is None:
            return 0.0
        norm = float(torch.linalg.vector_norm(self.flat.grad))
        if not math.isfinite(norm):
            raise TrainerError(
                f"the gradient of agent {self.agent} at step {step} is not finite ({norm}): nothing was updated; "
                "lower train.lr or look at the step's rewards and logprobs"
            )
        return norm

    def step(self, grad_norm: float) -> float:
        """Clip to the agent's norm and update; the learning rate that was used."""
        lr = self.lr
        if self.flat.grad is None:
            raise TrainerError(f"agent {self.agent} has no gradient to step with")
        self.flat.grad.mul_(min(1.0, self._clip_norm / (grad_norm + _EPS)))
        self._adam.param_groups[0]["lr"] = lr
        self._adam.step()
        self.num_steps += 1
        return lr

    def forget_grad(self) -> None:
        self.flat.grad = None

    def state(self) -> tuple[Tensor, Tensor, int]:
        """(first moment [numel], second moment [numel], steps taken); the tensors are the live ones."""
        state = self._adam.state[self.flat]
        return state["exp_avg"], state["exp_avg_sq"], self.num_steps

    def restore(self, exp_avg: Tensor, exp_avg_sq: Tensor, num_steps: int) -> None:
        """Go on from a saved `state`."""
        self.num_steps = num_steps
        self._adam.state[self.flat] = {
            "step": torch.tensor(float(num_steps)), "exp_avg": exp_avg.clone(), "exp_avg_sq": exp_avg_sq.clone(),
        }  # fmt: skip
