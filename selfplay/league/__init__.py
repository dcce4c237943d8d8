"""Who plays whom, and what came of it."""

from selfplay.league.matchmaker import Matchmaker
from selfplay.league.records import GameRecord, LeagueRecords, Payoff, SeatShare, game_record

__all__ = ["GameRecord", "LeagueRecords", "Matchmaker", "Payoff", "SeatShare", "game_record"]
