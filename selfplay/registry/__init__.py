"""Finding environments, agents, scorers and algorithms by id, through entry points, without importing any of them."""

from selfplay.registry.describe import describe
from selfplay.registry.entries import (
    AGENTS,
    ALGORITHMS,
    ENVIRONMENTS,
    SCORERS,
    Entry,
    find_entry,
    list_entries,
    load_entry,
)
from selfplay.registry.environments import (
    environment_source,
    load_environment,
    make_environment,
    resolve_environment_id,
)
from selfplay.registry.isolation import Isolation
from selfplay.registry.parameters import Parameter, check_values, declared_parameters
from selfplay.registry.players import load_agent
from selfplay.registry.spec import EnvironmentSpec

__all__ = [
    "AGENTS",
    "ALGORITHMS",
    "ENVIRONMENTS",
    "SCORERS",
    "Entry",
    "EnvironmentSpec",
    "Isolation",
    "Parameter",
    "check_values",
    "declared_parameters",
    "describe",
    "environment_source",
    "find_entry",
    "list_entries",
    "load_agent",
    "load_entry",
    "load_environment",
    "make_environment",
    "resolve_environment_id",
]
