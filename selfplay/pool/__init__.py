"""Environment pools: worker processes that play matches, and their supervisor on the controller's side."""

from selfplay.pool.config import PoolConfig
from selfplay.pool.results import EpisodeResult, FailedResult, Held
from selfplay.pool.supervisor import PoolSupervisor

__all__ = ["EpisodeResult", "FailedResult", "Held", "PoolConfig", "PoolSupervisor"]
