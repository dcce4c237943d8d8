"""What is looked at while random games are played: one inspector per check, told of every decision, answer and ending."""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Sequence

from selfplay.agent import Decision
from selfplay.check.driver import RandomGame
from selfplay.check.report import Check, Faults
from selfplay.errors import IllegalMove
from selfplay.play.text import clean
from selfplay.types.episode import MAX_TEXT

NUM_PURE, NUM_ODD = 40, 10
"""In how many games answers are tried twice and odd answers are given."""
ODD_ANSWERS = ("", "\0", "zzqx", "9" * 5000, "[" * 1000, "\ud83d half", "<think>" * 200)
LONG_ANSWERS = ("[a " * 33_000, " " * 100_000, "<move" * 20_000)
SLOW_PARSE_S = 1.0


class Inspector(ABC):
    """Looks on at random games. ``faults`` collects what it finds."""

    name = ""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    def decisions(self, game: RandomGame, decisions: Sequence[Decision]) -> None:
        """The seats of a round are about to be asked."""

    def ended(self, game: RandomGame) -> None:
        """A game is over."""

    @abstractmethod
    def result(self) -> Check:
        """What was found."""

    def fault(self, game: RandomGame, message: str, turn: int | None = None, seat: str = "") -> None:
        self.faults.add(message, seed=game.number, turn=turn, seat=seat)


class LegalMoves(Inspector):
    """Every listed move is understood as itself; what is listed is text, each move once."""

    name = "legal-moves"
    num = 0

    def decisions(self, game: RandomGame, decisions: Sequence[Decision]) -> None:
        for d in decisions:
            legal = d.legal_moves or ()
            if len(set(legal)) != len(legal):
                self.fault(game, f"a legal move is listed twice: {legal!r}", d.round, d.seat)
            for move in legal:
                self.num += 1
                try:
                    heard = game.table.parse(d.seat, move)
                except IllegalMove as e:
                    heard = f"IllegalMove: {e}"
                if heard != move:
                    self.fault(game, f"the legal move {move!r} is understood as {heard!r}", d.round, d.seat)

    def result(self) -> Check:
        text = f"{self.num} listed moves are understood as themselves" if self.num else "any text is a move"
        return self.faults.result(self.name, text)


class IllegalMoves(Inspector):
    """Odd answers are refused with a reason or are moves; refusing takes no long time and changes nothing."""

    name = "illegal-moves"
    num = 0
    slow = False

    def decisions(self, game: RandomGame, decisions: Sequence[Decision]) -> None:
        if game.number >= NUM_ODD or self.slow:
            return
        for d in decisions:
            for answer in (*ODD_ANSWERS, *(LONG_ANSWERS if game.number == 0 and d.round < 2 else ())):
                self._try(game, d, answer)

    def _try(self, game: RandomGame, d: Decision, answer: str) -> None:
        begun = time.perf_counter()
        try:
            heard = game.table.parse(d.seat, answer)
        except IllegalMove as e:
            if not str(e).strip():
                self.fault(game, f"{answer[:30]!r} is refused without a reason", d.round, d.seat)
        else:
            if d.legal_moves is not None and heard not in d.legal_moves:
                self.fault(game, f"{answer[:30]!r} is taken for {heard!r}, which is not a legal move", d.round, d.seat)
        took_s = time.perf_counter() - begun
        if took_s > SLOW_PARSE_S and not self.slow:
            self.slow = True
            what = f"parsing {len(answer)} characters like {answer[:10]!r} took {took_s:.1f} s"
            self.fault(game, what, d.round, d.seat)
        self.num += 1

    def result(self) -> Check:
        return self.faults.result(self.name, f"{self.num} odd answers are refused with a reason, or are moves")


class Purity(Inspector):
    """Asking and parsing change nothing: no seat can see a move of the same round, or spoil it by a bad answer."""

    name = "simultaneous"
    num_rounds = num_simultaneous = 0

    def decisions(self, game: RandomGame, decisions: Sequence[Decision]) -> None:
        if game.number >= NUM_PURE:
            return
        self.num_rounds += 1
        self.num_simultaneous += len(decisions) > 1
        for d in decisions:
            for answer in (d.legal_moves[-1] if d.legal_moves else "an answer", "zzqx"):
                try:
                    game.table.parse(d.seat, answer)
                except IllegalMove:
                    continue
        for before, after in zip(decisions, game.table.look_again(), strict=True):
            if (before.view, before.legal_moves) != (after.view, after.legal_moves):
                what = "what a seat is shown changes while the answers of its round are read"
                self.fault(game, f"{what}: {before.view[-80:]!r} / {after.view[-80:]!r}", before.round, before.seat)

    def result(self) -> Check:
        kind = f"{self.num_simultaneous} of them simultaneous" if self.num_simultaneous else "none simultaneous"
        return self.faults.result(self.name, f"no move of a round is visible in it ({self.num_rounds} rounds, {kind})")


