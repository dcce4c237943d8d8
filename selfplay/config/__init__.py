"""Typed settings: schema, loading, rendering, and the checks that need no model."""

from selfplay.config.derive import (
    agent_lora,
    check_config,
    engine_rank,
    engine_targets,
    live_adapter_slots,
    resolve_transport,
)
from selfplay.config.load import changed_keys, config_from_tree, load_config
from selfplay.config.render import describe_config, dump_toml
from selfplay.config.schema import Config

__all__ = [
    "Config",
    "agent_lora",
    "changed_keys",
    "check_config",
    "config_from_tree",
    "describe_config",
    "dump_toml",
    "engine_rank",
    "engine_targets",
    "live_adapter_slots",
    "load_config",
    "resolve_transport",
]
