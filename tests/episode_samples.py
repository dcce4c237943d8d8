"""Episodes made by hand, for tests of what is done with episodes: scoring, buffer, store, league."""

from __future__ import annotations

import msgspec

from selfplay.types import Ended, Episode, Match, SeatAssignment, Span, Turn


def seat(
    name: str, agent: str = "", *, trained: bool = True, player: str = "llm", pin: str | int = "turn"
) -> SeatAssignment:
    return SeatAssignment(seat=name, player=player, agent=agent or name, trained=trained, pin=pin)


PRO_CON = (seat("pro"), seat("con"))


def turn(
    seat: str,
    prompt: tuple[int, ...],
    sampled: tuple[int, ...],
    *,
    agent: str = "",
    version: int = 0,
    fork: bool = False,
    move: str | None = "x",
) -> Turn:
    return Turn(
        seat=seat, agent=agent or seat, round=0, prompt_ids=prompt, sampled_ids=sampled, fork=fork,
        logprobs=tuple(-0.1 * (i + 1) for i in range(len(sampled))),
        spans=(Span(version, 0, len(sampled)),) if sampled else (),
        stop_reason="stop", text="said", move=move,
    )  # fmt: skip


def episode(
    index: int = 0,
    *,
    attempt: int = 0,
    env: str = "kuhn-poker-v0",
    seats: tuple[SeatAssignment, ...] = PRO_CON,
    turns: tuple[Turn, ...] | None = None,
    rewards: dict[str, float] | None = None,
    winners: tuple[str, ...] | None = None,
    ended: Ended = "natural",
    offender: str | None = None,
    versions: dict[str, int] | None = None,
) -> Episode:
    """A two-seat episode that ``pro`` won, one turn a seat, unless told otherwise."""
    if turns is None:
        turns = tuple(
            turn(s.seat, (1, 2), (3, 4), agent=s.agent, version=(versions or {}).get(s.agent, 0)) for s in seats
        )
    if rewards is None:
        rewards = {s.seat: 1.0 if i == 0 else -1.0 for i, s in enumerate(seats)}
    return Episode(
        match=Match(index=index, env=env, seed=index, seats=seats, attempt=attempt), env_source="selfplay 0", turns=turns,
        rewards=rewards, winners=(seats[0].seat,) if winners is None else winners, ended=ended, reason="over", offender=offender,
    )  # fmt: skip


def encode(value: Episode) -> bytes:
    return msgspec.msgpack.encode(value)
