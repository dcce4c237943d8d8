"""Run folders: names, layout, one owner, a manifest that tells the truth, and disks that refuse."""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from selfplay.config import load_config
from selfplay.config.schema import Config
from selfplay.errors import ConfigError, StoreError, UserError
from selfplay.store import run_folder as module
from selfplay.store.manifest import library_versions, machine, new_manifest
from selfplay.store.run_folder import RunFolder, check_run_name, default_run_name, list_runs

CONFIG = Config(env="kuhn-poker-v0", model="tiny", seed=7)


def create(runs_dir: str | Path, name: str = "first") -> RunFolder:
    return RunFolder.create(runs_dir, name, CONFIG, new_manifest(CONFIG, name=name, env_source="selfplay 0"))


def test_the_layout(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        assert {p.name for p in run.path.iterdir()} == {
            "config.toml",
            "manifest.json",
            "episodes",
            "adapters",
            "checkpoints",
            "logs",
            ".lock",
        }
        assert (run.metrics_path.name, run.league_path.name, run.tensorboard.name) == (
            "metrics.jsonl",
            "league.sqlite",
            "tensorboard",
        )
        assert run.config() == CONFIG
        assert load_config(run.config_path) == CONFIG


def test_the_manifest_says_what_ran(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        run.update_manifest(model_digest="abc", engine="vllm 0.32")
        raw = json.loads(run.manifest_path.read_text("utf-8"))
    assert (raw["env"], raw["model"], raw["seed"], raw["model_digest"]) == ("kuhn-poker-v0", "tiny", 7, "abc")
    assert raw["libraries"]["msgspec"] == library_versions(("msgspec",))["msgspec"]
    assert raw["hardware"]["cpus"] >= 1
    assert raw["status"] == "running"
    assert datetime.datetime.fromisoformat(raw["created"]).utcoffset() == datetime.timedelta(0)


def test_no_environment_variable_gets_into_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFPLAY_API_KEY", "sk-canary-4711")
    with create(tmp_path) as run:
        assert not any(b"canary-4711" in p.read_bytes() for p in run.path.rglob("*") if p.is_file())


def test_libraries_that_are_not_installed_are_left_out() -> None:
    assert library_versions(("no-such-distribution",)) == {}
    assert {"system", "cpus", "memory_mb"} <= set(machine())


@pytest.mark.parametrize("runs_dir", ["runs with spaces", "läufe", "deep/er/still"])
def test_any_place_for_runs(tmp_path: Path, runs_dir: str) -> None:
    with create(tmp_path / runs_dir) as run:
        assert RunFolder.open(run.path).manifest().name == "first"


@pytest.mark.parametrize("name", ["first", "A.b-c_9", "x" * 100, "2026"])
def test_good_names(name: str) -> None:
    assert check_run_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../../x",
        "/abs",
        "a/b",
        "a\\b",
        "a\0b",
        "a\nb",
        "x" * 300,
        "débat",
        "раn",
        "CON",
        "nul.txt",
        ".hidden",
        "-rf",
        "a b",
        "end.",
        "$(id)",
    ],
)
def test_bad_names_are_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is not allowed") as e:
        create(tmp_path, name)
    assert "\n" not in str(e.value)
    assert len(str(e.value)) < 300
    assert list(tmp_path.iterdir()) == []


def test_a_taken_name_is_refused_and_left_alone(tmp_path: Path) -> None:
    create(tmp_path).close()
    with pytest.raises(ConfigError, match=r"'first' exists .* selfplay resume"):
        create(tmp_path)
    assert RunFolder.open(tmp_path / "first").config() == CONFIG


def test_default_names(tmp_path: Path) -> None:
    now = datetime.datetime(2026, 1, 2, 3, 4, 5)
    assert default_run_name(tmp_path, "kuhn-poker-v0", now) == "kuhn-poker-v0-20260102-030405"
    (tmp_path / "kuhn-poker-v0-20260102-030405").mkdir()
    assert default_run_name(tmp_path, "kuhn-poker-v0", now) == "kuhn-poker-v0-20260102-030405-2"
    for env in ("pettingzoo:tictactoe_v3", "/some/where/nim.py", "日本", "x" * 300, "../.."):
        check_run_name(default_run_name(tmp_path, env, now))


# ── one owner ────────────────────────────────────────────────────────────────────────────────────

