"""One agent's optimizer: AdamW on the flat adapter with the agent's own learning rate, clip norm and warm-up.

An agent without signal in a step is never asked, so nothing of it moves: weights, momentum, and the count that its
warm-up goes by.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selfplay.config import Config
from selfplay.config.schema import AgentConfig
from selfplay.errors import TrainerError

STATE = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """What an agent's optimizer goes by."""

    lr: float
    clip_norm: float
    betas: tuple[float, float]
    weight_decay: float
    warmup_steps: int


def settings_of(agent: str, config: Config) -> OptimizerSettings:
    """``train.*``, unless ``agents.NAME`` says otherwise."""
    own, train = config.agents.get(agent, AgentConfig()), config.train
    return OptimizerSettings(
        lr=train.lr if own.lr is None else own.lr,
        clip_norm=train.clip_norm if own.clip_norm is None else own.clip_norm,
        betas=train.betas, weight_decay=train.weight_decay, warmup_steps=train.warmup_steps,
    )  # fmt: skip


class AgentOptimizer:
    """>>> norm = optimizer.clip(step=7)      # refuses a gradient that is not finite
    >>> lr = optimizer.step()                # moves the weights and clears the gradient
    """

    def __init__(self, agent: str, flat: nn.Parameter, settings: OptimizerSettings) -> None:
        self.agent, self.settings = agent, settings
        self.num_steps = 0
        self._flat = flat
        self._adam = torch.optim.AdamW(
            [flat], lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay, foreach=False
        )

    def clip(self, *, step: int) -> float:
        """Scale the gradient down to the clip norm; its norm before. Raises `TrainerError` unless that is finite."""
        grad = self._gradient()
        norm = float(torch.linalg.vector_norm(grad))
        if not math.isfinite(norm):
            raise TrainerError(
                f"gradient of agent {self.agent} is not finite at step {step} (norm {norm}): nothing was updated; "
                f"lower agents.{self.agent}.lr (now {self.settings.lr:g})"
            )
        if norm > self.settings.clip_norm:
            grad.mul_(self.settings.clip_norm / norm)
        return norm

    def step(self) -> float:
        """Update the weights from the gradient; the learning rate that was used."""
        self._gradient()
        lr = self._lr()
        self._adam.param_groups[0]["lr"] = lr
        self._adam.step()
        self.num_steps += 1
        self.clear()
        return lr

    def clear(self) -> None:
        self._flat.grad = None

    def state(self) -> dict[str, Tensor]:
        """exp_avg [P], exp_avg_sq [P]: the live tensors, or zeros before the first step."""
        found = self._adam.state.get(self._flat, {})
        return {name: found.get(name, torch.zeros_like(self._flat)).detach() for name in STATE}

    def load_state(self, state: dict[str, Tensor], num_steps: int) -> None:
        """Go on from `state` after ``num_steps`` steps."""
        self.num_steps = num_steps
        if num_steps:
            count = torch.tensor(float(num_steps), dtype=torch.float32)
            self._adam.state[self._flat] = {"step": count, **{name: state[name].clone() for name in STATE}}

    def _lr(self) -> float:
        """Linear warm-up over the agent's own steps."""
        warmup = self.settings.warmup_steps
        return self.settings.lr * min(1.0, (self.num_steps + 1) / warmup) if warmup else self.settings.lr

    def _gradient(self) -> Tensor:
        if self._flat.grad is None:
            raise TrainerError(f"agent {self.agent} has no gradient")
        return self._flat.grad
