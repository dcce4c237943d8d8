"""Games as Parquet: one row a game, plain columns for what one groups by, and the rest as JSON text beside them.

In: rows of a known table. Out: a file that pandas, polars and DuckDB read; whole or not there. pyarrow is an extra: JSON lines need nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from selfplay.errors import MissingExtraError
from selfplay.store.atomic import store_errors, temp_name
from selfplay.types import Episode

Kind = Literal["int64", "float64", "string"]
ROWS_AT_ONCE = 500

EPISODE_COLUMNS: dict[str, Kind] = {
    "seq": "int64", "episode_id": "string", "env": "string", "env_source": "string", "seed": "int64", "ended": "string",
    "reason": "string", "offender": "string", "players": "string", "winners": "string", "rewards": "string", "turns": "int64",
    "prompt_tokens": "int64", "sampled_tokens": "int64", "duration_s": "float64", "episode": "string",
}  # fmt: skip


def episode_row(seq: int, episode: Episode) -> dict[str, Any]:
    """An episode as a row of `EPISODE_COLUMNS`; ``episode`` holds all of it."""
    prompt, sampled = episode.num_tokens()
    return {
        "seq": seq, "episode_id": episode.episode_id, "env": episode.match.env, "env_source": episode.env_source,
        "seed": episode.match.seed, "ended": episode.ended, "reason": episode.reason, "offender": episode.offender,
        "players": as_json({s.seat: s.agent for s in episode.match.seats}), "winners": as_json(episode.winners),
        "rewards": as_json(episode.rewards), "turns": len(episode.turns), "prompt_tokens": prompt, "sampled_tokens": sampled,
        "duration_s": episode.duration_s, "episode": as_json(episode),
    }  # fmt: skip


def as_json(value: object) -> str:
    """A nested value as text."""
    return msgspec.json.encode(value).decode()


def write_parquet(path: Path, columns: Mapping[str, Kind], rows: Iterable[Mapping[str, Any]]) -> int:
    """Write ``rows`` and return how many there were. Raises `MissingExtraError` without pyarrow, `StoreError` where the disk refuses."""
    try:
        import pyarrow as pa  # type: ignore[import-untyped]
        from pyarrow import parquet
    except ModuleNotFoundError as e:
        raise MissingExtraError("Parquet", "parquet", "pyarrow") from e

    schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in columns.items()])
    num, waiting, temp = 0, iter(rows), temp_name(path)
    with store_errors(path):
        try:
            with parquet.ParquetWriter(str(temp), schema) as writer:
                while batch := list(itertools.islice(waiting, ROWS_AT_ONCE)):
                    writer.write_table(pa.Table.from_pylist([dict(row) for row in batch], schema=schema))
                    num += len(batch)
            temp.replace(path)
        finally:
            temp.unlink(missing_ok=True)
    return num
