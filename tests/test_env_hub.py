"""Publishing to a hub folder and reading it; replaying old episodes, or why not."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import pytest

from selfplay.cli import env_hub_cmd
from selfplay.cli.main import main
from selfplay.registry.hub import Published, PublishedEnvironment, find_published, published, read_hub

GAME = Path(__file__).with_name("sticks.py").read_text("utf-8")
PUBLISHED = PublishedEnvironment(
    id="alice/sticks-v0", source="alice-sticks 1 sha256:0", seats=("a", "b"), doc="", checks={}
)


def wheel_of(folder: Path, version: str, source: str = GAME) -> Path:
    """A wheel as a build backend would leave it."""
    path = folder / f"alice_sticks-{version}-py3-none-any.whl"
    info = f"alice_sticks-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("alice_sticks.py", source)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: alice-sticks\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/entry_points.txt", "[selfplay.environments]\nalice/sticks-v0 = alice_sticks:Nim\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a wheel of `build(version, source)` is published to."""
    monkeypatch.setenv("SELFPLAY_HUB", str(tmp_path / "hub"))
    return tmp_path / "hub"


def publish(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, source: str = GAME) -> int:
    monkeypatch.setattr(env_hub_cmd, "_built", lambda package, work: wheel_of(tmp_path, version, source))
    return main(["env", "publish", "."])


