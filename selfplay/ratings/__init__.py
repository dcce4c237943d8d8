"""Ratings of frozen players from their games, all at once and with honest intervals; tests that decide while games come in.

    table = rate(games, anchors={"random": 0.0})          # Davidson for two seats, Plackett–Luce with ties beyond
    table.players[0].elo, table.players[0].low, table.players[0].high, table.remarks
    state = sprt(scores, Hypotheses(elo0=0, elo1=20))      # after every pair

numpy and scipy are imported when something is computed, not before.
"""

from selfplay.ratings.games import RatedGame
from selfplay.ratings.table import PlayerRating, RatingTable, rate

__all__ = ["PlayerRating", "RatedGame", "RatingTable", "rate"]
