"""Settings of the league inside a run: whom learners meet, which versions are kept as opponents, when to stop."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

RuleName = Literal[
    "latest", "mirror", "uniform_past", "pfsp_hard", "pfsp_even", "psro_nash", "openskill", "fixed", "mix"
]


class ExploiterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An agent of its own that learns against one target only, to find what beats it."""

    target: Annotated[
        str, Meta(description="whom it meets: a trained agent (its newest version), agent@n, base, or a bot")
    ] = ""
    seat: Annotated[str, Meta(description="where it sits; empty: the first seat that is not the target's")] = ""


class LeagueConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whom learners meet."""

    opponents: Annotated[
        RuleName,
        Meta(
            description="who the learner of a match meets: latest, mirror, uniform_past, pfsp_hard, pfsp_even, psro_nash, openskill, fixed, or mix"
        ),
    ] = "latest"
    rules: Annotated[dict[str, RuleName], Meta(description="agent → its own rule")] = {}
    mix: Annotated[dict[str, float], Meta(description="rule → weight, for mix")] = {}
    fixed: Annotated[tuple[str, ...], Meta(description="opponents of fixed: bots, or base")] = ()
    anchors: Annotated[tuple[str, ...], Meta(description="bots that are always among the past opponents")] = ()
    snapshot_every: Annotated[int, Meta(ge=1, description="steps between snapshots")] = 10
    pool: Annotated[int, Meta(ge=1, le=64, description="snapshots per agent that can be met; the oldest leave")] = 4
    exploiters: Annotated[
        dict[str, ExploiterConfig], Meta(description="further agents that learn against one target only")
    ] = {}
    gate: Annotated[
        bool,
        Meta(description="a snapshot becomes an opponent only when a sequential test finds it better than the best"),
    ] = False
    gate_elo: Annotated[
        tuple[float, float], Meta(description="the gate's hypotheses: as good as (H0), or better by (H1) so many Elo")
    ] = (0.0, 100.0)
    gate_error: Annotated[float, Meta(gt=0, lt=0.5, description="how often the gate may be wrong, either way")] = 0.05
    gate_pairs: Annotated[
        int, Meta(ge=1, le=500_000, description="pairs of games after which an undecided snapshot is rejected")
    ] = 200
    gate_share: Annotated[
        float, Meta(gt=0, le=0.9, description="share of the games under way that may be the gate's; at least one game")
    ] = 0.25
    on_alarm: Annotated[
        Literal["off", "say", "stop", "rollback"],
        Meta(
            description="when an agent seems to collapse: nothing, say so, stop the run, or take the agent back to its last good version"
        ),
    ] = "off"
    max_rollbacks: Annotated[
        int, Meta(ge=1, description="rollbacks of an agent without a good version in between, before the run stops")
    ] = 3
    window: Annotated[int, Meta(ge=8, description="episodes that the collapse watch looks at")] = 200
    min_anchor_share: Annotated[
        float, Meta(ge=0, le=1, description="alarm below this win share against anchors; 0: off")
    ] = 0.0
    max_length_ratio: Annotated[
        float, Meta(ge=0, description="alarm when answers are so many times as long as at first; 0: off")
    ] = 0.0
    min_entropy: Annotated[float, Meta(ge=0, description="alarm below so many nats per sampled token; 0: off")] = 0.0
    max_illegal: Annotated[float, Meta(ge=0, le=1, description="alarm above this share of illegal answers; 1: off")] = (
        1.0
    )
    max_repetition: Annotated[
        float, Meta(ge=0, le=1, description="alarm above this share of one and the same answer; 1: off")
    ] = 1.0

    def rule_of(self, agent: str) -> RuleName:
        """The rule of an agent."""
        return self.rules.get(agent, self.opponents)

    @property
    def used_rules(self) -> set[str]:
        """Every rule that can come up."""
        rules: set[str] = {self.opponents, *self.rules.values()}
        return (rules - {"mix"}) | (set(self.mix) if "mix" in rules else set())

    @property
    def needs_past(self) -> bool:
        """Whether snapshots are met at all."""
        return bool(self.used_rules & {"uniform_past", "pfsp_hard", "pfsp_even", "psro_nash", "openskill"})

    @property
    def takes_snapshots(self) -> bool:
        """Whether versions are frozen: to be met, or to be judged by the gate."""
        return self.needs_past or self.gate
