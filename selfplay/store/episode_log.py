"""The episode log: every acknowledged episode, in order, on disk before its worker may forget it.

In: encoded episodes, as their workers encoded them. Out: a sequence number each, and the episodes again from any number on.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from selfplay.errors import StoreError
from selfplay.store.record_log import RecordLog
from selfplay.types import Episode

_decoder = msgspec.msgpack.Decoder(Episode)


class EpisodeLog(RecordLog):
    """Append-only log of encoded episodes.

    >>> with EpisodeLog.open(run.episodes, write=True, say=print) as log:
    ...     seqs = log.append_many([first, second])     # durable now, one fsync for all
    ...     for seq, episode in log.episodes(seqs[0]): ...
    """

    NOUN = "episode"

    def episodes(self, seq: int = 0, end: int | None = None) -> Iterator[tuple[int, Episode]]:
        """(number, episode), decoded."""
        for number, data in self.read_from(seq, end):
            try:
                yield number, _decoder.decode(data)
            except (msgspec.DecodeError, msgspec.ValidationError) as e:
                raise StoreError(f"{self.folder}: record {number} is not an episode: {e}") from None
