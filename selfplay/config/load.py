"""Config from a TOML file and ``dotted.key=value`` overrides: one clear line for every mistake."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import msgspec

from selfplay.config.schema import Config
from selfplay.errors import ConfigError, suggestion

Tree = dict[str, Any]


def load_config(path: str | Path | None, overrides: Sequence[str] = (), defaults: Mapping[str, Any] | None = None) -> Config:
    """The effective config: ``defaults``, then the TOML file, then overrides, each winning over the one before.

    Raises `ConfigError` with the dotted key and the nearest known key or the expected type.
    """
    tree: Tree = {}
    _merge(tree, dict(defaults or {}))
    if path is not None:
        _merge(tree, _read_toml(Path(path)))
    for text in overrides:
        key, value = parse_override(text)
        _set(tree, key, value)
    return config_from_tree(tree)


def config_from_tree(tree: Tree) -> Config:
    """A typed config from nested tables; raises `ConfigError`."""
    _check_keys(tree, Config, "")
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as e:
        message, _, where = str(e).partition(" - at ")
        key = where.strip("`").removeprefix("$.") or "config"
        raise ConfigError(f"{key}: {message[:1].lower()}{message[1:]}") from None


def parse_override(text: str) -> tuple[str, Any]:
    """``a.b=value`` → (``a.b``, value). The value is TOML; what is not TOML is taken as a plain string."""
    key, sep, raw = text.partition("=")
    key = key.strip()
    if not sep or not key:
        raise ConfigError(f"{text!r} is not key=value")
    if "\n" in raw or "\r" in raw:
        raise ConfigError(f"{key}: a value may not contain a line break")
    try:
        return key, tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return key, raw.strip()


def dump_toml(config: Config) -> str:
    """The config as TOML that `load_config` reads back to an equal config."""
    return "\n".join(_toml_lines(msgspec.to_builtins(config), ())).strip() + "\n"


def _read_toml(path: Path) -> Tree:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as e:
        raise ConfigError(f"cannot read config {path}: {e.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} is not TOML: {e}") from None


def _merge(into: Tree, other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value


def _set(tree: Tree, dotted: str, value: Any) -> None:
    *path, last = dotted.split(".")
    for part in path:
        nested = tree.setdefault(part, {})
        if not isinstance(nested, dict):
            raise ConfigError(f"{dotted}: {part!r} is a value, not a section")
        tree = nested
    if isinstance(value, dict) and isinstance(tree.get(last), dict):
        _merge(tree[last], value)
    else:
        tree[last] = value


def _check_keys(tree: Tree, kind: type[msgspec.Struct], prefix: str) -> None:
    hints = get_type_hints(kind)
    for key, value in tree.items():
        if key not in hints:
            raise ConfigError(f"unknown key {prefix + key!r}{_near(prefix + key, key)}")
        section = _section_type(hints[key])
        if section is None or not isinstance(value, dict):
            continue
        if get_origin(hints[key]) is dict:
            for name, nested in value.items():
                if isinstance(nested, dict):
                    _check_keys(nested, section, f"{prefix}{key}.{name}.")
        else:
            _check_keys(value, section, f"{prefix}{key}.")


def _section_type(hint: Any) -> type[msgspec.Struct] | None:
    args = getattr(hint, "__args__", ())
    candidate = args[-1] if get_origin(hint) is dict else hint
    return candidate if isinstance(candidate, type) and issubclass(candidate, msgspec.Struct) else None


def _near(dotted: str, key: str) -> str:
    """Nearest full key, preferring the same last part in another section."""
    known = list(all_keys())
    elsewhere = [k for k in known if k.rpartition(".")[2] == key.replace("-", "_")]
    if elsewhere:
        return "; did you mean " + " or ".join(repr(k) for k in elsewhere[:3]) + "?"
    return suggestion(dotted.replace("-", "_"), known)


def all_keys(kind: type[msgspec.Struct] = Config, prefix: str = "") -> Iterable[str]:
    """Every dotted key of the schema."""
    for key, hint in get_type_hints(kind).items():
        section = _section_type(hint)
        if section is None or get_origin(hint) is dict:
            yield prefix + key
        else:
            yield from all_keys(section, f"{prefix}{key}.")


def _toml_lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterable[str]:
    if path:
        yield f"[{'.'.join(_toml_key(p) for p in path)}]"
    for key, value in table.items():
        if not isinstance(value, Mapping) and value is not None:
            yield f"{_toml_key(key)} = {_toml_value(value)}"
    yield ""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _toml_lines(value, (*path, key))


def _toml_key(key: str) -> str:
    return key if key.isascii() and key.replace("-", "_").isidentifier() else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    return msgspec.json.encode(value).decode()
