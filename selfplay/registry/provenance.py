"""Where an environment comes from, to the byte: distribution, version, and a hash of what decides the game.

The hash covers the module of the class, the modules of its own package that it imports (and they import), and the files
it declares as ``data_files``. The same content gives the same hash wherever it is installed. A game of another library
is hashed through that library's own record of its files.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from selfplay.environment import Environment
from selfplay.errors import UserError

HASH_CHARS = 12


def content_hash(kind: type[Environment]) -> str:
    """``sha256:`` and the first 12 digits over the environment's own files; raises `UserError` for a missing data file."""
    files: dict[str, Path] = {}
    for base in kind.__mro__:
        if issubclass(base, Environment) and base is not Environment and (source := _source_file(base)) is not None:
            _collect(source, _package_root(source, base.__module__), files)
    for owner, name in _data_files(kind):
        path = owner.parent / name
        if not path.is_file():
            raise UserError(f"{kind.__module__}: its data file {name!r} is not beside {owner.name}")
        files[path.name] = path
    return _digest({name: path.read_bytes() for name, path in files.items()})


def library_hash(distributions: Sequence[str], adapter: type[Environment]) -> str:
    """As `content_hash`, for a game of ``distributions`` seen through the module of ``adapter``."""
    parts = {"adapter": content_hash(adapter).encode()}
    for name in distributions:
        parts[f"version {name}"] = metadata.version(name).encode()
        record = next((f for f in metadata.files(name) or () if f.name == "RECORD"), None)
        if record is not None:
            # Compiled files come and go without the library having changed.
            lines = [line for line in str(record.read_text()).splitlines() if ".pyc" not in line]
            parts[f"record {name}"] = "\n".join(sorted(lines)).encode()
    return _digest(parts)


def _digest(parts: dict[str, bytes]) -> str:
    total = hashlib.sha256()
    for name in sorted(parts):
        total.update(f"{name}\0{hashlib.sha256(parts[name]).hexdigest()}\n".encode())
    return f"sha256:{total.hexdigest()[:HASH_CHARS]}"


def _source_file(kind: type) -> Path | None:
    try:
        return Path(inspect.getfile(kind))
    except (TypeError, OSError):
        return None


def _package_root(source: Path, module: str) -> Path:
    """The folder that holds the top-level package of ``module``; the file's own folder for a plain module."""
    depth = module.count(".") + (source.name == "__init__.py")
    return source.parents[depth] if "." in module else source.parent


def _collect(source: Path, root: Path, files: dict[str, Path]) -> None:
    """Add ``source`` and the modules of its package that it imports."""
    try:
        name = str(source.relative_to(root))
    except ValueError:
        name = source.name
    if name in files or not source.is_file():
        return
    files[name] = source
    package = Path(name).parts[0]
    if package == name:  # a plain module or file
        return
    for module in _imported(ast.parse(source.read_bytes()), Path(name)):
        if module[0] == package:
            folder = root.joinpath(*module)
            for path in (folder.with_suffix(".py"), folder / "__init__.py"):
                _collect(path, root, files)


def _imported(tree: ast.AST, name: Path) -> Iterator[tuple[str, ...]]:
    """Dotted names that may be modules, of every import in ``tree``; relative ones seen from the file ``name``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = name.parts[: len(name.parts) - node.level] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            yield base
            yield from ((*base, alias.name) for alias in node.names)


def _data_files(kind: type[Environment]) -> Iterator[tuple[Path, str]]:
    for base in kind.__mro__:
        source = _source_file(base) if "data_files" in vars(base) and base is not Environment else None
        if source is not None:
            yield from ((source, name) for name in vars(base)["data_files"])
