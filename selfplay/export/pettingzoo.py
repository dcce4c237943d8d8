"""Any selfplay environment as a PettingZoo ``AECEnv`` or ``ParallelEnv``.

    env = aec_env("leduc-poker-v0")
    env = parallel_env("prisoners-dilemma-v0", rounds=10)

What a seat is told (rules and view) is its observation: UTF-8 bytes in a fixed number of places, padded with zeros; the
text itself is in ``infos[agent]["text"]``. Actions are numbers of move names: the names in ``env.moves``, found by playing
random games unless they are given. ``infos[agent]["action_mask"]`` (AEC) or the observation's ``action_mask`` (Parallel)
says which are legal. An illegal action ends the game as the environment's forfeit declares, without a further try.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete
from pettingzoo import AECEnv, ParallelEnv

from selfplay.agent import Decision
from selfplay.errors import IllegalMove, UserError
from selfplay.play.table import Table
from selfplay.registry import make_environment, resolve_environment_id
from selfplay.types import Scalar, derive_seed

MAX_TEXT_BYTES = 4096
NUM_GAMES = 50
"""Random games played to find the names of moves."""


def aec_env(
    env_id: str, *, moves: Sequence[str] | None = None, max_text_bytes: int = MAX_TEXT_BYTES, **params: Scalar
) -> SelfplayAEC:
    """``env_id`` for libraries that ask one agent at a time. Raises `UserError` for a game whose moves have no names."""
    return SelfplayAEC(_Game(env_id, params, moves, max_text_bytes))


def parallel_env(
    env_id: str, *, moves: Sequence[str] | None = None, max_text_bytes: int = MAX_TEXT_BYTES, **params: Scalar
) -> SelfplayParallel:
    """``env_id`` for libraries that ask all agents at once; actions of agents that are not to move are ignored."""
    return SelfplayParallel(_Game(env_id, params, moves, max_text_bytes))


class _Game:
    """One environment at a time, with numbers for its moves; shared by both classes."""

    def __init__(
        self, env_id: str, params: Mapping[str, Scalar], moves: Sequence[str] | None, max_text_bytes: int
    ) -> None:
        self.env_id, self.params = resolve_environment_id(env_id), dict(params)
        self.seats = tuple(make_environment(self.env_id, self.params, 0).seats)
        self.moves = tuple(moves) if moves is not None else _found_moves(self.env_id, self.params)
        self._numbers = {move: i for i, move in enumerate(self.moves)}
        self._max_text_bytes = max_text_bytes
        self._rng = random.Random(0)
        self.text = Box(0, 255, (max_text_bytes,), np.uint8)
        self.mask = Box(0, 1, (len(self.moves),), np.int8)
        self.table: Table | None = None
        self.decisions: tuple[Decision, ...] = ()
        self.texts, self.rewards = dict.fromkeys(self.seats, ""), dict.fromkeys(self.seats, 0.0)
        self.over = self.cut = False
        self.num_turns = self.max_turns = 0

    def start(self, seed: int | None) -> None:
        """A new game; without a seed, the next of this object's own."""
        if self.table is not None:
            self.table.close()
        seed = derive_seed(seed) if seed is not None else self._rng.randrange(2**62)
        environment = make_environment(self.env_id, self.params, seed)
        self.table, self.max_turns, self.num_turns = Table(self.env_id, environment, seed), environment.max_turns, 0
        self.texts = dict.fromkeys(self.seats, "")
        self.rewards = dict.fromkeys(self.seats, 0.0)
        self.over = self.cut = False
        self._open(None)

    def play(self, numbers: Mapping[str, int]) -> None:
        """One number for every seat that is to move."""
        table, illegal = self._open_table(), []
        moves: dict[str, str] = {}
        for decision in self.decisions:
            try:
                moves[decision.seat] = table.parse(decision.seat, self._named(decision.seat, numbers))
            except IllegalMove:
                illegal.append(decision.seat)
        self.num_turns += len(self.decisions)
        if illegal:
            self.over, self.rewards, self.decisions = True, table.forfeit_rewards(illegal), ()
        else:
            self._open(moves)

    def _named(self, seat: str, numbers: Mapping[str, int]) -> str:
        """The move that ``seat`` chose by its number."""
        if seat not in numbers:
            raise UserError(
                f"{self.env_id}: {seat} is to move, but the actions are of {', '.join(numbers) or 'nobody'}"
            )
        number = int(numbers[seat])
        if not 0 <= number < len(self.moves):
            raise UserError(f"{self.env_id}: action {number} of {seat} is no move; they are 0 to {len(self.moves) - 1}")
        return self.moves[number]

    def legal(self, seat: str) -> np.ndarray[Any, np.dtype[np.int8]]:
        """Mask [number of moves] of what ``seat`` may do now; all zero for a seat that is not to move."""
        mask = np.zeros(len(self.moves), np.int8)
        for decision in self.decisions:
            if decision.seat == seat:
                known = [self._numbers[m] for m in decision.legal_moves or () if m in self._numbers]
                if not known:
                    raise UserError(
                        f"{self.env_id}: none of the legal moves {decision.legal_moves!r} is among the {len(self.moves)} "
                        f"known names: give them all with moves=[...]"
                    )
                mask[known] = 1
        return mask

    def bytes_of(self, seat: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """What ``seat`` was told last, as bytes; raises `UserError` when it does not fit."""
        data = self.texts[seat].encode()
        if len(data) > self._max_text_bytes:
            raise UserError(
                f"{self.env_id} tells {seat} {len(data)} bytes, but observations have {self._max_text_bytes}: "
                f"give max_text_bytes={2 * len(data)}"
            )
        return np.frombuffer(data.ljust(self._max_text_bytes, b"\0"), np.uint8).copy()

    def facts(self, seat: str) -> dict[str, Any]:
        """The text and the names of the legal moves."""
        legal = next((d.legal_moves for d in self.decisions if d.seat == seat), ())
        return {"text": self.texts[seat], "legal_moves": list(legal or ())}

    def close(self) -> None:
        if self.table is not None:
            self.table.close()
            self.table = None

    def _open(self, moves: Mapping[str, str] | None) -> None:
        table = self._open_table()
        self.decisions = table.open_round(moves)
        for d in self.decisions:
            self.texts[d.seat] = f"{d.rules}\n{d.view}"
        if not self.decisions:
            self.over, self.rewards = True, table.outcome().rewards
        elif self.num_turns >= self.max_turns:
            self.cut, self.decisions = True, ()

    def _open_table(self) -> Table:
        if self.table is None:
            raise UserError(f"{self.env_id}: call reset() before step()")
        return self.table


class SelfplayAEC(AECEnv[str, Any, Any]):  # type: ignore[misc]  # the library carries no types
    """See `aec_env`."""

    def __init__(self, game: _Game) -> None:
        super().__init__()
        self._game = game
        self.metadata = {"name": game.env_id, "render_modes": ["ansi"], "is_parallelizable": False}
        self.render_mode = "ansi"
        self.moves = game.moves
        self.possible_agents = list(game.seats)
        self.observation_spaces = {s: Box(0, 255, game.text.shape, np.uint8) for s in game.seats}
        self.action_spaces = {s: Discrete(len(game.moves)) for s in game.seats}

    def observation_space(self, agent: str) -> Any:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> Any:
        return self.action_spaces[agent]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:  # noqa: ARG002 - the API's
        self._game.start(seed)
        self.agents = list(self.possible_agents)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, dict[str, Any]] = {a: {} for a in self.agents}
        self._chosen: dict[str, int] = {}
        self._select()

    def observe(self, agent: str) -> Any:
        return self._game.bytes_of(agent)

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0.0
        self._clear_rewards()
        self._chosen[agent] = int(action)
        if len(self._chosen) == len(self._game.decisions):
            chosen, self._chosen = self._chosen, {}
            self._game.play(chosen)
        if self._game.over or self._game.cut:
            self.rewards = {a: self._game.rewards[a] for a in self.agents}
            self.terminations = dict.fromkeys(self.agents, self._game.over)
            self.truncations = dict.fromkeys(self.agents, self._game.cut)
        self._select()
        self._accumulate_rewards()
        self._deads_step_first()

    def render(self) -> str:
        """The public record of the game so far."""
        return self._game.table.transcript() if self._game.table is not None else ""

    def close(self) -> None:
        self._game.close()

    def _select(self) -> None:
        """The next seat of the round, with its mask and text in its info."""
        waiting = [d.seat for d in self._game.decisions if d.seat not in self._chosen]
        self.agent_selection = waiting[0] if waiting else self.agents[0]
        for agent in self.agents:
            self.infos[agent] = {**self._game.facts(agent), "action_mask": self._game.legal(agent)}


