"""Scorers beside generation: an episode waits in the buffer until all of them have answered, and only that episode waits.

    Collector ── stored episode ──► ScoringStage ── Scores ──► score log ──► Memory: may be trained on
                                       │  each scorer with its own concurrency and deadline
                                       └─ failed ──► dropped from the buffer, by reason

What a scorer said is on disk before it counts, so that after a resume no episode gets a second verdict.
Backpressure needs nothing of its own: what is being scored fills the buffer and counts in the admission of matches, so a slow
scorer slows generation down and never piles up more than the buffer holds.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence

from selfplay.controller.memory import Memory
from selfplay.controller.policy_link import PolicyLink
from selfplay.controller.waits import Waits
from selfplay.environment import JuryQuestion
from selfplay.errors import RunError, WorkerError
from selfplay.scoring import Panel, Scorer, ScorerContext, Scores, scores_fault
from selfplay.store.score_log import Known, ScoreLog, ScoreRecord, asked_with
from selfplay.types import BASE, Episode, PolicyVersion


class ServedModels:
    """`ScorerContext` over the policy servers of the run, or over one with another model."""

    def __init__(self, links: Sequence[PolicyLink], current: Mapping[str, int], timeout_s: float) -> None:
        """``current``: agent → version that is current on every engine; looked at anew for each question."""
        self._links, self._current, self._timeout_s = links, current, timeout_s
        self._turns = itertools.count()

    async def logprobs(self, who: str, ids: Sequence[int]) -> tuple[float, ...]:
        """See `ScorerContext.logprobs`."""
        return await self._next().probe(self._version(who), tuple(ids), self._timeout_s)

    async def choose(self, who: str, question: JuryQuestion) -> Mapping[str, float]:
        """See `ScorerContext.choose`."""
        version = self._version(who)
        agent, pin = (version.agent, version.version) if version else (BASE, 0)
        return await self._next().choose(agent, pin, question, self._timeout_s)

    def _next(self) -> PolicyLink:
        return self._links[next(self._turns) % len(self._links)]

    def _version(self, who: str) -> PolicyVersion | None:
        if who in ("", BASE):
            return None
        return PolicyVersion.parse(who) if "@" in who else PolicyVersion(who, self._current[who])


class _Clock:
    """How much one scorer has done, and how long it took."""

    def __init__(self) -> None:
        self.num, self.seconds, self.waiting = 0, 0.0, 0

    def figures(self) -> dict[str, float]:
        return {"scored": float(self.num), "mean_s": self.seconds / max(1, self.num), "waiting": float(self.waiting)}


class ScoringStage:
    """Takes stored episodes by `submit` and works while `run` does."""

    def __init__(
        self,
        panel: Panel,
        contexts: Mapping[str, ScorerContext],
        *,
        memory: Memory,
        waits: Waits,
        log: ScoreLog | None,
        say: Callable[[str], None],
        max_failures: int,
    ) -> None:
        """``contexts``: by scorer; what each may ask. ``log``: None where no scorer is set."""
        self._panel, self._contexts, self._memory, self._waits, self._say = panel, contexts, memory, waits, say
        self._max_failures, self._failures_in_a_row = max_failures, 0
        self._queue: asyncio.Queue[tuple[int, Episode]] = asyncio.Queue()
        self._gates = {name: asyncio.Semaphore(c.concurrency) for name, (_, c) in panel.scorers.items()}
        self._clocks = {name: _Clock() for name in panel.scorers}
        self._log, self._known = log, Known()
        self._asked = {name: asked_with(c) for name, (_, c) in panel.scorers.items()}
        self._unwritten: list[ScoreRecord] = []
        self._writing = asyncio.Lock()

    @property
    def is_empty(self) -> bool:
        """No scorer is set: episodes may be trained on as they come."""
        return not self._panel.scorers

    def submit(self, seq: int, episode: Episode) -> None:
        """Have a stored episode scored. The buffer bounds how many there can be."""
        self._queue.put_nowait((seq, episode))

    async def run(self) -> None:
        """Score until cancelled; raises `WorkerError` when scorers fail time and again, `StoreError` for the log."""
        self._take_up(dict(self._memory.buffer.unready()))
        async with asyncio.TaskGroup() as group:
            while True:
                seq, episode = await self._queue.get()
                group.create_task(self._episode(seq, episode), name=f"scores of {episode.episode_id}")

    def figures(self) -> dict[str, dict[str, float]]:
        """Scorer → episodes scored, mean seconds, episodes that wait for it."""
        return {name: clock.figures() for name, clock in self._clocks.items()}

    def _take_up(self, waiting: dict[int, Episode]) -> None:
        """What a resumed run finds waiting: only those scorers are asked whose word is not in the log."""
        if waiting and self._log is not None:
            ids = {episode.episode_id for episode in waiting.values()}
            self._known = self._log.known(ids, {name: c for name, (_, c) in self._panel.scorers.items()})
            self._say(
                f"{len(self._known)} of the {len(waiting) * len(self._panel.scorers)} scores of the episodes that wait "
                "are in the log; the others are asked for"
            )
        for seq, episode in waiting.items():
            self.submit(seq, episode)

    async def _episode(self, seq: int, episode: Episode) -> None:
        names = list(self._panel.scorers)
        results = await asyncio.gather(*(self._word(name, episode) for name in names))
        fault = next((f"scorer {n}: {r}" for n, r in zip(names, results, strict=True) if isinstance(r, str)), "")
        if fault:
            self._fail(seq, episode, fault)
        else:
            said = [s for s in results if isinstance(s, Scores)]
            weights = [self._panel.scorers[name][1].weight for name in names]
            self._memory.score(seq, tuple(zip(said, weights, strict=True)))
            self._failures_in_a_row = 0
        await self._waits.notify()

    async def _word(self, name: str, episode: Episode) -> Scores | str:
        """What a scorer says, durable when this returns; it is not asked twice."""
        known = self._known.pop((episode.episode_id, name), None)
        if known is not None:
            return known
        scores = await self._score(name, episode)
        if isinstance(scores, Scores):
            await self._keep(
                ScoreRecord(episode_id=episode.episode_id, scorer=name, asked=self._asked[name], scores=scores)
            )
        return scores

    async def _keep(self, record: ScoreRecord) -> None:
        """Everything that waits goes to disk together; whoever comes next finds his own there already."""
        self._unwritten.append(record)
        async with self._writing:
            batch, self._unwritten = self._unwritten, []
            if batch and self._log is not None:
                await asyncio.to_thread(self._log.keep, batch)

    async def _score(self, name: str, episode: Episode) -> Scores | str:
        """What a scorer says, or in words why it says nothing."""
        scorer, config = self._panel.scorers[name]
        clock = self._clocks[name]
        clock.waiting += 1
        try:
            async with self._gates[name]:
                start = time.monotonic()
                scores = await self._ask(scorer, name, episode, config.timeout_s)
        finally:
            clock.waiting -= 1
        clock.num, clock.seconds = clock.num + 1, clock.seconds + time.monotonic() - start
        if isinstance(scores, str):
            return scores
        return scores_fault(scores, episode) or scores

    async def _ask(self, scorer: Scorer, name: str, episode: Episode, timeout_s: float) -> Scores | str:
        try:
            async with asyncio.timeout(timeout_s):
                return await scorer.score(episode, self._contexts[name])
        except TimeoutError:
            return f"no answer within {timeout_s:g} s"
        except RunError as e:
            return str(e).splitlines()[0]
        except Exception as e:  # noqa: BLE001 - the boundary to scorers' code: one episode is lost, and it is said
            return f"{type(e).__name__}: {e}"

    def _fail(self, seq: int, episode: Episode, fault: str) -> None:
        self._memory.discard(seq, "scorer failed")
        self._failures_in_a_row += 1
        self._say(f"episode {episode.episode_id} dropped, {fault}")
        if self._failures_in_a_row > self._max_failures:
            raise WorkerError(
                f"{self._failures_in_a_row} episodes in a row could not be scored (rollout.max_failures={self._max_failures}); "
                f"the last: {fault}"
            )
