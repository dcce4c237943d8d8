"""Every file in configs/ loads, can run, and the mode files together show every value of every mode setting."""

from __future__ import annotations

from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from selfplay.config import Config, check_config, load_config
from selfplay.config.schema import RolloutConfig, SyncConfig

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
FILES = sorted(CONFIGS.rglob("*.toml"))
MODES = sorted((CONFIGS / "modes").glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(CONFIGS)))
def test_it_can_run_and_says_what_it_is_for(path: Path) -> None:
    check_config(load_config(path, []))
    assert path.read_text("utf-8").startswith("# ")


def values(section: type, key: str) -> set[str]:
    return set(get_args(get_type_hints(section)[key]))


def test_the_mode_files_show_every_mode() -> None:
    configs: list[Config] = [load_config(path, []) for path in MODES]
    assert {c.sync.interrupt for c in configs} == values(SyncConfig, "interrupt")
    assert {c.sync.cache for c in configs} == values(SyncConfig, "cache")
    assert {c.rollout.partial for c in configs} == values(RolloutConfig, "partial")
    depths = {c.buffer.depth for c in configs}
    assert {0, 1, "unbounded"} < depths
    assert any(isinstance(d, int) and d > 1 for d in depths)
