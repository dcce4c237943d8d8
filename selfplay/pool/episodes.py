"""One match from lease to result inside a worker: make the game, seat the players, play, and tell failures apart."""

from __future__ import annotations

import asyncio
import traceback

from selfplay.agent import PolicyClient
from selfplay.config.schema import JuryConfig
from selfplay.errors import EngineError, EnvironmentFault, WireError
from selfplay.play import ApiJury, Jury, PolicyJury, play, sit_down
from selfplay.play.chat_api import ChatApi
from selfplay.pool.config import PoolConfig
from selfplay.registry import environment_source, make_environment
from selfplay.types import Episode, Match, PolicyVersion
from selfplay.wire.codec import clean_text, encode
from selfplay.wire.messages import EpisodeDone, EpisodeFailed

MAX_TEXT = 20_000


class EpisodeRunner:
    """Plays matches; every way an episode can end comes out as one message."""

    def __init__(self, config: PoolConfig, policy: PolicyClient | None) -> None:
        self._config, self._policy = config, policy
        self._jury = _jury(config.jury, policy)

    async def run(self, match: Match) -> EpisodeDone | EpisodeFailed:
        """The result of a match. Only a cancellation of the calling task is raised."""
        limit_s = match.limits.time_s + self._config.request_timeout_s + self._config.grace_s
        try:
            async with asyncio.timeout(limit_s) as timer:
                episode = await self._play(match)
            return EpisodeDone(episode_id=match.episode_id, episode=encode(episode))
        except EnvironmentFault as e:
            return failed(match, "environment", str(e), e.traceback)
        except EngineError as e:
            return failed(match, "infrastructure", str(e))
        except TimeoutError as e:
            if timer.expired():
                return failed(match, "infrastructure", f"the episode did not end within {limit_s:g} s")
            return _raised(match, e)
        except asyncio.CancelledError as e:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return _raised(match, e)  # the game or a player raised it: nobody asked for a cancellation
        except (Exception, SystemExit, KeyboardInterrupt) as e:  # noqa: BLE001 - the boundary to games' and players' code
            return _raised(match, e)

    async def _play(self, match: Match) -> Episode:
        environment = make_environment(match.env, match.env_params, match.seed)
        players = sit_down(match, self._policy, self._config.sampling, environment)
        return await play(
            match.env, environment, players, match, jury=self._jury, env_source=environment_source(match.env)
        )


def failed(match: Match, kind: str, message: str, trace: str = "") -> EpisodeFailed:
    """A failure, with texts fit for the wire. Of a long traceback both ends are kept: the raise is at the bottom."""
    return EpisodeFailed(
        episode_id=match.episode_id, kind=kind, message=_fit(message, MAX_TEXT), traceback=_fit(trace, MAX_TEXT)  # type: ignore[arg-type]
    )  # fmt: skip


def _raised(match: Match, error: BaseException) -> EpisodeFailed:
    what = str(error) if isinstance(error, WireError) else f"{type(error).__name__}: {error}"
    message = f"{match.env} (seed {match.seed}, episode {match.episode_id}): {what}"
    return failed(match, "environment", message, "".join(traceback.format_exception(error)))


def _fit(text: str, limit: int) -> str:
    text = clean_text(text)
    half = limit // 2 - 20
    return text if len(text) <= limit else f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


def _jury(config: JuryConfig, policy: PolicyClient | None) -> Jury | None:
    """The jury of the configuration; None when it is a served model and no model is served."""
    if config.agent == "api":
        return ApiJury(ChatApi(config.api_base, config.api_model))
    if policy is None:
        return None
    if "@" in config.agent:
        version = PolicyVersion.parse(config.agent)
        return PolicyJury(policy, version.agent, version.version)
    return PolicyJury(policy, config.agent)
