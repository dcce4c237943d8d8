"""The matchmaker: from a run seed and the config to match number ``index``, the same in every process and at any time.

In: an environment's description, the config, the names of the agent kinds. Out: `Match`es, a pure function of
(seed, index, attempt); the attempt changes the id only, so a match that infrastructure spoilt is played again as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from selfplay.config.league import ExploiterConfig
from selfplay.config.schema import Config, SeatConfig
from selfplay.errors import ConfigError, UnknownNameError, suggestion
from selfplay.registry import EnvironmentSpec
from selfplay.types import BASE, Limits, Match, PolicyVersion, SeatAssignment, check_name, derive_seed

LLM = "llm"


class Matchmaker:
    """Seats the agents of a config. Raises `ConfigError` at once for seats and agents that cannot be.

    >>> maker = Matchmaker(spec, config, known_players=("llm", "random"))
    >>> match = maker.match(17)
    """

    def __init__(self, spec: EnvironmentSpec, config: Config, *, known_players: Collection[str]) -> None:
        self._config, self._spec, self._known = config, spec, known_players
        for seat in config.seats:
            if seat not in spec.seats:
                raise ConfigError(f"seats.{seat}: {spec.id} has no such seat{suggestion(seat, spec.seats)}")
        self._seats = tuple(self._assign(seat, config.seats.get(seat)) for seat in spec.seats)
        self._limits = Limits(
            max_turns=config.rollout.max_turns or spec.max_turns,
            max_tokens=config.rollout.max_episode_tokens,
            time_s=config.rollout.episode_timeout_s,
        )
        self._check_agents()

    def match(self, index: int, attempt: int = 0) -> Match:
        """Match number ``index`` of the run."""
        return Match(
            index=index, env=self._spec.id, env_params=dict(self._config.env_params),
            seed=derive_seed(self._config.seed, "match", index // self._config.algorithm.group), seats=self._seats, limits=self._limits, attempt=attempt,
        )  # fmt: skip

    @property
    def trained_agents(self) -> tuple[str, ...]:
        """Adapter lineages that learn, exploiters included, sorted."""
        return tuple(sorted({*self._seated_agents, *self._config.league.exploiters}))

    @property
    def _seated_agents(self) -> set[str]:
        return {s.agent for s in self._seats if s.trained}

    @property
    def frozen_versions(self) -> tuple[PolicyVersion, ...]:
        """Past versions that play or judge without learning, sorted."""
        tables = [self._seats, *map(self.table_of, self._config.league.exploiters)]
        frozen = {PolicyVersion(s.agent, s.pin) for seats in tables for s in seats if isinstance(s.pin, int)}
        if self._spec.needs_jury and "@" in self._config.jury.agent:
            frozen.add(PolicyVersion.parse(self._config.jury.agent))
        return tuple(sorted(frozen))

    @property
    def needs_model(self) -> bool:
        """Whether any seat or the jury asks a model that the run serves."""
        local_jury = self._spec.needs_jury and self._config.jury.agent != "api"
        return local_jury or any(s.player == LLM for s in self._seats)

    def seats_of(self, agent: str) -> tuple[str, ...]:
        """The seats of a trained agent, in the environment's order."""
        return tuple(s.seat for s in self.table_of(agent) if s.agent == agent and s.trained)

    def table_of(self, agent: str) -> tuple[SeatAssignment, ...]:
        """Who sits where in a match of a trained agent. An exploiter has one seat; everybody else there learns nothing."""
        own = self._config.league.exploiters.get(agent)
        return self._seats if own is None else exploiter_table(self._seats, agent, own)

    # ── seats ────────────────────────────────────────────────────────────────────────────────────

    def _assign(self, seat: str, given: SeatConfig | None) -> SeatAssignment:
        given = given or SeatConfig()
        if given.player not in self._known:
            raise UnknownNameError("agent kind", given.player, self._known)
        if given.player == LLM:
            return self._assign_llm(seat, given)
        if given.agent:
            raise ConfigError(
                f"seats.{seat}.agent={given.agent!r} has no meaning for player {given.player!r}: only llm has adapters"
            )
        return SeatAssignment(seat=seat, player=given.player, agent=given.player, options=dict(given.options))

    def _assign_llm(self, seat: str, given: SeatConfig) -> SeatAssignment:
        options = dict(given.options)
        if given.agent == BASE:
            return SeatAssignment(seat=seat, player=LLM, agent=BASE, options=options)
        if "@" in given.agent:
            frozen = PolicyVersion.parse(given.agent)
            return SeatAssignment(seat=seat, player=LLM, agent=frozen.agent, pin=frozen.version, options=options)
        agent = _lineage(seat, given.agent)
        return SeatAssignment(
            seat=seat,
            player=LLM,
            agent=agent,
            trained=True,
            options=options,
            pin="episode" if self._config.sync.interrupt == "episode" else "turn",
        )

    def _check_agents(self) -> None:
        trained = self.trained_agents
        if not trained:
            raise ConfigError(
                f"no seat of {self._spec.id} has a trained agent ({self._seating()}): leave a seat to its default, or set seats.NAME.agent"
            )
        bots = {s.player for s in self._seats if s.player != LLM}
        for agent in trained:
            if agent in bots:
                raise ConfigError(f"agent name {agent!r} is the name of a player at another seat: choose another")
        self._check_exploiters(bots)
        for agent in self._config.agents:
            if agent not in trained:
                raise ConfigError(f"agents.{agent}: no trained agent has that name{suggestion(agent, trained)}")

    def _check_exploiters(self, bots: set[str]) -> None:
        seated = self._seated_agents
        known = sorted({*seated, BASE, *(b for b in self._known if b not in (LLM, "human", "api"))})
        for name, own in self._config.league.exploiters.items():
            where = f"league.exploiters.{name}"
            check_name(name, "agent")
            if name in seated or name in bots:
                raise ConfigError(f"{where}: {name} sits at the table already: an exploiter needs a name of its own")
            if own.seat and own.seat not in self._spec.seats:
                raise ConfigError(
                    f"{where}.seat: {self._spec.id} has no seat {own.seat!r}{suggestion(own.seat, self._spec.seats)}"
                )
            if "@" in own.target:
                PolicyVersion.parse(own.target)
            elif own.target not in known:
                raise ConfigError(
                    f"{where}.target={own.target!r} is nobody it could learn against{suggestion(own.target, known)}"
                )
            if not any(s.seat != seat for s in self._seats for seat in self.seats_of(name)):
                raise ConfigError(f"{where}: {self._spec.id} has one seat, so there is nobody to exploit")
            if {s.seat for s in self._seats if s.agent == own.target} == set(self.seats_of(name)):
                raise ConfigError(f"{where}.seat={own.seat}: that is the target's only seat; leave seat out")

    def _seating(self) -> str:
        return ", ".join(f"{s.seat}: {s.agent}{f'@{s.pin}' if isinstance(s.pin, int) else ''}" for s in self._seats)


