"""``selfplay runs``: lists, shows and exports runs that finished, that go on, and that were killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from episode_samples import encode, episode, turn
from selfplay.cli.main import main
from selfplay.config.schema import Config
from selfplay.store.checkpoints import Checkpoints
from selfplay.store.episode_log import EpisodeLog
from selfplay.store.manifest import new_manifest
from selfplay.store.metrics import MetricsLog
from selfplay.store.run_folder import RunFolder
from selfplay.store.state import RunState

CONFIG = Config(env="kuhn-poker-v0", model="tiny")
NASTY = "\x1b[2J\rfake line\u202e <script> \ud7ff"


def make_run(runs_dir: Path, name: str, status: str = "finished", reason: str = "") -> RunFolder:
    with RunFolder.create(runs_dir, name, CONFIG, new_manifest(CONFIG, name=name, env_source="selfplay 0")) as run:
        with EpisodeLog.open(run.episodes, write=True, say=print) as log:
            spoken = msgspec.structs.replace(turn("pro", (1,), (2,)), text=NASTY)
            log.append_many([encode(episode(0)), encode(episode(1, turns=(spoken,)))])
        with Checkpoints(run.checkpoints, keep=1, say=print).writing(RunState(step=2, versions={"pro": 2, "con": 1})):
            pass
        with MetricsLog.open(run.metrics_path, None, say=print) as metrics:
            metrics.write(
                3,
                {
                    "accounting/started": 4,
                    "accounting/stored": 2,
                    "agents/pro/version": 3,
                    "agents/pro/train/kl": float("nan"),
                },
            )
        run.update_manifest(status=status, reason=reason)
    return run


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(list(arguments)) == 0
    return json.loads(capsys.readouterr().out)


def test_runs_are_listed_with_their_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, "one")
    make_run(tmp_path, "two", status="running")
    found = run_json(capsys, "runs", "list", "--runs-dir", str(tmp_path), "--json")["runs"]
    assert [(r["run"], r["status"], r["step"], r["environment"]) for r in found] == [
        ("one", "finished", 3, "kuhn-poker-v0"), ("two", "killed", 3, "kuhn-poker-v0"),
    ]  # fmt: skip
    assert main(["runs", "list", "--runs-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "one" in out
    assert "killed" in out


def test_no_runs_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_json(capsys, "runs", "list", "--runs-dir", str(tmp_path / "absent"), "--json") == {"runs": []}
    assert main(["runs", "list", "--runs-dir", str(tmp_path)]) == 0
    assert "no runs" in capsys.readouterr().out


def test_a_run_is_shown_by_name_and_by_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, "one", status="failed", reason="the engine died")
    by_name = run_json(capsys, "runs", "show", "one", "--runs-dir", str(tmp_path), "--json")
    by_path = run_json(capsys, "runs", "show", str(run.path), "--json")
    assert by_name == by_path
    assert (by_name["status"], by_name["reason"], by_name["step"], by_name["checkpoint_step"]) == (
        "failed",
        "the engine died",
        3,
        2,
    )
    assert by_name["versions"] == {"pro": 3, "con": 1}
    assert by_name["accounting"] == {"started": 4, "stored": 2}
    assert by_name["metrics"]["agents/pro/train/kl"] is None
    assert by_name["episodes_on_disk"] == 2
    assert by_name["paths"]["adapters"] == str(run.adapters)


def test_a_run_is_shown_to_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, "one", reason="done \x1b[31m")
    assert main(["runs", "show", "one", "--runs-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert r"one: finished (done \x1b[31m)" in out
    assert "\x1b" not in out
    for word in ("versions", "accounting", "started", "paths", "adapters"):
        assert word in out


def test_a_run_that_has_not_begun_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunFolder.create(tmp_path, "new", CONFIG, new_manifest(CONFIG, name="new", env_source="x")).close()
    shown = run_json(capsys, "runs", "show", "new", "--runs-dir", str(tmp_path), "--json")
    assert (shown["status"], shown["step"], shown["checkpoint_step"], shown["episodes_on_disk"]) == (
        "killed",
        0,
        None,
        0,
    )


def test_showing_changes_nothing_on_disk(tmp_path: Path) -> None:
    run = make_run(tmp_path, "one")
    log = next(run.episodes.glob("*.log"))
    with log.open("ab") as f:
        f.write(b"torn")
    (run.checkpoints / ".tmp-9-abcd").mkdir()
    before = {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()}
    assert main(["runs", "show", "one", "--runs-dir", str(tmp_path)]) == 0
    assert main(["runs", "export", "one", "--runs-dir", str(tmp_path)]) == 0
    assert {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()} == before
    assert (run.checkpoints / ".tmp-9-abcd").is_dir()


def test_episodes_are_exported_as_safe_json_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, "one")
    assert main(["runs", "export", "one", "--runs-dir", str(tmp_path), "--format", "jsonl"]) == 0
    out = capsys.readouterr().out
    assert not set(out) & {"\x1b", "\r", "\u202e"}
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["seq"] for line in lines] == [0, 1]
    assert lines[1]["episode"]["turns"][0]["text"] == NASTY
    assert lines[0]["episode"]["rewards"] == {"pro": 1.0, "con": -1.0}


def test_export_to_a_file_and_from_a_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, "one")
    out = tmp_path / "out.jsonl"
    assert main(["runs", "export", "one", "--runs-dir", str(tmp_path), "--out", str(out), "--from", "1"]) == 0
    assert [json.loads(line)["seq"] for line in out.read_text("utf-8").splitlines()] == [1]
    assert capsys.readouterr().out == ""
    assert main(["runs", "export", "one", "--runs-dir", str(tmp_path), "--from", "99"]) == 0


def test_export_as_parquet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from pyarrow import parquet

    make_run(tmp_path, "one")
    out = tmp_path / "games.parquet"
    words = ["runs", "export", "one", "--runs-dir", str(tmp_path), "--format", "parquet"]
    assert main([*words, "--out", str(out)]) == 0
    rows = parquet.read_table(out).to_pylist()
    assert [row["seq"] for row in rows] == [0, 1]
    assert json.loads(rows[0]["rewards"]) == {"pro": 1.0, "con": -1.0}
    assert json.loads(rows[1]["episode"])["turns"][0]["text"] == NASTY
    assert main(words) == 2
    assert "name a file with --out" in capsys.readouterr().err
    assert main([*words, "--out", str(tmp_path / "absent" / "x.parquet")]) == 1
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["onn", "../../x", "a\0b", "x" * 5000, "\x1b[31m", "absent/run"])
@pytest.mark.parametrize("what", ["show", "export"])
def test_a_run_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str, name: str
) -> None:
    make_run(tmp_path, "one")
    assert main(["runs", what, name, "--runs-dir", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("selfplay: there is no run ")
    assert err.count("\n") == 1
    assert "\x1b" not in err
    if name == "onn":
        assert "did you mean 'one'" in err


def test_an_unwritable_export_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, "one")
    assert (
        main(["runs", "export", "one", "--runs-dir", str(tmp_path), "--out", str(tmp_path / "absent" / "x.jsonl")]) == 1
    )
    assert "No such file" in capsys.readouterr().err


def test_damage_is_named_and_the_other_runs_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, "one")
    broken = make_run(tmp_path, "two")
    broken.manifest_path.write_text("{")
    assert main(["runs", "list", "--runs-dir", str(tmp_path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert [r["run"] for r in json.loads(out)["runs"]] == ["one"]
    assert "two/manifest.json is damaged" in err
    log = next((tmp_path / "one" / "episodes").glob("*.log"))
    raw = bytearray(log.read_bytes())
    raw[30] ^= 1
    log.write_bytes(raw)
    assert main(["runs", "export", "one", "--runs-dir", str(tmp_path)]) == 1
    assert "is damaged at offset 8" in capsys.readouterr().err
