"""Online ratings (openskill, Plackett–Luce; Weng and Lin, 2011) for one purpose: to find opponents that are near in strength.

In: games in the order they were recorded. Out: how likely a level game is between a learner and each candidate. An online rating follows a
player that changes, and depends on the order of the games: so these are never reported. What a run or a tournament says of
strength is a batch fit (`selfplay.ratings`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from selfplay.league.opponents import lineage
from selfplay.league.records import GameRecord
from selfplay.ratings.games import places_of

Rating = tuple[float, float]
"""Mean and standard deviation."""


class Skills:
    """Ratings of everybody who played. A version without games has the rating of the version before it."""

    def __init__(self) -> None:
        from openskill.models import PlackettLuce

        self._model = PlackettLuce()
        self._ratings: dict[str, Rating] = {}
        self._versions: dict[str, list[int]] = {}
        """Lineage → its versions that have a rating, ascending."""

    def add(self, games: Iterable[GameRecord]) -> None:
        """Count games. Left out: those without result, those where somebody sits twice, and those of unknown versions."""
        for game in games:
            players = [_newest(p) for p in game.players.values()]
            if game.ended == "truncated" or len(set(players)) < len(players) or any(p.endswith("@?") for p in players):
                continue
            places = places_of(tuple(game.players), game.winners, game.rewards)
            teams = [[self._model.create_rating(list(self.rating(p)))] for p in players]
            for player, (new,) in zip(players, self._model.rate(teams, ranks=list(map(float, places))), strict=True):
                self._put(player, (new.mu, new.sigma))

    def rating(self, player: str) -> Rating:
        """Of a version, a bot, or, for an agent's bare name, of its newest version."""
        if player in self._ratings:
            return self._ratings[player]
        name, _, version = player.partition("@")
        before = [v for v in self._versions.get(name, ()) if not version or v <= int(version)]
        if before:
            return self._ratings[f"{name}@{before[-1]}"]
        new = self._model.rating()
        return new.mu, new.sigma

    def closeness(self, learner: str, candidates: Sequence[str]) -> list[float]:
        """For each candidate the chance of a level game with ``learner``: 1 and below, the more the nearer."""
        mine = self._model.create_rating(list(self.rating(learner)))
        others = [self._model.create_rating(list(self.rating(c))) for c in candidates]
        return [float(self._model.predict_draw([[mine], [other]])) for other in others]

    def _put(self, player: str, rating: Rating) -> None:
        self._ratings[player] = rating
        name, _, version = player.partition("@")
        known = self._versions.setdefault(name, [])
        if version and int(version) not in known:
            known.append(int(version))
            known.sort()


def _newest(player: str) -> str:
    """``pro@4`` of ``pro@2..4``: a seat that was played by several versions counts for the last."""
    return f"{lineage(player)}@{player.rpartition('..')[2]}" if ".." in player else player
