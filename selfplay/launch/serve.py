"""Models served for a person or a script: a policy server without training, gone when the block ends."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import zmq.asyncio

from selfplay.agent import PolicyClient
from selfplay.config import Config
from selfplay.controller.policy_link import PolicyLink
from selfplay.errors import UserError
from selfplay.launch.children import RunChildren
from selfplay.launch.launchers import LocalLauncher
from selfplay.launch.serving import plan_serving, policy_socket, server_config
from selfplay.pool.policy_client import ZmqPolicyClient
from selfplay.process import RuntimeDir
from selfplay.store.adapters import AdapterStore
from selfplay.store.run_folder import RunFolder
from selfplay.types import PolicyVersion

LOGS = "logs"


@contextlib.asynccontextmanager
async def open_policy(
    *, model: str | None, run: str | None, versions: tuple[PolicyVersion, ...], say: Callable[[str], None]
) -> AsyncIterator[PolicyClient]:
    """Serve ``model`` (None: the model of ``run``) with the adapters ``versions`` of ``run``.

    ``say`` hears what takes seconds. Raises `UserError` for an unknown model, run or version before anything starts.
    """
    config, store = _sources(model, run, versions)
    serving = plan_serving(config, say)
    runtime, context = RuntimeDir.create(), zmq.asyncio.Context()
    try:
        async with contextlib.AsyncExitStack() as stack:
            link = PolicyLink(context, runtime.endpoint(policy_socket(0)))
            stack.push_async_callback(link.close)
            children = RunChildren(runtime.file(LOGS), LocalLauncher())
            stack.push_async_callback(children.close)
            children.start_policy(server_config(serving, config, runtime, slots=max(1, len(versions))), link)
            children.watch()
            say(f"starting {serving.engine} with {serving.model.name}")
            await link.ready(config.policy.start_timeout_s)
            for version in versions:
                await _install(link, version, store, config.sync.timeout_s)
            client = ZmqPolicyClient(
                context, [runtime.endpoint(policy_socket(0))], request_timeout_s=config.rollout.request_timeout_s
            )
            stack.push_async_callback(client.close)
            yield client
    finally:
        context.destroy(linger=0)
        runtime.remove()


def _sources(model: str | None, run: str | None, versions: tuple[PolicyVersion, ...]) -> tuple[Config, AdapterStore]:
    """The config to serve with, and where the adapters lie."""
    if run is None:
        if versions:
            raise UserError(f"{versions[0]} is a version of a run: say which with --run RUN")
        return Config(model=model or Config().model), AdapterStore(Path())
    folder = RunFolder.open(run)
    config, store = folder.config(), AdapterStore(folder.adapters)
    for version in versions:
        store.verify(version)
    return msgspec.structs.replace(config, model=model or config.model), store


async def _install(link: PolicyLink, version: PolicyVersion, store: AdapterStore, timeout_s: float) -> None:
    await link.begin_install(version, store.bucket_header(version), timeout_s)
    await link.commit_install(version, timeout_s)
    await link.make_current(version, "finish", timeout_s)
