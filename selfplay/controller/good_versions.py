"""Where an agent can be taken back to: versions whose whole training state is kept, and which proved to be healthy.

    runs/NAME/good/AGENT/N/     what a trainer checkpoint holds of one agent: weights, moments, step counts (and with them its
                                place in the learning rate's schedule), reference; baselines.json: the algorithm's of its roles

In: word that an agent is healthy, now and then. Out: at most two kept states per agent. The newer one is on probation: a collapse may
have begun before it shows, so it is gone back to only once the agent was found healthy again after it.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec

from selfplay.controller.trainer_link import TrainerLink
from selfplay.errors import StoreError
from selfplay.league.pool import Good, SnapshotPool
from selfplay.scoring.algorithms import Algorithm, agent_part, with_agent_part
from selfplay.store.atomic import store_errors, write_bytes
from selfplay.types import PolicyVersion

BASELINES = "baselines.json"


class GoodVersions:
    """Keeps them, and takes an agent back."""

    def __init__(
        self, root: Path, pool: SnapshotPool, trainer: TrainerLink, algorithm: Algorithm, timeout_s: float
    ) -> None:
        self._root, self._pool, self._trainer, self._algorithm = root, pool, trainer, algorithm
        self._timeout_s = timeout_s

    async def start(self, step: int, published: Mapping[str, int]) -> None:
        """An agent without a good version begins with what it is now."""
        for agent, number in sorted(published.items()):
            kept = [m for m in self._pool.good(agent) if (self._folder(m.version) / BASELINES).is_file()]
            if not any(m.proven for m in kept):
                version = PolicyVersion(agent, number)
                await self._save(version)
                kept = [Good(version=version, step=step, proven=True)]
            self._keep(agent, kept)

    async def mark(self, version: PolicyVersion, step: int) -> None:
        """The agent is healthy as ``version``: the one before is proven by that, and this one is on probation."""
        marks = self._pool.good(version.agent)
        if marks and marks[-1].version == version:
            return  # it has not moved
        await self._save(version)
        last = Good(version=marks[-1].version, step=marks[-1].step, proven=True)
        self._keep(version.agent, [last, Good(version=version, step=step, proven=False)])

    async def go_back(self, agent: str) -> Good:
        """Give the trainer and the algorithm the last proven state of ``agent`` again; what that is."""
        good = [m for m in self._pool.good(agent) if m.proven][-1]
        folder = self._folder(good.version)
        baselines = _read_baselines(folder / BASELINES)
        await self._trainer.restore(agent, str(folder), self._timeout_s)
        self._algorithm.load_state(with_agent_part(self._algorithm.state(), agent, baselines))
        self._keep(agent, [good])
        return good

    async def _save(self, version: PolicyVersion) -> None:
        folder = self._folder(version)
        with store_errors(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed before it took note of it
        await self._trainer.save(str(folder), self._timeout_s, agent=version.agent)
        part = agent_part(self._algorithm.state(), version.agent)
        write_bytes(folder / BASELINES, msgspec.json.encode(part))  # last: what has it is whole

    def _keep(self, agent: str, marks: list[Good]) -> None:
        """These and no others: noted first, so that what is noted is always there."""
        self._pool.set_good(agent, marks)
        wanted = {str(m.version.version) for m in marks}
        folder = self._root / agent
        with store_errors(folder):
            for path in folder.iterdir():
                if path.name not in wanted:
                    shutil.rmtree(path)

    def _folder(self, version: PolicyVersion) -> Path:
        return self._root / version.agent / str(version.version)


def _read_baselines(path: Path) -> dict[str, float]:
    with store_errors(path):
        data = path.read_bytes()
    try:
        return msgspec.json.decode(data, type=dict[str, float])
    except msgspec.DecodeError as e:
        raise StoreError(f"{path} is damaged: {e}; the agent cannot be taken back to this version") from e
