"""``selfplay match``: two players until a sequential test decides, and what that does and does not say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from selfplay.ratings.match import Hypotheses, MatchStats, Scores, SprtState, match_stats, pentanomial, sprt

if TYPE_CHECKING:
    from selfplay.launch.entrants import Field
    from selfplay.tournament.gamelog import GameLine
    from selfplay.tournament.spec import TournamentSpec

BIAS = (
    "the match stopped because of its result, so the Elo shown is biased away from 0: it decides, it does not measure"
)


class MatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a match."""

    one: str
    two: str
    pairs: int
    pentanomial: tuple[int, ...]
    """Pairs that brought ONE 0, 1/2, 1, 3/2 and 2 points."""
    test: SprtState
    stats: MatchStats | None
    outcome: str


def pair_scores(lines: dict[str, GameLine], one: str) -> Scores:
    """Whole pairs only: a pair counts when both of its games were scored."""
    points: dict[str, list[float]] = {}
    for line in lines.values():
        game = line.rated()
        if line.scored and not game.is_mirror:
            mine, theirs = (p for _, p in sorted(zip((n != one for n in game.players), game.places, strict=True)))
            points.setdefault(line.cluster, []).append((mine < theirs) + 0.5 * (mine == theirs))
    totals = [sum(p) for p in points.values() if len(p) == 2]
    return pentanomial([sum(t == k / 2 for t in totals) for k in range(5)])


async def play_match(
    spec: TournamentSpec,
    field: Field,
    folder: Path,
    hypotheses: Hypotheses,
    *,
    say: Callable[[str], None],
    as_json: bool,
) -> None:
    """Play until the test decides or the pairs are used up, and print the answer."""
    from selfplay.launch.tournament import play_tournament
    from selfplay.tournament.results import conclude, read_tournament, write_results

    one, two = (p.name for p in spec.players)

    def decided(lines: dict[str, GameLine]) -> bool:
        return sprt(pair_scores(lines, one), hypotheses).decision is not None

    def watch(_: GameLine, num_done: int, __: int) -> None:
        if num_done % 20 == 0:
            say(f"{num_done} games")

    played = await play_tournament(spec, folder, config=field.config, say=say, watch=watch, enough=decided)
    found = read_tournament(folder)
    write_results(folder, found, conclude(found))
    scores = pair_scores({line.game: line for line in found.lines}, one)
    result = MatchResult(
        one=one, two=two, pairs=int(scores.num), pentanomial=tuple(int(c) for c in scores.counts),
        test=sprt(scores, hypotheses), stats=match_stats(scores) if scores.num else None, outcome=played.outcome,
    )  # fmt: skip
    click.echo(msgspec.json.encode(result).decode() if as_json else _text(result, hypotheses, folder))


def _text(result: MatchResult, hypotheses: Hypotheses, folder: Path) -> str:
    test, kind = result.test, "normalised Elo" if hypotheses.model == "normalised" else "Elo"
    verdict = {
        "H1": f"{result.one} is better than {result.two} by more than {hypotheses.elo0:g} {kind}",
        "H0": f"{result.one} is not {hypotheses.elo1:g} {kind} better than {result.two}",
        None: "not decided",
    }[test.decision]
    lines = [
        f"{verdict}  (LLR {test.llr:.2f}, bounds {test.lower:.2f} and {test.upper:.2f}; {result.outcome})",
        f"pairs with 0, ½, 1, 1½, 2 points: {', '.join(map(str, result.pentanomial))}",
    ]
    stats = result.stats
    if stats is not None:
        elo = "no finite Elo" if stats.elo is None else f"Elo {stats.elo:+.1f}"
        error = "" if stats.elo_error is None else f" ± {stats.elo_error:.1f}"
        lines.append(
            f"score {stats.score:.3f}, {elo}{error}, normalised {stats.normalised_elo:+.1f}, superior with {stats.los:.1%}"
        )
        if test.decision is not None:
            lines.append(f"note: {BIAS}")
    return "\n".join([*lines, f"games: {folder}"])
