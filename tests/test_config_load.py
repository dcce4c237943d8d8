"""Config: every mistake is one clear line that names the key; what is written reads back equal."""

from __future__ import annotations

import os
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfplay.config import Config, config_from_tree, describe_config, dump_toml, load_config
from selfplay.config.load import MAX_CONFIG_BYTES, all_keys, parse_override
from selfplay.config.schema import AgentConfig, SeatConfig, TrainConfig
from selfplay.errors import ConfigError


def test_defaults_file_and_overrides_win_in_that_order(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('env = "a-v0"\n[train]\nsteps = 5\nbatch = 4\n')
    config = load_config(path, ["train.steps=7"], {"train": {"steps": 1, "ranks": 2}, "model": "tiny"})
    assert (config.env, config.model, config.train.steps, config.train.batch, config.train.ranks) == (
        "a-v0",
        "tiny",
        7,
        4,
        2,
    )


def test_the_defaults_given_are_not_changed(tmp_path: Path) -> None:
    defaults: dict[str, Any] = {"train": {"steps": 1}}
    load_config(None, ["train.steps=7", "seats.pro.agent=x"], defaults)
    assert defaults == {"train": {"steps": 1}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1", 1), ("a=1.5", 1.5), ("a=true", True), ("a=tiny", "tiny"), ('a="1"', "1"), ("a=", ""), ("a=x=y", "x=y"),
        ("a=[1, 2]", [1, 2]), ("a= 3 ", 3), ("a=debate-v0", "debate-v0"), ("a=$(id)", "$(id)"), ("a=~/x y", "~/x y"),
    ],
)  # fmt: skip
def test_override_values(text: str, value: Any) -> None:
    assert parse_override(text) == ("a", value)


def test_quoted_parts_of_a_key() -> None:
    config = load_config(None, ['seats."player 1".agent=x', 'env_params."a.b"=1'])
    assert config.seats == {"player 1": SeatConfig(agent="x")}
    assert config.env_params == {"a.b": 1}


