"""Reading a config from TOML and ``key=value`` overrides: one clear line for every mistake.

In: nested tables from defaults, a file and the command line, each winning over the one before. Out: a typed `Config`,
or a `ConfigError` that names the dotted key and the nearest known key or what was expected.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from selfplay.config.plain_file import read_plain
from selfplay.config.schema import Config
from selfplay.errors import ConfigError, suggestion

Tree = dict[str, Any]
_OTHER_NAMES = {"learning_rate": "lr", "lora_rank": "rank", "lora_alpha": "alpha", "target_modules": "targets"}
"""What settings are called elsewhere."""
_KEY_PART = re.compile(r'\s*(?:"([^"\\]*)"|([A-Za-z0-9_@-]+))\s*(\.|\Z)')

MAX_CONFIG_BYTES = 1 << 20
MAX_TEXT = 8192
"""Characters of one setting: settings travel on command lines of child processes."""


def load_config(
    path: str | Path | None, overrides: Sequence[str] = (), defaults: Mapping[str, Any] | None = None
) -> Config:
    """The effective config: ``defaults``, then the TOML file, then overrides, each winning over the one before.

    Raises `ConfigError` with the dotted key and the nearest known key or the expected type.
    """
    tree: Tree = {}
    _merge(tree, defaults or {})
    if path is not None:
        _merge(tree, _read_toml(Path(path)))
    for text in overrides:
        key, value = parse_override(text)
        _set(tree, key, value)
    return config_from_tree(tree)


def config_from_tree(tree: Tree) -> Config:
    """A typed config from nested tables; raises `ConfigError`."""
    _check_keys(tree, Config, "")
    _check_values(tree, "")
    for key, section in _entry_sections():
        for name, entry in tree.get(key, {}).items() if isinstance(tree.get(key), dict) else ():
            _convert(entry, section, f"{key}.{_quoted(name)}")
    config: Config = _convert(tree, Config, "")
    return config


def changed_keys(before: Config, after: Config) -> list[str]:
    """Dotted keys whose values differ."""
    old, new = _leaves(msgspec.to_builtins(before), ""), _leaves(msgspec.to_builtins(after), "")
    return sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k))


def _leaves(tree: Mapping[str, Any], prefix: str) -> Tree:
    out: Tree = {}
    for key, value in tree.items():
        out |= _leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return out


def parse_override(text: str) -> tuple[str, Any]:
    """``a.b=value`` → (``a.b``, value). The value is TOML; what is not TOML is taken as a plain string."""
    key, sep, raw = text.partition("=")
    key = key.strip()
    if not sep or not key:
        raise ConfigError(f"{text!r} is not key=value")
    if "\n" in raw or "\r" in raw:
        raise ConfigError(f"{key}: a value may not contain a line break")
    _split_key(key)
    try:
        return key, tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return key, raw.strip()
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{key}: {e}") from None


def _split_key(dotted: str) -> list[str]:
    """``seats."player 1".agent`` → its parts."""
    parts, at, more = [], 0, True
    while more:
        match = _KEY_PART.match(dotted, at)
        if match is None:
            raise ConfigError(
                f'{dotted!r} is not a key: write section.key, with quotes around a part that has other characters: seats."player 1".agent'
            )
        parts.append(match[1] if match[1] is not None else match[2])
        at, more = match.end(), match[3] == "."
    return parts


def _read_toml(path: Path) -> Tree:
    try:
        return tomllib.loads(read_plain(path, MAX_CONFIG_BYTES).decode())
    except OSError as e:
        raise ConfigError(f"cannot read config {path}: {e.strerror}") from None
    except (ValueError, RecursionError) as e:  # TOML and UTF-8 errors, integers of thousands of digits, endless nesting
        raise ConfigError(f"{path} is not TOML: {e}") from None


def _merge(into: Tree, other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if not isinstance(value, Mapping):
            into[key] = value
            continue
        if not isinstance(into.get(key), dict):
            into[key] = {}
        _merge(into[key], value)


def _set(tree: Tree, dotted: str, value: Any) -> None:
    *path, last = _split_key(dotted)
    for part in path:
        nested = tree.setdefault(part, {})
        if not isinstance(nested, dict):
            raise ConfigError(f"{dotted}: {part!r} is a value, not a section")
        tree = nested
    _merge(tree, {last: value})


# ── checks ───────────────────────────────────────────────────────────────────────────────────────


def _check_keys(tree: Tree, kind: type[msgspec.Struct], prefix: str) -> None:
    hints = get_type_hints(kind)
    for key, value in tree.items():
        if key not in hints:
            raise ConfigError(f"unknown key {prefix + _quoted(key)!r}{_near(prefix, key, hints)}")
        section = _section_type(hints[key])
        if section is None or not isinstance(value, dict):
            continue
        if get_origin(hints[key]) is dict:
            for name, nested in value.items():
                if isinstance(nested, dict):
                    _check_keys(nested, section, f"{prefix}{key}.{_quoted(name)}.")
        else:
            _check_keys(value, section, f"{prefix}{key}.")


def _check_values(value: Any, key: str) -> None:
    """Refuse what TOML can say but no setting, wire or JSON can carry."""
    if isinstance(value, dict):
        for name, nested in value.items():
            _check_text(name, key or "config")
            _check_values(nested, f"{key}.{_quoted(name)}" if key else _quoted(name))
    elif isinstance(value, list):
        for nested in value:
            _check_values(nested, key)
    elif isinstance(value, str):
        _check_text(value, key)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key}: {value} is not a finite number")
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{key}: the integer does not fit in 64 bits")


def _check_text(text: str, key: str) -> None:
    if len(text) > MAX_TEXT:
        raise ConfigError(f"{key[:80]}: a text of {len(text):,} characters; at most {MAX_TEXT:,} are allowed")
    if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
        raise ConfigError(f"{key}: {text!r} is not valid text")


def _convert(value: Any, kind: type[Any], prefix: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as e:
        message, _, where = str(e).partition(" - at ")
        path = _with_names(value, where.strip("`").removeprefix("$").lstrip("."))
        key = ".".join(part for part in (prefix, path) if part) or "config"
        message = message.replace("`object`", "a section").replace("`array`", "a list")
        raise ConfigError(f"{key}: {message[:1].lower()}{message[1:]}{_choices(kind, path)}") from None


def _with_names(value: Any, path: str) -> str:
    """``env_params[...]`` → ``env_params.NAME``: the entry of a table of plain values that is not plain."""
    table, sep, _ = path.partition("[...]")
    if not sep:
        return path
    for part in table.split("."):
        value = value[part] if isinstance(value, dict) and part in value else value
    names = (
        [n for n, v in value.items() if not isinstance(v, bool | int | float | str)] if isinstance(value, dict) else []
    )
    return f"{table}.{_quoted(names[0])}" if names else table


def _choices(kind: Any, path: str) -> str:
    """``; one of a, b`` for a setting that has choices."""
    for part in path.split("."):
        hints = get_type_hints(kind) if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else {}
        kind = hints.get(part)
    if get_origin(kind) is Literal:
        return f"; one of {', '.join(map(str, get_args(kind)))}"
    words = [str(w) for part in get_args(kind) if get_origin(part) is Literal for w in get_args(part)]
    return f"; a number or {', '.join(words)}" if words else ""


def _section_type(hint: Any) -> type[msgspec.Struct] | None:
    candidate = get_args(hint)[1] if get_origin(hint) is dict else hint
    return candidate if isinstance(candidate, type) and issubclass(candidate, msgspec.Struct) else None


def _entry_sections() -> Iterable[tuple[str, type[msgspec.Struct]]]:
    """(key, section) of the tables whose entries the user names: seats, agents."""
    for key, hint in get_type_hints(Config).items():
        section = _section_type(hint)
        if section is not None and get_origin(hint) is dict:
            yield key, section


def _near(prefix: str, key: str, siblings: Iterable[str]) -> str:
    """Nearest full key, preferring the same name in another section, then the same section."""
    known, name = list(all_keys()), key.replace("-", "_")
    here = [f"{prefix}{s}" for s in siblings]
    if f"{prefix}{_OTHER_NAMES.get(name)}" in here:
        return f"; did you mean {f'{prefix}{_OTHER_NAMES[name]}'!r}?"
    same = [k for k in (*known, *here) if k.rpartition(".")[2] == name]
    if same:
        return "; did you mean " + " or ".join(repr(k) for k in dict.fromkeys(same[:3])) + "?"
    return suggestion(f"{prefix}{name}", {*here, *known} if prefix else known)


def all_keys(kind: type[msgspec.Struct] = Config, prefix: str = "") -> Iterable[str]:
    """Every dotted key of the schema."""
    for key, hint in get_type_hints(kind).items():
        section = _section_type(hint)
        if section is None or get_origin(hint) is dict:
            yield prefix + key
        else:
            yield from all_keys(section, f"{prefix}{key}.")


def _quoted(part: str) -> str:
    return part if re.fullmatch(r"[A-Za-z0-9_@-]+", part) else f'"{part}"'