def _lineage(seat: str, agent: str) -> str:
    try:
        return check_name(agent or seat, "agent")
    except ConfigError as e:
        key = f"seats.{seat}.agent"
        raise ConfigError(str(e) if agent else f"{e}; the seat's own name is the default: set {key}") from None


def exploiter_table(seats: Sequence[SeatAssignment], name: str, own: ExploiterConfig) -> tuple[SeatAssignment, ...]:
    """``seats`` with the exploiter at its own, its target at the target's (at all others, where it has none), and nobody else learning."""
    lineage, _, number = own.target.rpartition("@") if "@" in own.target else (own.target, "", "")
    held = [s.seat for s in seats if s.trained and s.agent == lineage]
    free = [s.seat for s in seats if s.seat not in held]
    mine = own.seat or (free or held)[0]
    pin = next(s.pin for s in seats if s.trained)

    def sit(seat: SeatAssignment) -> SeatAssignment:
        if seat.seat == mine:
            return SeatAssignment(seat=mine, player=LLM, agent=name, trained=True, options=seat.options, pin=pin)
        if not seat.trained:
            return seat
        if (held and seat.seat not in held) or (held and not number):
            return replace(seat, trained=False)
        if lineage == BASE or number:
            seat = replace(seat, player=LLM, agent=lineage, trained=False)
            return replace(seat, pin=int(number)) if number else seat
        return SeatAssignment(seat=seat.seat, player=lineage, agent=lineage)

    return tuple(map(sit, seats))