def test_a_sound_wheel_is_published_listed_and_installable(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert publish(monkeypatch, tmp_path, "1.2") == 0
    assert main(["env", "list", "--hub", str(hub)]) == 0
    assert "alice/sticks-v0  alice-sticks 1.2 sha256:" in capsys.readouterr().out
    assert main(["env", "info", "alice/sticks", "--hub", str(hub)]) == 0
    shown = capsys.readouterr().out
    assert "alice-sticks 1.2  (versions: 1.2)" in shown
    assert "seats       first, second" in shown
    assert "hidden ok" in shown
    (entry,) = published(hub)
    assert entry.environments[0].seats == ("first", "second")
    assert "fault" not in entry.environments[0].checks.values()
    # The folder is an index for the ordinary client.
    target = tmp_path / "installed"
    command = [
        sys.executable, "-m", "pip", "-q", "--isolated", "--disable-pip-version-check", "install", "--no-deps",
        "--target", str(target), "--index-url", hub.as_uri(), "alice-sticks==1.2",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (target / "alice_sticks.py").is_file(), done.stderr
    with zipfile.ZipFile(hub / "alice-sticks" / entry.wheel) as archive:
        assert archive.read("alice_sticks.py").decode() == GAME


def test_a_faulty_wheel_is_refused(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = GAME.replace("self.turn += 1", "raise ValueError('bad card 53')")
    assert publish(monkeypatch, tmp_path, "1.3", bad) == 1
    assert "alice/sticks-v0 is not published: games: raises ValueError: bad card 53" in capsys.readouterr().err
    assert not hub.exists()


def test_a_version_never_changes_and_names_are_found(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(env_hub_cmd, "_checked", lambda env_id, unpacked: PUBLISHED)
    assert publish(monkeypatch, tmp_path, "1.9") == 0
    assert publish(monkeypatch, tmp_path, "1.10") == 0
    assert publish(monkeypatch, tmp_path, "1.10", GAME + "\n") == 2
    assert "a published version never changes, raise the version" in capsys.readouterr().err
    assert find_published(hub, "alice/sticks").version == "1.10"
    assert find_published(hub, "alice-sticks==1.9").version == "1.9"
    for wanted, message in (("alice/sticks==7", "1.9, 1.10, not 7"), ("alice/stick", "did you mean 'alice/sticks-v0'")):
        assert main(["env", "install", wanted]) == 2
        assert message in capsys.readouterr().err


def entry_of(hub: Path, project: str = "alice-sticks", /, **changes: object) -> Path:
    """What a hub would hold beside a wheel, with some of it changed; the path of the entry."""
    wheel = f"{project.replace('-', '_')}-1.0-py3-none-any.whl"
    good = Published(project=project, version="1.0", wheel=wheel, sha256="0" * 64, environments=(PUBLISHED,))
    path = hub / project / f"{wheel}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(good, **changes)))
    return path


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"wheel": "../../elsewhere-1.0-py3-none-any.whl"}, "not of the wheel beside it"),
        ({"wheel": "/etc/passwd"}, "not of the wheel beside it"),
        ({"project": "../elsewhere"}, "not of the wheel beside it"),
        ({"version": "1.0\x1b[31m"}, r"text that cannot be shown: '1.0\x1b[31m'"),
        ({"environments": (msgspec.structs.replace(PUBLISHED, id="../../x"),)}, "'../../x' is not an environment id"),
        ({"environments": (msgspec.structs.replace(PUBLISHED, source=" "),)}, "does not say where"),
    ],
)
def test_an_entry_that_leads_elsewhere_is_a_broken_line_and_hides_no_other(
    changes: dict[str, object], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = tmp_path / "hub"
    entry_of(hub, "bad-sticks", **changes)
    entry_of(hub)
    assert main(["env", "list", "--hub", str(hub)]) == 0
    broken, sound = capsys.readouterr().out.splitlines()
    assert "bad-sticks/bad_sticks-1.0-py3-none-any.whl.json" in broken
    assert says in broken
    assert sound.startswith("alice/sticks-v0 ")
    assert find_published(hub, "alice/sticks").project == "alice-sticks"


def test_entries_that_are_none_and_wheels_that_are_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub = tmp_path / "hub"
    entry_of(hub, "cut").write_bytes(b'{"project": "cu')
    entry_of(hub, "huge").write_bytes(b" " * (5 << 20))
    assert set(read_hub(hub).broken) == {f"{p}/{p}-1.0-py3-none-any.whl.json" for p in ("cut", "huge")}
    entry_of(hub)
    assert main(["env", "install", "alice/sticks", "--hub", str(hub)]) == 2
    assert "alice_sticks-1.0-py3-none-any.whl cannot be read: No such file" in capsys.readouterr().err


def test_one_id_of_two_projects_names_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry_of(tmp_path)
    entry_of(tmp_path, "bobs-sticks")
    assert main(["env", "install", "alice/sticks", "--hub", str(tmp_path)]) == 2
    assert "'alice/sticks' is offered by alice-sticks and bobs-sticks" in capsys.readouterr().err
    assert find_published(tmp_path, "bobs-sticks").project == "bobs-sticks"


def test_no_hub_and_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SELFPLAY_HUB", raising=False)
    assert main(["env", "publish", str(tmp_path)]) == 2
    assert "which hub? give --hub FOLDER or set SELFPLAY_HUB" in capsys.readouterr().err
    assert main(["env", "publish", str(tmp_path), "--hub", str(tmp_path / "hub")]) == 2
    assert "has no pyproject.toml" in capsys.readouterr().err
    assert main(["env", "list", "--hub", str(tmp_path / "nowhere")]) == 2


def test_episodes_are_replayed_or_it_is_said_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["play", "kuhn-poker-v0", "--games", "3", "--json"]) == 0
    recorded = json.loads(capsys.readouterr().out)
    path = tmp_path / "games.json"
    path.write_text(json.dumps(recorded), "utf-8")
    assert main(["env", "replay", str(path)]) == 0
    assert capsys.readouterr().out.count("replayed, the same result") == 3
    recorded["episodes"][0]["env_source"] = "selfplay 0.0.1 sha256:000000000000"
    recorded["episodes"][1]["rewards"] = {"player_0": 0.5, "player_1": -0.5}
    path.write_text(json.dumps(recorded), "utf-8")
    assert main(["env", "replay", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "not replayed: it was played with selfplay 0.0.1 sha256:000000000000, installed is selfplay " in lines[0]
    assert "differs: rewards are" in lines[1]
    path.write_text("{}", "utf-8")
    assert main(["env", "replay", str(path)]) == 2