HOLD = """
import sys
from selfplay.store.run_folder import RunFolder
run = RunFolder.own(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_controller_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    create(tmp_path).close()
    path = tmp_path / "first"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)},
    )  # fmt: skip
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match=f"is in use by process {holder.pid}"):
            RunFolder.own(path)
        assert RunFolder.open(path).is_owned()
        assert RunFolder.open(path).status() == ("running", "")
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert RunFolder.open(path).status()[0] == "killed"
    RunFolder.own(path).close()


def test_the_lock_holds_within_one_process_too(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        assert run.is_owned()
        with pytest.raises(UserError, match="in use"):
            RunFolder.own(run.path)
    run.close()
    RunFolder.own(run.path).close()


def test_children_do_not_inherit_the_lock(tmp_path: Path) -> None:
    run = create(tmp_path)
    child = subprocess.Popen(
        [sys.executable, "-c", "print(1, flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        close_fds=False,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"1\n"
        run.close()
        assert not run.is_owned()
        child.kill()


def test_owning_removes_what_a_killed_writer_left(tmp_path: Path) -> None:
    create(tmp_path).close()
    (tmp_path / "first" / ".tmp-manifest.json-abcd").write_text("{")
    with RunFolder.own(tmp_path / "first") as run:
        assert not list(run.path.glob(".tmp-*"))


@pytest.mark.parametrize("status", ["finished", "interrupted", "failed"])
def test_how_it_ended(tmp_path: Path, status: str) -> None:
    with create(tmp_path) as run:
        run.update_manifest(status=status, reason="because")
    assert RunFolder.open(run.path).status() == (status, "because")


# ── disks and damage ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("content", ["", "{", '{"schema": 1}', "[]", '{"status": "odd"}', "\xff"])
def test_a_damaged_manifest_is_named(tmp_path: Path, content: str) -> None:
    create(tmp_path).close()
    (tmp_path / "first" / "manifest.json").write_text(content, "latin-1")
    with pytest.raises(StoreError, match=r"manifest\.json is damaged"):
        RunFolder.open(tmp_path / "first").manifest()
    said: list[str] = []
    assert list_runs(tmp_path, said.append) == []
    assert len(said) == 1


def test_a_manifest_of_a_newer_layout_is_refused(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        run.update_manifest(schema=99)
        with pytest.raises(StoreError, match="layout 99"):
            run.manifest()


@pytest.mark.parametrize("path", ["absent", "."])
def test_what_is_no_run(tmp_path: Path, path: str) -> None:
    with pytest.raises(UserError, match="is not a run"):
        RunFolder.open(tmp_path / path)


def test_an_unwritable_place_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file") as e:
        create(tmp_path / "file" / "runs")
    assert "\n" not in str(e.value)


def test_a_full_disk_is_one_line_and_leaves_the_name_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise StoreError(f"cannot write or read {args[0]}: No space left on device")

    monkeypatch.setattr(module, "write_bytes", full)
    with pytest.raises(StoreError, match=r"config\.toml: No space left on device"):
        create(tmp_path)
    monkeypatch.undo()
    create(tmp_path).close()


def test_runs_are_listed_oldest_first(tmp_path: Path) -> None:
    for name in ("zebra", "apple", "mango"):
        create(tmp_path, name).close()
    (tmp_path / "not-a-run").mkdir()
    assert [r.name for r in list_runs(tmp_path, print)] == ["zebra", "apple", "mango"]
    assert list_runs(tmp_path / "absent", print) == []


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "episodes/000000000000.log", "logs", "adapters/pro"])
@pytest.mark.parametrize("kind", ["file", "folder", "nothing"])
def test_a_run_is_not_resumed_through_links(tmp_path: Path, name: str, kind: str) -> None:
    create(tmp_path).close()
    target = tmp_path / "elsewhere"
    if kind == "file":
        target.write_text("precious")
    elif kind == "folder":
        target.mkdir()
    link = tmp_path / "first" / name
    if link.is_dir():
        link.rmdir()
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    with pytest.raises(UserError, match="is a link or not a plain file"):
        RunFolder.own(tmp_path / "first")
    assert (target.read_text() if kind == "file" else target.exists()) == {
        "file": "precious",
        "folder": True,
        "nothing": False,
    }[kind]


def test_the_first_config_is_kept_whatever_config_toml_says_later(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        run.config_path.write_text('env = "nim-v0"\nseed = 9\n')
        assert run.config().seed == 9
        assert run.first_config() == CONFIG
