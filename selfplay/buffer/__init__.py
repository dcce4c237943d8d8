"""Whole episodes between generation and training: the bounded buffer, who may start, and where every attempt went."""

from selfplay.buffer.accounting import Accounting, AccountingError, Ledger, LedgerState
from selfplay.buffer.admission import max_started, may_train, startable
from selfplay.buffer.buffer import BufferFull, Entry, EpisodeBuffer, EpisodeTooBig, Stale

__all__ = [
    "Accounting",
    "AccountingError",
    "BufferFull",
    "Entry",
    "EpisodeBuffer",
    "EpisodeTooBig",
    "Ledger",
    "LedgerState",
    "Stale",
    "max_started",
    "may_train",
    "startable",
]