def test_a_table_as_a_value_is_merged() -> None:
    config = load_config(None, ["train.steps=9", "train={batch=2}"])
    assert (config.train.steps, config.train.batch) == (9, 2)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.learning_rat=1", "unknown key 'train.learning_rat'; did you mean"),
        ("lr=1", "unknown key 'lr'; did you mean 'train.lr'"),
        ("optimizer.lr=1", "unknown key 'optimizer'"),
        ("buffer.batch=3", "unknown key 'buffer.batch'; did you mean 'train.batch'"),
        ("train.micro-batch-tokens=2", "did you mean 'train.micro_batch_tokens'"),
        ("agents.pro.learning_rate=2", "unknown key 'agents.pro.learning_rate'; did you mean 'agents.pro.lr'"),
        ("seats.pro.playr=x", "unknown key 'seats.pro.playr'; did you mean 'seats.pro.player'"),
        ("train.batch=0", "train.batch: expected `int` >= 1"),
        ("train.steps=-1", "train.steps: expected `int` >= 0"),
        ("train.steps=1.5", "train.steps: expected `int`, got `float`"),
        ("train.lr=fast", "train.lr: expected `float`, got `str`"),
        ("train.lr=nan", "train.lr: nan is not a finite number"),
        ("train.lr=inf", "train.lr: inf is not a finite number"),
        ("train.lr=-inf", "train.lr: -inf is not a finite number"),
        ("train.betas=[0.9, nan]", "train.betas: nan is not a finite number"),
        ("train.betas=[1, 2, 3]", "train.betas: expected a list of length 2"),
        ("train=5", "train: expected a section, got `int`"),
        ("seats.pro=3", "seats.pro: expected a section, got `int`"),
        ("seats=3", "seats: expected a section, got `int`"),
        ("seats.pro.player=3", "seats.pro.player: expected `str`, got `int`"),
        ("agents.pro.lr=-1", "agents.pro.lr: expected `float` > 0"),
        ("sync.transport=pigeon", "sync.transport: invalid enum value 'pigeon'; one of auto, nccl, gloo, shm, file"),
        ("env_params.when=1999-01-01", r"env_params.when: expected `bool \| int \| float \| str`, got `date`"),
        ("env_params.x=[1]", "env_params.x: expected .*, got a list"),
        ('seats.pro.options."a b"=[1]', 'seats.pro.options."a b": expected'),
        ("env_params.motion=" + "x" * 9000, "env_params.motion: a text of 9,000 characters; at most 8,192 are allowed"),
        ("env_params.big=99999999999999999999999", "env_params.big: the integer does not fit in 64 bits"),
        ("seed=-1", "seed: expected `int` >= 0"),
        ("policy.max_model_len=4", "policy.max_model_len: expected `int` >= 64"),
        ("env=1", "env: expected `str`, got `int`"),
        ("env=a\0b", "is not valid text"),
        ("env=\udce9", "is not valid text"),
        ("train.steps.x=1", "unknown key|is a value|expected"),
        ("a", "'a' is not key=value"),
        ("=1", "is not key=value"),
        ("train..lr=3", "is not a key"),
        (".lr=3", "is not a key"),
        ("train.lr.=3", "is not a key"),
        ("tr ain.lr=3", "is not a key"),
        ("train.lr=1\ntrain.steps=5", "may not contain a line break"),
        ("seed=" + "9" * 5000, "seed: "),
        ("env_params.x=" + "[" * 20000, "env_params.x: "),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_that_names_the_key(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as e:
        load_config(None, [override])
    assert "\n" not in str(e.value)


def test_a_value_is_not_a_section() -> None:
    with pytest.raises(ConfigError, match="'steps' is a value, not a section"):
        load_config(None, ["train.steps=1", "train.steps.x=1"])


@pytest.mark.parametrize(
    "content",
    [b"env = ", b"[train", b"\xff\xfe", b"a = " + b"9" * 5000, b"a = " + b"[" * 20000, b"env = 'x'\nenv = 'y'"],
    ids=["cut", "header", "not utf-8", "digits", "nesting", "twice"],
)
def test_a_file_that_is_not_toml(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"c\.toml is not TOML"):
        load_config(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read config .*absent\.toml: No such file"):
        load_config(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)


def test_environment_variables_are_not_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "canary")
    assert load_config(None, ["name=$SECRET", "model=${SECRET}"]).name == "$SECRET"


# ── writing ──────────────────────────────────────────────────────────────────────────────────────

TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=12)
SCALARS = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False), TEXT
)
TABLES = st.dictionaries(TEXT, SCALARS, max_size=3)
POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
CONFIGS = st.builds(
    Config, env=TEXT, env_params=TABLES, name=TEXT, seed=st.integers(0, 2**31 - 1),
    seats=st.dictionaries(TEXT, st.builds(SeatConfig, player=TEXT, agent=TEXT, options=TABLES), max_size=2),
    agents=st.dictionaries(TEXT, st.builds(AgentConfig, lr=st.none() | POSITIVE, clip_norm=st.none() | POSITIVE), max_size=2),
    train=st.builds(TrainConfig, lr=POSITIVE, steps=st.integers(0, 2**62), activation_checkpointing=st.booleans()),
)  # fmt: skip


@given(CONFIGS)
def test_what_is_written_reads_back_equal(config: Config) -> None:
    assert config_from_tree(tomllib.loads(dump_toml(config))) == config
    assert config_from_tree(tomllib.loads(describe_config(config))) == config


def test_the_description_shows_every_setting_with_its_meaning() -> None:
    text = describe_config(load_config(None, ["train.steps=9", "agents.pro.lr=0.5"]))
    for key in all_keys():
        assert key.rpartition(".")[2] in text, key
    assert "# optimizer steps [>= 0]\nsteps = 9\n" in text
    assert "[agents.pro]\n# learning rate; train.lr when unset [> 0]\nlr = 0.5\n" in text
    assert "# clip_norm is unset" in text
    assert "[auto | nccl | gloo | shm | file]" in text


def test_every_setting_has_a_description() -> None:
    lines = describe_config(load_config(None, ["seats.a.agent=x", "agents.a.lr=1"])).splitlines()
    for before, line in pairwise(lines):
        if " = " in line and not line.startswith("#"):
            assert before.startswith("# "), line
            assert len(before) > 8, line


@pytest.mark.parametrize("kind", ["pipe", "device", "huge"])
def test_a_config_is_a_plain_file_of_bounded_size(tmp_path: Path, kind: str) -> None:
    path = Path("/dev/zero") if kind == "device" else tmp_path / "c.toml"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "huge":
        path.write_bytes(b"# " + b"x" * MAX_CONFIG_BYTES)
    says = "at most 1,048,576 are read" if kind == "huge" else "not a plain file"
    with pytest.raises(ConfigError, match=rf"cannot read config .*: .*{says}"):
        load_config(path)
