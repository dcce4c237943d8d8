"""What a resume refuses before anything starts, in one line each."""

from __future__ import annotations

from pathlib import Path

import pytest

from selfplay.cli.view import PlainView
from selfplay.config import Config
from selfplay.errors import ConfigError
from selfplay.launch.commands import resume_run
from selfplay.store.manifest import new_manifest
from selfplay.store.run_folder import RunFolder

CONFIG = Config(env="kuhn-poker-v0", model="tiny", seed=7)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    RunFolder.create(tmp_path, "r", CONFIG, new_manifest(CONFIG, name="r", env_source="selfplay 0")).close()
    return tmp_path / "r"


@pytest.mark.parametrize(
    ("edited", "key"),
    [
        ('env = "kuhn-poker-v0"\nmodel = "tiny"\nseed = 5\n', "seed"),
        ('env = "kuhn-poker-v0"\nmodel = "tiny"\nseed = 7\n[lora]\nrank = 4\n', "lora.rank"),
        ('env = "nim-v0"\nmodel = "tiny"\nseed = 7\n', "env"),
        ("", "env"),
    ],
)
def test_a_config_edited_by_hand_is_held_against_the_first_one(run: Path, edited: str, key: str) -> None:
    (run / "config.toml").write_text(edited)
    with pytest.raises(ConfigError, match=rf"^{key} cannot change when a run is resumed"):
        resume_run(run, (), PlainView())


def test_an_override_of_a_fixed_key_is_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model cannot change when a run is resumed"):
        resume_run(run, ("model=smollm2-135m",), PlainView())
