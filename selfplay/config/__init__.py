"""Typed settings: schema, loading, and the checks that need no model."""

from selfplay.config.load import config_from_tree, dump_toml, load_config
from selfplay.config.schema import Config

__all__ = ["Config", "config_from_tree", "dump_toml", "load_config"]
