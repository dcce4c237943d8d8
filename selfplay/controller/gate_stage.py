"""The promotion gate in a running controller: its games among the others, and what its verdicts change.

    Gate ── next game ──► pool ── result ──► league.sqlite ──► Gate ── verdict ──► standings

In: free slots of the pool, and results of games that the gate asked for. Out: games between frozen versions; they are neither trained
on nor counted among the run's episodes, and take at most ``league.gate_share`` of the slots. Each is in the gate's own log (whole) and in
the record before its worker may forget it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from selfplay.controller.gate_log import GateLog
from selfplay.league import LeagueRecords
from selfplay.league.gate import Gate
from selfplay.league.league import League
from selfplay.league.records import game_record
from selfplay.pool import EpisodeResult, FailedResult
from selfplay.scoring import why_unusable
from selfplay.types import Match, PolicyVersion


class GateStage:
    """Asks for the gate's games and acts on its verdicts."""

    def __init__(
        self, gate: Gate, league: League, records: LeagueRecords, log: GateLog, say: Callable[[str], None]
    ) -> None:
        self._gate, self._league, self._records, self._log, self._say = gate, league, records, log, say
        log.complete(records)
        self._left: list[PolicyVersion] = []
        self.num_games = 0
        """Games with a result, of this process."""

    def start(self) -> None:
        """Stand where the standings and the record say; also after they have changed."""
        self._gate.refresh(self._records.games())
        self._settle()

    def owns(self, match: Match) -> bool:
        """Whether a result is the gate's."""
        return self._gate.owns(match)

    def wants(self) -> bool:
        """Whether a game is to be played now."""
        return self._gate.wants()

    def next_match(self) -> Match:
        """That game."""
        return self._gate.next_match()

    def is_used(self, version: PolicyVersion) -> bool:
        """Whether a game under way needs that snapshot."""
        return self._gate.is_used(version)

    def pop_left(self) -> list[PolicyVersion]:
        """Versions that nobody meets any more since the last call."""
        left, self._left = self._left, []
        return left

    async def take(self, results: Sequence[EpisodeResult | FailedResult]) -> list[str]:
        """Record what came and decide; what went wrong, in words. The caller acknowledges."""
        sound = [r for r in results if isinstance(r, EpisodeResult) and why_unusable(r.episode) is None]
        await asyncio.to_thread(self._keep, sound)
        wrong = []
        for result in results:
            if isinstance(result, EpisodeResult):
                fault = why_unusable(result.episode)
                self._gate.take(result.match, None if fault else game_record(result.episode))
                self.num_games += fault is None
                wrong += [f"gate game {result.match.episode_id}: {fault.reason}: {fault.detail}"] if fault else []
            elif result.kind in ("infrastructure", "cancelled"):
                self._gate.void(result.match)
                wrong.append(f"gate game {result.match.episode_id} is played again: {result.message}")
            else:
                self._gate.take(result.match, None)
                wrong.append(f"gate game {result.match.episode_id} cannot be played: {result.message}")
        self._settle()
        return wrong

    def _keep(self, results: Sequence[EpisodeResult]) -> None:
        self._log.add([(r.episode, r.data) for r in results])
        self._records.add([r.episode for r in results])

    def figures(self) -> dict[str, float]:
        """How the test stands, for the metrics."""
        verdict = self._gate.verdict
        now = {"gate_games": float(self.num_games)}
        if verdict is not None:
            now |= {"gate_llr": verdict.test.llr, "gate_pairs": float(verdict.pairs), "gate_score": verdict.score}
        return now

    def _settle(self) -> None:
        while (verdict := self._gate.verdict) is not None and verdict.outcome != "open":
            self._left += self._league.decide(verdict)
            self._say(f"gate: {verdict}")
            self._gate.refresh(self._records.games())
