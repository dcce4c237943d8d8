"""What a resume refuses before anything starts, in one line each."""

from __future__ import annotations

from pathlib import Path

import pytest

from selfplay.cli.view import PlainView
from selfplay.config import Config, load_config
from selfplay.errors import ConfigError
from selfplay.launch.commands import resume_run, start_run
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


@pytest.mark.parametrize("key", ["seats.player_0.agent=old@1", "scorers.teacher.agent=player_0@3"])
def test_a_frozen_version_that_a_new_run_cannot_have_is_refused_before_it_has_a_folder(
    tmp_path: Path, key: str
) -> None:
    config = load_config(None, ["env=kuhn-poker-v0", "model=tiny", f"runs_dir={tmp_path}", key])
    with pytest.raises(ConfigError, match=r"@[13] is named as a frozen version, and a new run has no versions yet"):
        start_run(config, PlainView())
    assert not list(tmp_path.iterdir())


def test_a_frozen_version_that_is_given_to_a_new_run_is_one_it_has(tmp_path: Path) -> None:
    """What is refused next is where its folder would be."""
    place = tmp_path / "a file"
    place.touch()
    keys = [f"runs_dir={place}", "policy.engine=transformers", "seats.player_0.agent=old@1"]
    config = load_config(None, ["env=kuhn-poker-v0", "model=tiny", *keys])
    with pytest.raises(ConfigError, match="old@1 is named as a frozen version"):
        start_run(config, PlainView())
    with pytest.raises(ConfigError, match=r"^runs_dir="):
        start_run(config, PlainView(), [tmp_path / "adapters" / "old" / "1"])


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("vllm", r"^train\.parameters=full needs policy\.engine=transformers: vLLM serves low-rank adapters only$"),
        ("auto", r"transformers: vLLM, which policy\.engine=auto takes here, serves low-rank adapters only$"),
    ],
)
def test_whole_models_on_an_engine_of_adapters_are_refused_before_there_is_a_folder(
    tmp_path: Path, engine: str, message: str
) -> None:
    config = load_config(
        None,
        ["env=kuhn-poker-v0", "model=tiny", f"runs_dir={tmp_path}", f"policy.engine={engine}", "train.parameters=full"],
    )
    with pytest.raises(ConfigError, match=message):
        start_run(config, PlainView())
    assert not list(tmp_path.iterdir())


def test_more_adapted_layers_than_the_model_has_are_refused_before_there_is_a_folder(tmp_path: Path) -> None:
    config = load_config(None, ["env=kuhn-poker-v0", "model=tiny", f"runs_dir={tmp_path}", "lora.layers=3"])
    with pytest.raises(ConfigError, match=r"^lora\.layers=3: model tiny has 2 layers; 0 means all of them$"):
        start_run(config, PlainView())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("policy.max_model_len=64",),
            r"an answer of 96 tokens leaves no room for a prompt in the 64 that model tiny is",
        ),
        (
            ("rollout.max_tokens=99999", "policy.max_model_len=100000"),
            r"an answer of 99999 tokens .* in the \d{4} that model",
        ),
    ],
)
def test_answers_as_long_as_the_context_are_refused_whoever_set_them(
    tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    """The game declares how long an answer may be, and the model folder how long a context can be."""
    config = load_config(None, ["env=debate-v0", "model=tiny", f"runs_dir={tmp_path}", *overrides])
    with pytest.raises(ConfigError, match=message):
        start_run(config, PlainView())
    assert not list(tmp_path.iterdir())


def test_a_frozen_version_that_the_run_does_not_hold_is_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"player_0@3 is named as a frozen version, and the run's adapters do not"):
        resume_run(run, ("scorers.teacher.agent=player_0@3",), PlainView())