class HiddenInformation(Inspector):
    """Whenever the public record and a seat's private knowledge are the same, the seat is shown the same."""

    name = "hidden"

    def __init__(self, faults: Faults) -> None:
        super().__init__(faults)
        self._seen: dict[bytes, tuple[bytes, int, str]] = {}
        self._undeclared = False
        self._num_compared = 0

    def decisions(self, game: RandomGame, decisions: Sequence[Decision]) -> None:
        record = game.table.transcript()
        for d in decisions:
            private = game.table.private(d.seat)
            self._undeclared |= private is None
            if private is None:
                continue
            key = _digest(d.seat, record, private, str(len(decisions)))
            shown = _digest(d.rules, d.view, repr(d.legal_moves))
            known = self._seen.setdefault(key, (shown, game.number, d.view))
            self._num_compared += known[1] != game.number
            if known[0] != shown:
                what = f"is shown something else although the public record and its private() are the same as in game {known[1]}"
                self.fault(game, f"{what}: {d.view[-100:]!r} / {known[2][-100:]!r}", d.round, d.seat)

    def result(self) -> Check:
        if self._undeclared and not self.faults.num:
            return Check(name=self.name, status="note", text="not checked: the game does not define private(seat)")
        return self.faults.result(
            self.name, f"what is shown follows from private() and the public record ({self._num_compared} comparisons)"
        )


class Text(Inspector):
    """What is shown is there, is of bounded length, and survives the wire."""

    name = "text"
    longest = 0

    def decisions(self, game: RandomGame, decisions: Sequence[Decision]) -> None:
        for d in decisions:
            if not d.view.strip() and not d.rules.strip():
                self.fault(game, "a seat that is to move is shown nothing, and told no rules", d.round, d.seat)
            self.longest = max(self.longest, len(d.view))
            if game.number < NUM_ODD:
                for field, text in game.table.raw_texts(d.seat).items():
                    if clean(text) != text or len(text) > MAX_TEXT:
                        what = f"{field}() holds text that cannot be sent as it is (a lone surrogate, NUL, or {MAX_TEXT} characters)"
                        self.fault(game, what, d.round, d.seat)

    def result(self) -> Check:
        return self.faults.result(self.name, f"survives the wire; the longest view has {self.longest} characters")


class Endings(Inspector):
    """Which endings were seen, how often, and that games end by themselves."""

    name = "endings"

    def __init__(self, faults: Faults) -> None:
        super().__init__(faults)
        self._how: Counter[str] = Counter()
        self._won: Counter[str] = Counter()
        self._first_cut: RandomGame | None = None

    def ended(self, game: RandomGame) -> None:
        self._how[game.ended] += 1
        if game.ended == "truncated":
            self._first_cut = self._first_cut or game
        if game.outcome is not None:
            self._won[" and ".join(game.outcome.winners) or "nobody"] += 1

    def result(self) -> Check:
        total = sum(self._how.values())
        if self._first_cut is not None and not self._how["natural"]:
            cap = self._first_cut.environment.max_turns
            self.fault(self._first_cut, f"none of {total} random games ended within max_turns = {cap}")
        shares = [f"{name} {n / total:.0%}" for name, n in self._won.most_common(4)]
        rest = f" and {len(self._won) - 4} other results" if len(self._won) > 4 else ""
        cut = [f"{how} {self._how[how]}" for how in ("truncated", "forfeit") if self._how[how]]
        check = self.faults.result(
            self.name, f"{total} games; won by {', '.join(shares) or 'nobody'}{rest}" + "".join(f"; {c}" for c in cut)
        )
        noted = check.status == "ok" and cut
        return Check(name=self.name, status="note", text=check.text) if noted else check


def _digest(*parts: str) -> bytes:
    return hashlib.blake2b("\x1f".join(parts).encode("utf-8", "surrogatepass"), digest_size=12).digest()


INSPECTORS: tuple[type[Inspector], ...] = (LegalMoves, IllegalMoves, Purity, HiddenInformation, Text, Endings)


def rewards_by_seat(games: Sequence[RandomGame]) -> dict[str, list[float]]:
    """Rewards of the games that ended by themselves."""
    out: dict[str, list[float]] = defaultdict(list)
    for game in games:
        if game.outcome is not None:
            for seat, reward in game.outcome.rewards.items():
                out[seat].append(reward)
    return dict(out)
