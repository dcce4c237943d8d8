"""Writing a config as TOML: plain for the run folder, and with a comment per setting for ``--print-config``.

Both texts read back, by `load_config`, to a config equal to the one they were made from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from selfplay.config.schema import Config

Path = tuple[str, ...]


def dump_toml(config: Config) -> str:
    """The config as TOML that `load_config` reads back to an equal config."""
    return "\n".join(_section_lines(config, (), comments=False)).strip() + "\n"


def describe_config(config: Config) -> str:
    """The effective config as TOML with, above every value, what the setting does. Unset values are commented out."""
    return "\n".join(_section_lines(config, (), comments=True)).strip() + "\n"


def _section_lines(section: msgspec.Struct, path: Path, *, comments: bool) -> Iterator[str]:
    hints = get_type_hints(type(section), include_extras=True)
    values = {key: getattr(section, key) for key in hints}
    if path:
        yield from (f"# {line}" for line in _doc(type(section)) if comments)
        yield f"[{_dotted(path)}]"
    for key, hint in hints.items():
        if not isinstance(values[key], msgspec.Struct | Mapping):
            yield from _value_lines(key, values[key], hint, comments=comments)
    yield ""
    for key, hint in hints.items():
        if isinstance(values[key], msgspec.Struct):
            yield from _section_lines(values[key], (*path, key), comments=comments)
        elif isinstance(values[key], Mapping):
            yield from _table_lines(values[key], hint, (*path, key), comments=comments)


def _value_lines(key: str, value: Any, hint: Any, *, comments: bool) -> Iterator[str]:
    if comments:
        yield f"# {_description(hint)}"
    if value is not None:
        yield f"{toml_key(key)} = {toml_value(value)}"
    elif comments:
        yield f"# {toml_key(key)} is unset"


def _table_lines(table: Mapping[str, Any], hint: Any, path: Path, *, comments: bool) -> Iterator[str]:
    """A table whose keys the user names: of plain values, or of sections."""
    if comments:
        yield f"# [{_dotted(path)}]  {_description(hint)}{'' if table else ' (none set)'}"
    plain = {k: v for k, v in table.items() if not isinstance(v, msgspec.Struct)}
    if plain:
        yield f"[{_dotted(path)}]"
        yield from (f"{toml_key(key)} = {toml_value(value)}" for key, value in plain.items())
    if plain or comments:
        yield ""
    for key, value in table.items():
        if isinstance(value, msgspec.Struct):
            yield from _section_lines(value, (*path, key), comments=comments)


def _doc(kind: type[msgspec.Struct]) -> list[str]:
    return [line.strip() for line in (kind.__doc__ or "").strip().splitlines()]


def _description(hint: Any) -> str:
    """The description on a field's annotation, with its bounds and choices."""
    text, limits = "", []
    for meta in _metas(hint):
        text = text or meta.description or ""
        pairs = ((">=", meta.ge), (">", meta.gt), ("<=", meta.le), ("<", meta.lt))
        limits += [f"{sign} {bound}" for sign, bound in pairs if bound is not None]
    choices = _choices(hint)
    extra = " | ".join(choices) if choices else ", ".join(dict.fromkeys(limits))
    return f"{text} [{extra}]" if extra else text


def _metas(hint: Any) -> Iterator[msgspec.Meta]:
    if get_origin(hint) is Annotated:
        inner, *metas = get_args(hint)
        yield from (m for m in metas if isinstance(m, msgspec.Meta) and m.description)
        yield from (m for m in metas if isinstance(m, msgspec.Meta) and not m.description)
        yield from _metas(inner)
    elif get_origin(hint) is Union or type(hint).__name__ == "UnionType":
        for arg in get_args(hint):
            yield from _metas(arg)


def _choices(hint: Any) -> list[str]:
    inner = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return [str(c) for c in get_args(inner)] if str(get_origin(inner)) == "typing.Literal" else []


def _dotted(path: Path) -> str:
    return ".".join(toml_key(part) for part in path)


def toml_key(key: str) -> str:
    """A key as TOML wants it: bare when it can be, else quoted."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)


def toml_value(value: Any) -> str:
    """A scalar or list as TOML; JSON's spelling, except that TOML wants DEL escaped."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")
