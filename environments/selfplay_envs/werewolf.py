"""Werewolf: a few know who they are, the others must find out; three seats and more, teams, elimination."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

from selfplay.environment import Environment, Forfeit, Outcome
from selfplay.errors import ConfigError

NAMES = ("ann", "bob", "cid", "dee", "eve", "fay", "gus", "hal", "ivy")
WOLF, SEER, VILLAGER = "wolf", "seer", "villager"


class Werewolf(Environment):
    """Wolves know each other; one seer may look at a player every night; the rest are villagers.

    Night: every living wolf names a victim and the seer a player to look at, all at once. The victim with most names (the
    first in seat order when even) is out. Day: in seat order every living player names whom it suspects, for all to hear;
    then all vote at once. Who has most votes is out and its role is shown; when even, nobody is. The village wins when no
    wolf is left, the wolves when they are as many as the others.

    4 to 9 ``players``; one wolf up to six players, two from seven. Rewards: 1 for the winning team, dead or alive, and -1
    for the other: not zero-sum, as teams differ in size. A seat that says nothing legal twice forfeits: -1 for it, 0 for
    all others.
    """

    zero_sum = False
    forfeit = Forfeit(retries=1, offender=-1.0, others=0.0)
    max_move_tokens = 8

    def __init__(self, rng: random.Random, players: int = 5) -> None:
        super().__init__(rng)
        if not 4 <= players <= len(NAMES):
            raise ConfigError(f"players is {players}; the game is for 4 to {len(NAMES)}")
        self.seats = NAMES[:players]
        roles = [WOLF] * (1 if players < 7 else 2) + [SEER]
        drawn = roles + [VILLAGER] * (players - len(roles))
        rng.shuffle(drawn)
        self._roles = dict(zip(self.seats, drawn, strict=True))
        self._living = list(self.seats)
        self._public: list[str] = []
        self._seen: list[str] = []
        self._phase, self._day = "night", 1
        self._suspects: dict[str, str] = {}
        # Two players are lost a day at most, one (the night's) at least.
        self.max_turns = 3 * players * (players - 1)

    def rules(self, seat: str) -> str:
        role = self._roles[seat]
        task = {
            WOLF: "At night name a victim; by day stay hidden.",
            SEER: "At night name a player to learn its role.",
            VILLAGER: "Find the wolf and vote it out.",
        }[role]
        return f"You play Werewolf as {seat}, a {role}. {task} Answer with one name."

    def to_move(self) -> Sequence[str]:
        if self._winner():
            return ()
        if self._phase == "night":
            return [s for s in self._living if self._roles[s] in (WOLF, SEER)]
        if self._phase == "talk":
            return (next(s for s in self._living if s not in self._suspects),)
        return list(self._living)

    def view(self, seat: str) -> str:
        public = " ".join(self._public) or "Nothing has happened yet."
        ask = {"night": "It is night: name a player.", "talk": "Whom do you suspect?", "vote": "Vote: who shall go?"}
        known = self.private(seat).partition(": ")[2]
        secret = f" You know: {known}." if known else ""
        now = "; ".join(f"{s} suspects {t}" for s, t in self._suspects.items())
        talk = f" Today {now}." if now else ""
        return f"{public}{talk}{secret} {ask[self._phase]} Choose: {', '.join(self.legal_moves(seat))}."

    def legal_moves(self, seat: str) -> Sequence[str]:
        hunting = self._phase == "night" and self._roles[seat] == WOLF
        return [s for s in self._living if s != seat and not (hunting and self._roles[s] == WOLF)]

    def step(self, moves: Mapping[str, str]) -> None:
        if self._phase == "night":
            self._end_night(moves)
        elif self._phase == "talk":
            self._suspects.update(moves)
            if len(self._suspects) == len(self._living):
                self._phase = "vote"
        else:
            self._end_day(moves)

    def outcome(self) -> Outcome:
        wolves_won = self._winner() == WOLF
        team = tuple(s for s in self.seats if (self._roles[s] == WOLF) == wolves_won)
        who = "the wolves" if wolves_won else "the village"
        return self.win(*team, reason=f"{who} won on day {self._day}")

    def private(self, seat: str) -> str:
        """``role: what it learned``."""
        role = self._roles[seat]
        if role == WOLF:
            mates = [s for s in self.seats if self._roles[s] == WOLF and s != seat]
            return f"{role}: {', '.join(f'{m} is a wolf' for m in mates)}"
        return f"{role}: {', '.join(self._seen)}" if role == SEER else f"{role}: "

    def transcript(self) -> str:
        now = "; ".join(f"{s} suspects {t}" for s, t in self._suspects.items())
        return f"{' '.join(self._public)} [{self._phase}] {now}"

    def _winner(self) -> str:
        wolves = sum(self._roles[s] == WOLF for s in self._living)
        if not wolves:
            return VILLAGER
        return WOLF if 2 * wolves >= len(self._living) else ""

    def _end_night(self, moves: Mapping[str, str]) -> None:
        bites = Counter(target for seat, target in moves.items() if self._roles[seat] == WOLF)
        victim = max(self._living, key=lambda s: bites[s])  # the first in seat order when even
        self._seen += [f"{t} is a {self._roles[t]}" for s, t in moves.items() if self._roles[s] == SEER]
        self._living.remove(victim)
        self._public.append(f"Night {self._day}: {victim} was killed.")
        self._phase, self._suspects = "talk", {}

    def _end_day(self, moves: Mapping[str, str]) -> None:
        votes = Counter(moves.values())
        (first, most), *rest = votes.most_common()
        said = ", ".join(f"{s} suspected {t}" for s, t in self._suspects.items())
        cast = ", ".join(f"{s} for {t}" for s, t in moves.items())
        if rest and rest[0][1] == most:
            verdict = "nobody goes"
        else:
            self._living.remove(first)
            verdict = f"{first}, a {self._roles[first]}, goes"
        self._public.append(f"Day {self._day}: {said}; votes {cast}; {verdict}.")
        self._suspects = {}
        self._phase = "night"
        if not self._winner():
            self._day += 1
