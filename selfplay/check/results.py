"""Rewards, forfeits and what a seat is worth: what was declared beside what was seen."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Mapping, Sequence

import msgspec

from selfplay.agent import Answer, Decision, Player
from selfplay.check.driver import Make, RandomGame
from selfplay.check.inspectors import rewards_by_seat
from selfplay.check.report import Check, Faults
from selfplay.environment import JuryQuestion
from selfplay.errors import EnvironmentFault
from selfplay.play import play
from selfplay.types import Limits, Match, SeatAssignment

RUBBISH = "zzqx"


def rewards(games: Sequence[RandomGame], faults: Faults) -> Check:
    """Declared range and sum beside observed ones; the play loop refuses what lies outside, so that shows as a fault."""
    seen = rewards_by_seat(games)
    if not seen:
        return Check(name="rewards", status="note", text="no game ended by itself: no reward was seen")
    environment = games[0].environment
    everything = [r for rs in seen.values() for r in rs]
    sums = [sum(game.outcome.rewards.values()) for game in games if game.outcome is not None]
    low, high = environment.reward_range
    text = f"seen {min(everything):g} to {max(everything):g}, declared {low:g} to {high:g}"
    always_zero = all(abs(s) < 1e-6 for s in sums)
    if environment.zero_sum:
        return faults.result("rewards", f"{text}; zero-sum as declared")
    if always_zero and len(environment.seats) > 1 and len(sums) > 20:
        return Check(name="rewards", status="note", text=f"{text}; always zero-sum although it is declared not to be")
    return faults.result("rewards", f"{text}; sums {min(sums):g} to {max(sums):g}")


def seat_bias(games: Sequence[RandomGame]) -> Check:
    """Mean reward of each seat under random play, with a 95 % interval. Unequal seats are no fault: pair them."""
    seen = rewards_by_seat(games)
    if not seen or len(next(iter(seen.values()))) < 2:
        return Check(name="seats", status="note", text="too few games that ended by themselves")
    parts, unequal = [], False
    overall = statistics.fmean(r for rs in seen.values() for r in rs)
    for seat, rs in seen.items():
        mean, half = statistics.fmean(rs), 1.96 * statistics.stdev(rs) / math.sqrt(len(rs))
        parts.append(f"{seat} {mean:+.3f} ± {half:.3f}")
        unequal |= abs(mean - overall) > half and len(rs) >= 30
    shown = ", ".join(parts[:6]) + (f", and {len(parts) - 6} more" if len(parts) > 6 else "")
    text = f"mean reward under random play: {shown}"
    if unequal:
        return Check(
            name="seats", status="note", text=f"{text}; seats are not worth the same: compare agents with seats swapped"
        )
    return Check(name="seats", status="ok", text=text)


def forfeits(make: Make, faults: Faults) -> Check:
    """A seat that answers rubbish loses as declared, whichever seat it is; the play loop decides, as in training."""
    told = []
    for number, seat in enumerate(make(0).table.seats):
        game = make(number)
        if seat not in game.table.seats:
            continue
        episode = _with_rubbish(game, seat, faults)
        if episode is None:
            continue
        told.append(episode)
    if not told and not faults.num:
        return Check(name="forfeit", status="ok", text="no seat was ever refused an answer")
    forfeit = make(0).environment.forfeit
    return faults.result(
        "forfeit", f"{forfeit.retries + 1} tries, then {forfeit.offender:+g}: {', '.join(dict.fromkeys(told))}"
    )


def _with_rubbish(game: RandomGame, offender: str, faults: Faults) -> str | None:
    """Play ``game`` with rubbish at one seat; how that ended in a few words."""
    seats = tuple(SeatAssignment(seat=s, player="random", agent="random") for s in game.table.seats)
    limits = Limits(max_turns=game.environment.max_turns)
    match = Match(index=0, env=game.env_id, env_params=dict(game.params), seed=game.seed, seats=seats, limits=limits)
    players: dict[str, Player] = {**game.players, offender: _Rubbish()}
    try:
        episode = asyncio.run(
            play(game.env_id, game.environment, players, match, jury=_EvenJury(), env_source="check")
        )  # fmt: skip
    except EnvironmentFault as e:
        faults.add(f"with rubbish from {offender}: {e}", seed=game.number, turn=e.turn, seat=offender)
        return None
    if (
        episode.ended == "forfeit"
        and episode.offender != offender
        and game.environment.legal_moves(offender) is not None
    ):
        faults.add(f"{episode.offender} forfeited although {offender} answered rubbish", seed=game.number)
    if episode.ended != "forfeit":
        return f"rubbish is {episode.ended} play for {offender}"
    return f"{offender} {episode.rewards[offender]:+g}"


class _Rubbish:
    """Answers the same rubbish every time."""

    async def decide(self, decision: Decision) -> Answer:  # noqa: ARG002 - whatever is asked
        return Answer(text=RUBBISH)

    async def close(self) -> None:
        """Nothing is held."""


class _EvenJury:
    """Gives every label the same."""

    name = "even"

    async def judge(self, question: JuryQuestion) -> Mapping[str, float]:
        return dict.fromkeys(question.labels, 1.0 / len(question.labels))


def declarations(make: Make, faults: Faults) -> Check:
    """Seats, ranges, limits and forfeit as declared make sense together."""
    game = make(0).environment
    low, high = game.reward_range
    forfeit = game.forfeit
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        faults.add(f"reward_range is ({low}, {high}): two finite numbers, the lower first")
    if not low <= forfeit.offender <= high:
        faults.add(f"forfeit.offender is {forfeit.offender:g}, outside reward_range ({low:g}, {high:g})")
    if not game.zero_sum and not low <= forfeit.others <= high:
        faults.add(f"forfeit.others is {forfeit.others:g}, outside reward_range ({low:g}, {high:g})")
    if game.max_turns < 1 or game.max_move_tokens < 1:
        faults.add(f"max_turns is {game.max_turns} and max_move_tokens {game.max_move_tokens}: both at least 1")
    if not (type(game).__doc__ or "").strip():
        faults.add("the class has no docstring: it is what `env info` shows as the rules")
    shown = msgspec.structs.asdict(forfeit)
    return faults.result(
        "declared",
        f"{len(game.seats)} seats, rewards {low:g} to {high:g}, at most {game.max_turns} turns, forfeit {shown}",
    )
