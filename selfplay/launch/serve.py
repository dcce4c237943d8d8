"""Models served for a person or a script: a policy server without training, gone when the block ends."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
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
from selfplay.launch.warm_start import base_model
from selfplay.pool.policy_client import ZmqPolicyClient
from selfplay.process import RuntimeDir
from selfplay.store.adapters import AdapterStore
from selfplay.store.run_folder import RunFolder
from selfplay.types import PolicyVersion

LOGS = "logs"
MOST_SLOTS = 8
"""Adapters in one engine batch, when more could play."""


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter on disk, ``stored`` in the store at ``root``, and the name under which it is served."""

    served: PolicyVersion
    stored: PolicyVersion
    root: str


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """A policy server that is up."""

    endpoint: str
    link: PolicyLink
    client: ZmqPolicyClient
    runtime: RuntimeDir
    children: RunChildren


@contextlib.asynccontextmanager
async def open_policy(
    *, model: str | None, run: str | None, versions: tuple[PolicyVersion, ...], say: Callable[[str], None]
) -> AsyncIterator[PolicyClient]:
    """Serve ``model`` (None: the model of ``run``) with the adapters ``versions`` of ``run``.

    ``say`` hears what takes seconds. Raises `UserError` for an unknown model, run or version before anything starts.
    """
    config, store = _sources(model, run, versions)
    adapters = [Adapter(served=v, stored=v, root=str(store.root)) for v in versions]
    async with open_server(config, adapters, say) as served:
        yield served.client


@contextlib.asynccontextmanager
async def open_server(
    config: Config, adapters: Sequence[Adapter], say: Callable[[str], None], *, most_slots: int = MOST_SLOTS
) -> AsyncIterator[Served]:
    """Serve the model of ``config`` with ``adapters``, of whatever runs they are; gone when the block ends.

    All of them are held in memory, up to ``most_slots`` take part in one batch. Raises `UserError` for what cannot be served.
    """
    serving = plan_serving(config, say)
    runtime, context = RuntimeDir.create(), zmq.asyncio.Context()
    try:
        async with contextlib.AsyncExitStack() as stack:
            endpoint = runtime.endpoint(policy_socket(0))
            link = PolicyLink(context, endpoint)
            stack.push_async_callback(link.close)
            children = RunChildren(runtime.file(LOGS), LocalLauncher())
            stack.push_async_callback(children.close)
            settings = server_config(serving, config, runtime, slots=max(1, min(most_slots, len(adapters))))
            children.start_policy(msgspec.structs.replace(settings, max_installed=len(adapters)), link)
            children.watch()
            say(f"starting {serving.engine} with {serving.model.name}")
            await link.ready(config.policy.start_timeout_s)
            for adapter in adapters:
                await _install(link, adapter, config.sync.timeout_s)
            client = ZmqPolicyClient(context, [endpoint], request_timeout_s=config.rollout.request_timeout_s)
            stack.push_async_callback(client.close)
            yield Served(endpoint=endpoint, link=link, client=client, runtime=runtime, children=children)
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
    return msgspec.structs.replace(config, model=model or base_model(folder)), store


async def _install(link: PolicyLink, adapter: Adapter, timeout_s: float) -> None:
    header = AdapterStore(Path(adapter.root)).bucket_header(adapter.stored)
    await link.begin_install(adapter.served, header, timeout_s)
    await link.commit_install(adapter.served, timeout_s)
    await link.make_current(adapter.served, "finish", timeout_s)
