"""``selfplay env publish`` and ``install``: environments as wheels in a hub folder. Nothing is fetched or installed unasked."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from selfplay.errors import RunError, UserError

if TYPE_CHECKING:
    from selfplay.registry.hub import PublishedEnvironment

HUB_VARIABLE = "SELFPLAY_HUB"
hub_option = click.option("--hub", default=None, metavar="FOLDER", help=f"The hub folder.  [default: ${HUB_VARIABLE}]")


@click.command("publish")
@click.argument("package", default=".", metavar="[FOLDER]")
@hub_option
def publish(package: str, hub: str | None) -> None:
    """Build a wheel of the package in FOLDER, check every environment in it, and put it into a hub folder.

    A wheel with an environment that `env check` finds a fault in is refused. To hand the wheel to another index, use that
    index's client on the file that is named at the end.
    """
    from selfplay.registry.hub import Published, add_wheel, normalised, sha256_of

    folder = hub_folder(hub)
    with tempfile.TemporaryDirectory() as work:
        wheel = _built(Path(package), Path(work))
        name, version, ids = _contents(wheel)
        unpacked = Path(work) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        checked = tuple(_checked(env_id, unpacked) for env_id in ids)
        entry = Published(
            project=normalised(name), version=version, wheel=wheel.name, sha256=sha256_of(wheel), environments=checked
        )
        target = add_wheel(folder, wheel, entry)
    click.echo(f"published {', '.join(e.id for e in checked)} as {name} {version}: {target}")


@click.command("install")
@click.argument("environment", metavar="NAME[==VERSION]")
@hub_option
def install(environment: str, hub: str | None) -> None:
    """Install an environment from a hub folder into this Python environment, by id or project name.

    \b
    selfplay env install alice/count-up==0.1.0 --hub ~/selfplay-hub
    """
    from selfplay.registry.hub import find_published, sha256_of

    folder = hub_folder(hub)
    entry = find_published(folder, environment)
    wheel = folder / entry.project / entry.wheel
    if sha256_of(wheel) != entry.sha256:
        raise UserError(f"{wheel} is not what was published (its SHA-256 differs): nothing was installed")
    _pip(["install", "--no-input", str(wheel)], f"{entry.project} {entry.version} was not installed")
    click.echo(f"installed {', '.join(e.id for e in entry.environments)} from {entry.project} {entry.version}")


def hub_folder(given: str | None) -> Path:
    """The hub: as given, or from the environment variable; raises `UserError` when neither names one."""
    name = given or os.environ.get(HUB_VARIABLE)
    if not name:
        raise UserError(f"which hub? give --hub FOLDER or set {HUB_VARIABLE}")
    return Path(name).expanduser().resolve()


def _built(package: Path, work: Path) -> Path:
    if not (package / "pyproject.toml").is_file():
        raise UserError(f"{package} has no pyproject.toml: make a package with  selfplay env new NAME")
    _pip(["wheel", "--no-deps", "--no-input", "-w", str(work), str(package.resolve())], f"{package} could not be built")
    (wheel,) = work.glob("*.whl")
    return wheel


def _contents(wheel: Path) -> tuple[str, str, tuple[str, ...]]:
    """(project, version, environment ids) of a wheel; raises `UserError` for one without environments."""
    with zipfile.ZipFile(wheel) as archive:
        info = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        about = HeaderParser().parsestr(archive.read(info).decode())
        points_name = info.replace("METADATA", "entry_points.txt")
        text = archive.read(points_name).decode() if points_name in archive.namelist() else ""
    points = metadata.EntryPoints._from_text(text)  # type: ignore[attr-defined]  # as the library itself reads it
    ids = tuple(sorted(p.name for p in points if p.group == "selfplay.environments"))
    if not ids:
        raise UserError(f"{wheel.name} offers no environment: it has no entry point of group selfplay.environments")
    return about["Name"], about["Version"], ids


def _checked(env_id: str, unpacked: Path) -> PublishedEnvironment:
    """Check and describe an environment of the unpacked wheel, in a process that finds it there."""
    from selfplay.check import Report
    from selfplay.registry.hub import PublishedEnvironment
    from selfplay.registry.spec import EnvironmentSpec

    click.echo(f"checking {env_id}", err=True)
    path = os.pathsep.join([str(unpacked), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environ = {**os.environ, "PYTHONPATH": path}
    answers = []
    for command in (["check", env_id, "--json"], ["info", env_id, "--json"]):
        full = [sys.executable, "-m", "selfplay.cli.main", "env", *command]
        done = subprocess.run(full, env=environ, capture_output=True, check=False)
        if not done.stdout:
            raise RunError(f"{env_id} cannot be published: {done.stderr.decode('utf-8', 'replace').strip()[-300:]}")
        answers.append(done.stdout)
    report = msgspec.json.decode(answers[0], type=Report)
    spec = msgspec.json.decode(answers[1], type=EnvironmentSpec)
    if report.faults:
        raise RunError(f"{env_id} is not published: {report.faults[0].name}: {report.faults[0].text}")
    return PublishedEnvironment(
        id=spec.id, source=spec.source, seats=spec.seats, doc=spec.doc, checks={c.name: c.status for c in report.checks}
    )


def _pip(arguments: list[str], failure: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = [line for line in done.stderr.strip().splitlines() if "ERROR" in line][-1:] or [
            done.stderr.strip()[-300:]
        ]
        raise RunError(f"{failure}: {last[0]}")
