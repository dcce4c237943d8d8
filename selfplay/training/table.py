"""Self-play on Kuhn poker without a model: the project's losses on a policy that is a table, everything else exact.

In: the settings of ``[algorithm]`` and what a run would set beside them. Out: NashConv of the last policies and of the average
of all of them. A run takes seconds instead of minutes, so that what only many seeds can tell apart can be compared. Batches are
sampled from the finitely many ways a game can go, which is the same as playing it; they are as old as ``staleness`` says, and
one Adam per agent takes ``epochs`` steps on each.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from selfplay.config.schema import AlgorithmConfig
from selfplay.evaluation import GameTree, solve
from selfplay.evaluation.average import PolicyAverage
from selfplay.evaluation.tree import Chance, Choice, Node
from selfplay.training.loss import Computed, Samples, agent_loss, keep

START_SPREAD = 0.05
LAST = 5
EVALUATE_EVERY = 2
BETAS = (0.9, 0.95)


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """One way to train."""

    algorithm: AlgorithmConfig
    baseline: bool = True
    """Role-conditioned advantages, or the rewards themselves."""
    staleness: int = 1
    """Steps between the policies that played a batch and those that learn from it."""
    past: int = 0
    """Opponents are snapshots taken every so many steps, and agents take turns to learn; 0: both learn from every game."""
    linear: bool = False
    """The learning rate falls to 0 over the run; else it is constant."""
    lr: float = 0.03
    steps: int = 100
    batch: int = 1024


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """NashConv at the end of a run."""

    average: float
    last: float
    """Median of the last `LAST` evaluations."""


def play_and_learn(tree: GameTree, setup: Setup, seed: int) -> Result:
    """One run."""
    learner, average, found = _Learner(tree, all_games(tree), setup, seed), PolicyAverage(tree), list[float]()
    for step in range(1, setup.steps + 1):
        learner.step()
        if step % EVALUATE_EVERY == 0:
            policy = learner.policy()
            average.add(policy, float(step))
            found.append(solve(tree, policy).nash_conv)
    return Result(average=solve(tree, average.policy()).nash_conv, last=statistics.median(found[-LAST:]))


@dataclass(frozen=True)
class Games:
    """The L ways a game can go. D decisions are made in them, all ways together."""

    chance: Tensor
    """[L]: probability of what chance does in each."""
    rewards: Tensor
    """[L, seats]."""
    way: Tensor
    """[D] long: in which way the decision is made."""
    state: Tensor
    """[D] long."""
    move: Tensor
    """[D] long."""
    seat: Tensor
    """[D] long."""

    def probabilities(self, sides: Sequence[Tensor]) -> Tensor:
        """[L]: how likely each way is when every seat plays the log-probabilities [states, moves] of its side."""
        logs = torch.stack(list(sides))[self.seat, self.state, self.move].double()
        found = self.chance * torch.zeros_like(self.chance).index_add(0, self.way, logs).exp()
        return found / found.sum()


def all_games(tree: GameTree) -> Games:
    """Every way from the root to a result."""
    chance, rewards, decisions = list[float](), list[tuple[float, ...]](), list[tuple[int, int, int, int]]()
    stack: list[tuple[float, tuple[tuple[int, int], ...], Node]] = [(1.0, (), tree.root)]
    while stack:
        p, past, node = stack.pop()
        if isinstance(node, Chance):
            stack += [(p * q, past, child) for q, child in node.branches]
        elif isinstance(node, Choice):
            stack += [(p, (*past, (node.state, move)), child) for move, child in enumerate(node.children)]
        else:
            decisions += [(len(chance), state, move, tree.states[state].seat) for state, move in past]
            chance.append(p)
            rewards.append(node.rewards)
    way, state, move, seat = torch.tensor(decisions).T
    return Games(torch.tensor(chance).double(), torch.tensor(rewards), way, state, move, seat)


class _Learner:
    """One agent per seat, each with its states' rows of a table of logits."""

    def __init__(self, tree: GameTree, games: Games, setup: Setup, seed: int) -> None:
        self._games, self._setup, self._num_seats = games, setup, len(tree.seats)
        self._generator = torch.Generator().manual_seed(seed)
        width = max(len(s.moves) for s in tree.states)
        start = torch.randn(len(tree.states), width, generator=self._generator) * START_SPREAD
        self._owner = torch.tensor([s.seat for s in tree.states])
        self._logits = [torch.nn.Parameter(start.clone()) for _ in tree.seats]
        self._adams = [torch.optim.Adam([p], lr=setup.lr, betas=BETAS) for p in self._logits]
        self._baselines = torch.zeros(self._num_seats)
        self._recent: deque[Tensor] = deque(maxlen=setup.staleness + 1)
        self._snapshots: list[Tensor] = []
        self._reference = self._logprobs()
        self._num_steps = 0

    def policy(self) -> list[list[float]]:
        """The policies of all seats as one."""
        rows: list[list[float]] = self._logprobs().double().softmax(-1).tolist()
        return rows

    def step(self) -> None:
        """Play a batch with the policies of ``staleness`` steps ago, and learn from it."""
        setup, now = self._setup, self._logprobs()
        self._recent.append(now)
        if setup.past and self._num_steps % setup.past == 0:
            self._snapshots.append(now)
        if setup.algorithm.reference == "moving" and self._num_steps % setup.algorithm.reference_every == 0:
            self._reference = now
        rollout = self._recent[0]
        for seat, counts in enumerate(self._against_past(rollout) if setup.past else self._together(rollout)):
            self._learn(seat, counts, rollout)
        self._num_steps += 1

    def _together(self, rollout: Tensor) -> list[Tensor]:
        """One batch, from which all seats learn: how often each way was gone [L], per seat."""
        return [
            self._sample(self._games.probabilities([rollout] * self._num_seats), self._setup.batch)
        ] * self._num_seats

    def _against_past(self, rollout: Tensor) -> list[Tensor]:
        """A share of the batch for each learner; every game of it against one snapshot, drawn uniformly."""
        out = []
        for seat in range(self._num_seats):
            sides = [[rollout if s == seat else old for s in range(self._num_seats)] for old in self._snapshots]
            mixed = torch.stack([self._games.probabilities(side) for side in sides]).mean(0)
            out.append(self._sample(mixed, self._setup.batch // self._num_seats))
        return out

    def _sample(self, probabilities: Tensor, num: int) -> Tensor:
        drawn = torch.multinomial(probabilities, num, replacement=True, generator=self._generator)
        return torch.bincount(drawn, minlength=len(probabilities)).float()

    def _learn(self, seat: int, counts: Tensor, rollout: Tensor) -> None:
        setup, config, games = self._setup, self._setup.algorithm, self._games
        mine = (games.seat == seat) & (counts[games.way] > 0)
        way, state, move = games.way[mine], games.state[mine], games.move[mine]
        samples = Samples(
            rollout_logprobs=rollout[state, move], advantages=self._advantages(seat, counts)[way],
            sequences=torch.arange(len(way)), weights=counts[way],
        )  # fmt: skip
        kept, total = None, samples.weights.sum()
        for group in self._adams[seat].param_groups:
            group["lr"] = setup.lr * (1.0 - self._num_steps / setup.steps if setup.linear else 1.0)
        for _ in range(config.epochs):
            computed = self._computed(torch.log_softmax(self._logits[seat], -1), state, move)
            kept = kept or keep(config, samples, computed)
            loss, _ = agent_loss(config, samples, computed, kept)
            self._adams[seat].zero_grad()
            (loss / total).backward()
            self._adams[seat].step()

    def _computed(self, logprobs: Tensor, state: Tensor, move: Tensor) -> Computed:
        probabilities = logprobs.exp()
        return Computed(
            logprobs=logprobs[state, move], entropies=-(probabilities * logprobs).sum(-1)[state],
            divergences=(probabilities * (logprobs - self._reference)).sum(-1)[state],
            reference_logprobs=self._reference[state, move],
        )  # fmt: skip

    def _advantages(self, seat: int, counts: Tensor) -> Tensor:
        """[L]: rewards against the seat's running mean; it moves once a batch, as far as one game after the other would move it."""
        rewards = self._games.rewards[:, seat]
        if not self._setup.baseline:
            return rewards
        left = self._setup.algorithm.baseline_decay ** float(counts.sum())
        self._baselines[seat] = left * self._baselines[seat] + (1.0 - left) * (rewards * counts).sum() / counts.sum()
        return rewards - self._baselines[seat]

    @torch.no_grad()
    def _logprobs(self) -> Tensor:
        """[states, moves]: each state's row of the agent whose state it is."""
        stacked = torch.stack([torch.log_softmax(p, -1) for p in self._logits])
        return stacked[self._owner, torch.arange(len(self._owner))]
