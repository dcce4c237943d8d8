"""One AdamW per agent, on its flat parameter: own learning rate, clip norm, schedule and step count.

A step may be several updates (epochs over one batch) at one learning rate. An optimizer that is not stepped changes
nothing: no weight, no momentum, no learning-rate step.
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
        """Steps of the trainer in which the agent moved: what the learning rate goes by."""
        self.num_updates = 0
        """Updates by Adam: what its bias correction goes by."""
        self._lr = own.lr if own.lr is not None else train.lr
        self._clip_norm = own.clip_norm if own.clip_norm is not None else train.clip_norm
        self._train = train
        self._adam = torch.optim.AdamW([flat], lr=self._lr, betas=train.betas, weight_decay=train.weight_decay)
        self.restore(torch.zeros_like(flat), torch.zeros_like(flat), 0, 0)

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self._lr * schedule_share(self._train, self.num_steps)

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
        """Clip to the agent's norm and update once; the learning rate that was used."""
        lr = self.lr
        if self.flat.grad is None:
            raise TrainerError(f"agent {self.agent} has no gradient to step with")
        self.flat.grad.mul_(min(1.0, self._clip_norm / (grad_norm + _EPS)))
        self._adam.param_groups[0]["lr"] = lr
        self._adam.step()
        self.num_updates += 1
        return lr

    def end_step(self, *, moved: bool) -> None:
        """The updates of a trainer's step are over."""
        self.num_steps += moved

    def forget_grad(self) -> None:
        self.flat.grad = None

    def state(self) -> tuple[Tensor, Tensor, int, int]:
        """(first moment [numel], second moment [numel], steps, updates); the tensors are the live ones."""
        state = self._adam.state[self.flat]
        return state["exp_avg"], state["exp_avg_sq"], self.num_steps, self.num_updates

    def restore(self, exp_avg: Tensor, exp_avg_sq: Tensor, num_steps: int, num_updates: int) -> None:
        """Go on from a saved `state`."""
        self.num_steps, self.num_updates = num_steps, num_updates
        self._adam.state[self.flat] = {
            "step": torch.tensor(float(num_updates)), "exp_avg": exp_avg.clone(), "exp_avg_sq": exp_avg_sq.clone(),
        }  # fmt: skip


def schedule_share(train: TrainConfig, num_steps: int) -> float:
    """Share of the learning rate after ``num_steps`` steps of an agent: linear warm-up from 1/W, then ``train.schedule``
    over what is left of ``train.decay_steps`` (of ``train.steps`` when unset), down to ``train.final_lr_share``, where it stays."""
    warmup = train.warmup_steps
    if num_steps < warmup:
        return (num_steps + 1) / warmup
    if train.schedule == "constant":
        return 1.0
    last = train.steps if train.decay_steps is None else train.decay_steps
    done = min(1.0, (num_steps - warmup) / max(1, last - warmup))
    left = 1.0 - done if train.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return train.final_lr_share + (1.0 - train.final_lr_share) * left
