"""``selfplay env new``: a playable game to start from, as one file or as a package that is green at once."""

from __future__ import annotations

from pathlib import Path

import click

from selfplay.errors import UserError

GAME = '''"""{title}: count up to {{target}} in turn."""

import random

from selfplay import Environment


class {name}(Environment):
    """Count up in turn from 0, each time by 1, 2 or 3. Whoever says the target wins. Answer with one number.

    Rewards: 1 for the winner, -1 for the loser. An answer that is not one of the numbers allowed may be tried again once.
    """

    seats = ("first", "second")
    max_move_tokens = 8

    def __init__(self, rng: random.Random, target: int = 15) -> None:
        super().__init__(rng)
        self.target, self.said = target, [0]
        self.max_turns = target

    def rules(self, seat: str) -> str:
        return f"Count up in turn, each time by 1, 2 or 3. Whoever says {{self.target}} wins. Answer with one number."

    def to_move(self) -> list[str]:
        return [] if self.said[-1] == self.target else [self.seats[(len(self.said) - 1) % 2]]

    def view(self, seat: str) -> str:
        return f"The last number is {{self.said[-1]}}."

    def legal_moves(self, seat: str) -> list[str]:
        last = self.said[-1]
        return [str(n) for n in (last + 1, last + 2, last + 3) if n <= self.target]

    def step(self, moves: dict[str, str]) -> None:
        self.said += [int(move) for move in moves.values()]

    def outcome(self):
        return self.win(self.seats[len(self.said) % 2], reason=f"the target {{self.target}} was said")

    def transcript(self) -> str:
        return " ".join(str(n) for n in self.said)

    def private(self, seat: str) -> str:
        return ""  # what only this seat knows; here nothing is hidden
'''.replace("{{target}}", "a target")

TEST = '''"""The game is sound: `selfplay env check` finds no fault, and its rules give what they should."""

from pathlib import Path

from selfplay import check_environment, make_environment

GAME = str(Path(__file__).parents[1] / "{package}" / "game.py")


def test_the_environment_is_sound() -> None:
    assert [check.text for check in check_environment(GAME).faults] == []


def test_who_says_the_target_wins() -> None:
    game = make_environment(GAME, {{"target": 4}}, seed=0)
    game.step({{"first": "1"}})
    game.step({{"second": "4"}})
    assert list(game.to_move()) == []
    assert game.outcome().winners == ("second",)
'''

PYPROJECT = """[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "{distribution}"
version = "0.1.0"
description = "{title}: an environment for selfplay."
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["selfplay"]

[project.entry-points."selfplay.environments"]
"{env_id}" = "{package}.game:{name}"

[tool.hatch.build.targets.wheel]
packages = ["{package}"]

[tool.pytest.ini_options]
testpaths = ["tests"]
"""

README = """# {title}

An environment for selfplay, found under the id `{env_id}` once it is installed.

```bash
pip install -e .                                    # or, without installing:  selfplay play {package}/game.py
selfplay play {env_id} --players random,human
selfplay env check {env_id}
pytest
selfplay env publish . --hub ~/selfplay-hub         # a wheel in a folder that others install from
```

Change the rules in `{package}/game.py`. A change that makes old games play out differently is a new version: add an entry
`{versionless}-v1` in `pyproject.toml` and leave `{env_id}` as it was.
"""


@click.command("new")
@click.argument("name", required=False)
@click.option("--file", "file", default=None, metavar="FILE.py", help="Make one file instead of a package.")
def command(name: str | None, file: str | None) -> None:
    """Make a new environment: a package in the folder NAME (owner/name gives it an owner), or one file.

    What is made can be played, checked and trained on at once.
    """
    if (name is None) == (file is None):
        raise UserError("give a name for a package (my-game or owner/my-game), or --file FILE.py for one file")
    if file is not None:
        path = _new_path(Path(file))
        if path.suffix != ".py":
            raise UserError(f"{file!r} does not end in .py: an environment of one file is a Python file")
        _write({path: GAME.format(title=_title(path.stem), name=_class_name(path.stem))})
        click.echo(f"selfplay play {file} --players random,human")
        return
    _package(str(name))


def _package(name: str) -> None:
    from selfplay.registry.ids import check_id, split_version

    env_id = check_id(name if split_version(name) else f"{name}-v0")
    versioned = split_version(env_id)
    if versioned is None or ":" in env_id:
        raise UserError(f"{name!r} cannot be an id: letters, digits, '_' and '-', as my-game or owner/my-game")
    owner, _, bare = versioned[0].rpartition("/")
    package = bare.replace("-", "_").lower()
    if not package.isidentifier():
        raise UserError(f"{name!r} gives no package name: begin with a letter")
    folder = _new_path(Path(bare))
    words = {
        "title": _title(bare), "name": _class_name(bare), "package": package, "env_id": env_id, "versionless": versioned[0],
        "distribution": "-".join(part for part in (owner, bare) if part).lower(),
    }  # fmt: skip
    _write(
        {
            folder / package / "__init__.py": f'"""{words["title"]}, an environment for selfplay."""\n',
            folder / package / "game.py": GAME.format(**words),
            folder / "tests" / f"test_{package}.py": TEST.format(**words),
            folder / "pyproject.toml": PYPROJECT.format(**words),
            folder / "README.md": README.format(**words),
        }
    )
    click.echo(f"made {folder}: try  selfplay play {folder}/{package}/game.py --players random,human")


def _new_path(path: Path) -> Path:
    if path.exists():
        raise UserError(f"{path} exists already; nothing was changed")
    return path


def _write(files: dict[Path, str]) -> None:
    for path, text in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        except OSError as e:
            raise UserError(f"{path} cannot be written: {e.strerror}") from None


def _title(name: str) -> str:
    return name.replace("-", " ").replace("_", " ").strip().capitalize() or "A game"


def _class_name(name: str) -> str:
    found = "".join(part.capitalize() for part in name.replace("-", "_").split("_"))
    return found if found.isidentifier() else "Game"
