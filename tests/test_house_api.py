"""The public API is exactly this, resolves lazily, and every config that is shipped loads."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import selfplay
from selfplay.config.load import load_config

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = {
    "Answer", "Decision", "Environment", "EnvironmentFault", "Episode", "Forfeit", "IllegalMove", "JuryQuestion", "Limits",
    "Match", "Message", "Outcome", "Player", "PlayerContext", "PolicyClient", "PolicyVersion", "RunError", "Sampling",
    "SeatAssignment", "SelfplayError", "Turn", "UserError", "__version__", "check_environment", "make_environment", "named_move",
}  # fmt: skip


def test_the_public_api_is_this() -> None:
    assert set(selfplay.__all__) == PUBLIC
    assert list(selfplay.__all__) == sorted(selfplay.__all__)


def test_every_public_name_resolves_and_is_listed() -> None:
    for name in selfplay.__all__:
        assert getattr(selfplay, name) is not None
        assert name in dir(selfplay)


def test_public_names_live_where_the_type_checker_was_told() -> None:
    """The lazy table and the imports under TYPE_CHECKING are two lists of the same names."""
    source = (ROOT / "selfplay" / "__init__.py").read_text("utf-8")
    told = {
        name.strip()
        for line in source.splitlines()
        if line.startswith("    from selfplay.")
        for name in line.partition(" import ")[2].split(",")
    }
    assert told == PUBLIC - {"__version__"}


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nonsense'"):
        selfplay.Nonsense  # noqa: B018


def test_the_version_is_that_of_the_project_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert selfplay.__version__ == project["version"] == metadata.version("selfplay")


def test_importing_selfplay_imports_no_module_of_it() -> None:
    code = "import sys, selfplay; print([m for m in sys.modules if m.startswith('selfplay.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_entry_points_resolve() -> None:
    """Every registered name of this distribution leads to an object."""
    ours = [p for p in metadata.distribution("selfplay").entry_points if p.group != "console_scripts"]
    assert ours
    for point in ours:
        found = point.load()
        assert callable(getattr(found, "environment", None) if point.group == "selfplay.adapters" else found), point


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda p: p.name)
def test_shipped_configs_load(path: Path) -> None:
    assert load_config(path).env