class SelfplayParallel(ParallelEnv[str, Any, Any]):  # type: ignore[misc]
    """See `parallel_env`."""

    def __init__(self, game: _Game) -> None:
        self._game = game
        self.metadata = {"name": game.env_id, "render_modes": ["ansi"]}
        self.render_mode = "ansi"
        self.moves = game.moves
        self.possible_agents = list(game.seats)
        self.agents: list[str] = []
        space = {"observation": game.text, "action_mask": game.mask}
        self.observation_spaces = {s: Dict(dict(space)) for s in game.seats}
        self.action_spaces = {s: Discrete(len(game.moves)) for s in game.seats}

    def observation_space(self, agent: str) -> Any:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> Any:
        return self.action_spaces[agent]

    def reset(
        self,
        seed: int | None = None,
        options: dict[str, Any] | None = None,  # noqa: ARG002 - the API's
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        self._game.start(seed)
        self.agents = list(self.possible_agents)
        return self._observations(), {a: self._game.facts(a) for a in self.agents}

    def step(self, actions: dict[str, Any]) -> tuple[Any, Any, Any, Any, Any]:
        self._game.play(actions)
        game, agents = self._game, self.agents
        ended = game.over or game.cut
        result = (
            self._observations(), {a: game.rewards[a] if ended else 0.0 for a in agents}, dict.fromkeys(agents, game.over),
            dict.fromkeys(agents, game.cut), {a: game.facts(a) for a in agents},
        )  # fmt: skip
        if ended:
            self.agents = []
        return result

    def render(self) -> str:
        """The public record of the game so far."""
        return self._game.table.transcript() if self._game.table is not None else ""

    def close(self) -> None:
        self._game.close()

    def _observations(self) -> dict[str, Any]:
        return {a: {"observation": self._game.bytes_of(a), "action_mask": self._game.legal(a)} for a in self.agents}


def _found_moves(env_id: str, params: Mapping[str, Scalar]) -> tuple[str, ...]:
    """Every move that is legal somewhere in `NUM_GAMES` random games, sorted."""
    found: set[str] = set()
    for seed in range(NUM_GAMES):
        environment = make_environment(env_id, params, seed)
        table, rng, num_turns = Table(env_id, environment, seed), random.Random(seed), 0
        decisions = table.open_round()
        while decisions and num_turns < environment.max_turns:
            moves = {}
            for d in decisions:
                if d.legal_moves is None:
                    raise UserError(f"{env_id}: any text is a move there, so moves have no numbers")
                found.update(d.legal_moves)
                moves[d.seat] = rng.choice(d.legal_moves)
            num_turns += len(moves)
            decisions = table.open_round(moves)
        table.close()
    return tuple(sorted(found))
