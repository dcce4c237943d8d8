"""Settings of the league inside a run: whom learners meet, which versions are kept as opponents, when to stop."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

RuleName = Literal["latest", "mirror", "uniform_past", "pfsp_hard", "pfsp_even", "psro_nash", "fixed", "mix"]


class LeagueConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whom learners meet."""

    opponents: Annotated[
        RuleName,
        Meta(
            description="who the learner of a match meets: latest, mirror, uniform_past, pfsp_hard, pfsp_even, psro_nash, fixed, or mix"
        ),
    ] = "latest"
    rules: Annotated[dict[str, RuleName], Meta(description="agent → its own rule")] = {}
    mix: Annotated[dict[str, float], Meta(description="rule → weight, for mix")] = {}
    fixed: Annotated[tuple[str, ...], Meta(description="opponents of fixed: bots, or base")] = ()
    anchors: Annotated[tuple[str, ...], Meta(description="bots that are always among the past opponents")] = ()
    snapshot_every: Annotated[int, Meta(ge=1, description="steps between snapshots")] = 10
    pool: Annotated[int, Meta(ge=1, le=64, description="snapshots per agent that can be met; the oldest leave")] = 4
    on_alarm: Annotated[
        Literal["off", "say", "stop"],
        Meta(description="when an agent seems to collapse: nothing, say so, or stop the run"),
    ] = "off"
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
        return bool(self.used_rules & {"uniform_past", "pfsp_hard", "pfsp_even", "psro_nash"})
