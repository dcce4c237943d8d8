"""The score log: what each scorer said of each episode, on disk before the episode may be trained on.

    ScoringStage ── (episode id, scorer, what it was asked with, Scores) ──► scores/
    resume       ◄─ the same ────────────────────────────────────────────────────┘

A jury or a teacher costs tokens and need not say the same twice: what was said once stands, also after a crash.
"""

from __future__ import annotations

import zlib
from collections.abc import Container, Mapping

import msgspec

from selfplay.config.schema import ScorerConfig
from selfplay.errors import StoreError
from selfplay.scoring import Scores
from selfplay.store.record_log import RecordLog

Known = dict[tuple[str, str], Scores]
"""(id of the episode, scorer) → what it said."""


class ScoreRecord(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """One scorer's word on one episode."""

    episode_id: str
    scorer: str
    asked: int
    """Of the settings that it was asked with: see `asked_with`."""
    scores: Scores


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ScoreRecord)


def asked_with(config: ScorerConfig) -> int:
    """A checksum of the settings that decide what a scorer says; its weight and its limits are not among them."""
    what = (config.kind, config.agent, config.model, sorted(config.options.items()))
    return zlib.crc32(msgspec.json.encode(what))


class ScoreLog(RecordLog):
    """Append-only log of scores."""

    NOUN = "score"

    def keep(self, records: list[ScoreRecord]) -> None:
        """Store all with one fsync."""
        self.append_many([_encoder.encode(r) for r in records])

    def known(self, wanted: Container[str], scorers: Mapping[str, ScorerConfig]) -> Known:
        """What was said of the episodes ``wanted`` by scorers that are asked with the same settings now."""
        asked = {name: asked_with(config) for name, config in scorers.items()}
        found: Known = {}
        for number, data in self.read_from(0):
            try:
                record = _decoder.decode(data)
            except (msgspec.DecodeError, msgspec.ValidationError) as e:
                raise StoreError(f"{self.folder}: record {number} is not a score: {e}") from None
            if record.episode_id in wanted and asked.get(record.scorer) == record.asked:
                found[record.episode_id, record.scorer] = record.scores
        return found
