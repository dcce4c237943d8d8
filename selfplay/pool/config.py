"""What a pool and its workers are told: plain values that cross the process border as JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from selfplay.agent import Sampling
from selfplay.config.schema import JuryConfig

API_KEY = "SELFPLAY_API_KEY"
_PASSED = {
    "PATH", "HOME", "USER", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TERM", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "XDG_CACHE_HOME",
    "XDG_RUNTIME_DIR", "SELFPLAY_RUNTIME_DIR", "PYTHONPATH", "PYTHONHOME", "PYTHONHASHSEED", "PYTHONWARNINGS", "PYTHONUTF8",
    "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "SYSTEMROOT",
}  # fmt: skip
_PASSED_WITH_KEY = {
    API_KEY, "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE",
    "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
}  # fmt: skip
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One pool of environment workers on this machine."""

    workers: Annotated[int, Meta(ge=1)] = 1
    concurrency: Annotated[int, Meta(ge=1)] = 16
    """Episodes at once in each worker."""
    max_restarts: Annotated[int, Meta(ge=0)] = 5
    policy_endpoints: tuple[str, ...] = ()
    """Policy servers; empty when only bots play."""
    sampling: Sampling = Sampling()
    jury: JuryConfig = JuryConfig()
    episode_timeout_s: Annotated[float, Meta(gt=0)] = 300.0
    """Longest a worker may be held up by one call into an environment, plus ``grace_s``."""
    request_timeout_s: Annotated[float, Meta(gt=0)] = 120.0
    grace_s: Annotated[float, Meta(gt=0)] = 10.0
    start_timeout_s: Annotated[float, Meta(gt=0)] = 180.0
    """Longest from the start of a worker to its hello."""
    resend_s: Annotated[float, Meta(gt=0)] = 5.0
    """How long a worker waits for an acknowledgement before it sends a result again."""
    needs_api_key: bool = False
    """An API player or jury is configured: workers get the key and the proxy settings."""

    @property
    def stuck_after_s(self) -> float:
        """A worker whose loop has not moved for so long is stuck."""
        return self.episode_timeout_s + self.grace_s


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process start."""

    worker: str
    """Unique per process start; also its identity on the wire."""
    controller: str
    """Address of the controller's socket."""
    runtime_dir: str
    board: str
    """Path of the file in which the worker shows that its loop moves, and for which episode."""
    pool: PoolConfig


def scrubbed_environment(environment: Mapping[str, str], *, needs_api_key: bool) -> dict[str, str]:
    """The variables a worker may see: nothing that could be a token, one thread per numeric library.

    ``SELFPLAY_API_KEY`` and proxy settings pass only with ``needs_api_key``.
    """
    passed = _PASSED | _PASSED_WITH_KEY if needs_api_key else _PASSED
    kept = {k: v for k, v in environment.items() if k in passed or k.startswith("LC_")}
    return kept | _ONE_THREAD


def worker_environment(config: PoolConfig) -> dict[str, str]:
    """`scrubbed_environment` of this process."""
    return scrubbed_environment(os.environ, needs_api_key=config.needs_api_key)
