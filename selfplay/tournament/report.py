"""``report.html``: one self-contained page about a tournament, readable on a phone, without script and without network.

In: the spec, the games, the standings, and episodes for the transcripts. Out: HTML. Everything that players or games wrote is
escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from selfplay.play.text import printable
from selfplay.ratings import PlayerRating
from selfplay.tournament import svg
from selfplay.tournament.gamelog import GameLine
from selfplay.tournament.spec import TournamentSpec
from selfplay.tournament.standings import Standings
from selfplay.tournament.words import counted, elo_text, interval_text, rank_text, reward_text, seat_texts, share_text
from selfplay.types import Episode

TRANSCRIPTS = 12
_SEAT_COLUMNS = ("player", "against", "as", "games", "won (95 %)", "drawn", "not lost")
ReadEpisode = Callable[[int], Episode]

_STYLE = """
:root{--fg:#1b1f24;--bg:#fff;--soft:#5b6672;--rule:#e3e7eb;--card:#f7f9fb;--main:#2463b4;--win:#1a7f5a;--loss:#c4432b}
@media(prefers-color-scheme:dark){:root{--fg:#e6eaee;--bg:#14181d;--soft:#9aa6b2;--rule:#2b333c;--card:#1b2128;--main:#6ea8f2;--win:#4cc38a;--loss:#f07a63}}
*{box-sizing:border-box}body{margin:0;font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;color:var(--fg);background:var(--bg)}
main{max-width:860px;margin:0 auto;padding:20px 16px 60px}h1{font-size:1.5rem;margin:.2em 0}h2{font-size:1.1rem;margin:2em 0 .5em}
p,li{max-width:70ch}.soft{color:var(--soft);font-size:.9rem}.lead{font-size:1.1rem}.note{border-left:3px solid var(--loss);padding:.2em .8em;background:var(--card)}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}th,td{padding:.35em .6em;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}
th{color:var(--soft);font-weight:600}td.l,th.l{text-align:left}svg{width:100%;height:auto;display:block}svg text{font:12px system-ui,sans-serif;fill:var(--fg)}
svg .tick{fill:var(--soft);font-size:11px}.grid{stroke:var(--rule)}.zero{stroke:var(--soft)}.range{stroke:var(--main);stroke-width:5;stroke-opacity:.35;stroke-linecap:round}
.point,.bar{fill:var(--main)}.none{fill:var(--rule);fill-opacity:.5}.win{fill:var(--win)}.loss{fill:var(--loss)}.line{fill:none;stroke-width:2}.band{fill-opacity:.15;stroke:none}
.c0{fill:#2463b4;stroke:#2463b4}.c1{fill:#c4432b;stroke:#c4432b}.c2{fill:#1a7f5a;stroke:#1a7f5a}.c3{fill:#8a4fbf;stroke:#8a4fbf}.c4{fill:#b5791b;stroke:#b5791b}.c5{fill:#0f8a9d;stroke:#0f8a9d}
polyline.line{fill:none}polygon.band{stroke:none}details{border:1px solid var(--rule);border-radius:6px;padding:.4em .8em;margin:.5em 0;background:var(--card)}
@media(max-width:600px){svg text{font-size:17px}svg .tick,svg .column{font-size:14px}}
summary{cursor:pointer}pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:.85rem;margin:.6em 0}a{color:var(--main)}
"""


def report_html(
    spec: TournamentSpec, lines: Sequence[GameLine], result: Standings, read_episode: ReadEpisode | None = None
) -> str:
    """The page."""
    worst = worst_losses(lines, result)
    sections = [
        _head(spec, result),
        _section("Ratings", _forest(result) + _table(result)),
        _section("Rating over training", _training(spec, result)),
        _section("Head to head", _payoffs(result)),
        _section("Seats", _seats(result)),
        _section("Game lengths", svg.histogram([float(line.turns) for line in lines if line.scored], "turns per game")),
        _section("Illegal answers", _illegal(result)),
        _section("Worst losses", _losses(worst, read_episode)),
        _method(spec, result),
    ]
    title = f"{spec.env}: who is better?"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>{''.join(sections)}</main></body></html>\n"
    )


def worst_losses(lines: Sequence[GameLine], result: Standings) -> list[tuple[str, GameLine]]:
    """(player, its most costly defeat), the best players first; each game once."""
    out: list[tuple[str, GameLine]] = []
    seen: set[str] = set()
    for row in result.ratings.players:
        mine = [
            (line.rewards[seat], line.game, line)
            for line in lines
            for seat, player in line.seats.items()
            if player == row.player
            and line.scored
            and line.winners
            and seat not in line.winners
            and line.episode is not None
        ]
        fresh = sorted(m[:2] for m in mine if m[1] not in seen)
        if fresh and len(out) < TRANSCRIPTS:
            seen.add(fresh[0][1])
            out.append((row.player, next(m[2] for m in mine if m[1] == fresh[0][1])))
    return out


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def _head(spec: TournamentSpec, result: Standings) -> str:
    table = result.ratings
    played = ", ".join(f"{v} {k}" for k, v in result.counts.items())
    notes = "".join(f'<p class="note">{escape(r)}</p>' for r in table.remarks)
    return (
        f'<h1>{escape(spec.env)}</h1><p class="lead">{escape(verdict(result))}</p>'
        f'<p class="soft">{len(spec.players)} players, {counted(table.num_games, "rated game")} in {counted(table.num_clusters, "pair")} '
        f"({escape(played)}); schedule {spec.schedule}, seed {spec.seed}; {escape(spec.env_source)}"
        f"{escape('; model ' + _model_name(spec.model)) if spec.model else ''}</p>{notes}"
    )


def _model_name(model: str) -> str:
    """A page is shown to others: of a folder its last two names, not where it lies."""
    return "/".join(model.rstrip("/").split("/")[-2:])


def verdict(result: Standings) -> str:
    """One sentence: who leads, and whether that is more than luck."""
    rows = [r for r in result.ratings.players if r.games]
    if len(rows) < 2:
        return "There is nothing to compare yet."
    best, tied = rows[0], result.ratings.tied_with_best
    if tied:
        first = f"{best.player} leads, but is statistically tied with {', '.join(tied)}."
    else:
        first = f"{best.player} wins more than everybody it can be compared with, at 95 % confidence."
    return first + _by_reward(best.player, result)


def _by_reward(leader: str, result: Standings) -> str:
    """A warning where who wins most games does not earn most."""
    mine = result.rewards[leader]
    ahead = [
        (theirs.mean, player)
        for player, theirs in result.rewards.items()
        if player != leader
        and None not in (theirs.half, mine.half)
        and theirs.mean - (theirs.half or 0) > mine.mean + (mine.half or 0)
    ]
    if not ahead:
        return ""
    reward, player = max(ahead)
    return f" But by reward {player} is ahead: {reward:+.2f} a game, {leader} {mine.mean:+.2f}. Winning often is not winning much here."


def _forest(result: Standings) -> str:
    bars = [
        svg.Bar(r.player, r.elo, r.low, r.high, elo_text(r.elo))
        for r in result.ratings.players
        if r.elo is not None and r.low is not None and r.high is not None
    ]
    return svg.intervals(bars, "Elo")


def _table(result: Standings) -> str:
    head = [
        "rank",
        "player",
        "Elo",
        "95 %",
        "games",
        "score",
        "reward per game",
        "without forfeits",
        "illegal",
        "remarks",
    ]
    if not any(r.flags for r in result.ratings.players):
        head.remove("remarks")
    cells = "".join(f'<th class="{_side(h)}">{h}</th>' for h in head)
    without = {p.player: p for p in result.without_forfeits.players}
    rows = "".join(_row(head, r, without[r.player], result) for r in result.ratings.players)
    told = f'<p class="soft">Elo: {escape(result.ratings.reference)}. Ranks are those that the games leave open.</p>'
    return f'<div class="scroll"><table><tr>{cells}</tr>{rows}</table></div>{told}'


def _side(name: str) -> str:
    return "l" if name in ("player", "remarks", "against", "as") else ""


def _row(head: Sequence[str], row: PlayerRating, without: PlayerRating, result: Standings) -> str:
    values = (
        rank_text(row), row.player, elo_text(row.elo), interval_text(row), str(row.games),
        "–" if row.score is None else f"{row.score:.3f}", reward_text(result.rewards[row.player], 3), elo_text(without.elo),
        f"{result.conduct[row.player].illegal_share:.1%}", "; ".join(row.flags),
    )  # fmt: skip
    cells = "".join(f'<td class="{_side(h)}">{escape(v)}</td>' for h, v in zip(head, values, strict=False))
    return f"<tr>{cells}</tr>"


def _training(spec: TournamentSpec, result: Standings) -> str:
    """Elo by version, one line per agent with at least two versions here."""
    lines: dict[str, list[tuple[float, float, float, float]]] = {}
    for player in spec.players:
        row = result.ratings.of(player.name)
        if player.adapter and row.elo is not None and row.low is not None and row.high is not None:
            agent, _, version = player.name.rpartition("@")
            lines.setdefault(agent, []).append((float(version), row.elo, row.low, row.high))
    return svg.curves({a: sorted(p) for a, p in lines.items() if len(p) > 1}, "version", "Elo")


def _payoffs(result: Standings) -> str:
    names = [r.player for r in result.ratings.players]
    scores = [[m.score if (m := result.meetings[a].get(b)) is not None else None for b in names] for a in names]
    words = ['<p class="soft">Mean score of the row against the column: 1 wins all, 0 loses all.']
    if result.cyclic_share is not None:
        words.append(f" {result.cyclic_share:.0%} of the record is cyclic: no rating can explain it.")
    words += [f" {name}: {_leaders(found)}." for name, found in _shares_of_play(result) if found]
    return f'<div class="scroll">{svg.heat_map(names, scores)}</div>{"".join(words)}</p>'


def _shares_of_play(result: Standings) -> tuple[tuple[str, dict[str, float]], ...]:
    return ("Nash averaging", result.nash), ("α-rank", result.alpha_rank)


def _leaders(shares: dict[str, float]) -> str:
    best = sorted(shares.items(), key=lambda kv: -kv[1])[:3]
    return ", ".join(f"{escape(n)} {w:.2f}" for n, w in best if w > 0.005)


def _seats(result: Standings) -> str:
    rows = [(seat, score, f"{score:.3f}") for seat, score in result.seat_scores.items()]
    worth = ", ".join(f"{s} {t}" for s, t in zip(result.seat_scores, seat_texts(result.ratings), strict=False))
    told = (
        f'<p class="soft">Mean score of whoever sits there. Against the last seat, between equals: {escape(worth)}.</p>'
        if worth
        else ""
    )
    return svg.shares(rows) + told + _by_seat(result) if rows else ""


def _by_seat(result: Standings) -> str:
    """Every player's record against every other from each seat."""
    head = "".join(f'<th class="{_side(h)}">{h}</th>' for h in _SEAT_COLUMNS)
    rows = "".join(
        f'<tr><td class="l">{escape(r.player)}</td><td class="l">{escape(r.opponent)}</td><td class="l">{escape(r.seat)}</td>'
        f"<td>{r.games}</td>{''.join(f'<td>{share_text(s)}</td>' for s in (r.won, r.drawn, r.not_lost))}</tr>"
        for r in result.by_seat
    )
    return f'<details><summary>Results by seat</summary><div class="scroll"><table><tr>{head}</tr>{rows}</table></div></details>'


def _illegal(result: Standings) -> str:
    rows = [
        (player, c.illegal_share, f"{c.illegal_share:.1%}")
        for player, c in sorted(result.conduct.items(), key=lambda kv: -kv[1].illegal_share)
        if c.answers
    ]
    told = ", ".join(f"{escape(p)} {c.forfeited}" for p, c in result.conduct.items() if c.forfeited)
    return svg.shares(rows) + (f'<p class="soft">Games forfeited: {told}.</p>' if told else "")


def _losses(worst: Sequence[tuple[str, GameLine]], read_episode: ReadEpisode | None) -> str:
    parts = []
    for player, line in worst:
        seat = next(s for s, p in line.seats.items() if p == player and s not in line.winners)
        title = f"{player} lost {line.rewards[seat]:+g} as {seat}: {line.reason[:80]}"
        body = "" if read_episode is None or line.episode is None else _transcript(line, read_episode(line.episode))
        parts.append(
            f'<details id="{escape(line.game)}"><summary>{escape(title)}</summary>{body}<p class="soft">game {escape(line.game)}</p></details>'
        )
    return "".join(parts)


def _transcript(line: GameLine, episode: Episode) -> str:
    rows = []
    for number, turn in enumerate(episode.turns, 1):
        said = printable(turn.text)[:2000]
        mark = "" if turn.move is not None else f"   [illegal: {printable(turn.note)}]"
        rows.append(f"{number:>3}  {turn.seat} ({line.seats[turn.seat]}): {said}{mark}")
    for record in episode.jury:
        rows.append(
            "jury: " + ", ".join(f"{n} {p:.2f}" for n, p in zip(record.labels, record.probabilities, strict=True))
        )
    return f"<pre>{escape(chr(10).join([*rows, f'{episode.ended}: {printable(episode.reason)}']))}</pre>"


def _method(spec: TournamentSpec, result: Standings) -> str:
    model = (
        "Davidson's model (draws) with a seat effect"
        if len(spec.seats) == 2
        else "Plackett–Luce with ties and seat effects"
    )
    return _section(
        "How to read this",
        f'<p class="soft">Ratings are fitted to all games at once by {model}; Elo is that of the expected score over both seatings. '
        "Intervals treat the games of one deal as one observation (clustered sandwich, small-sample corrected, t quantiles). Games "
        "that infrastructure spoilt were played again and are not here; forfeits count as losses, and ratings without them stand "
        f"beside. Confidence {result.ratings.confidence:.0%}.</p>",
    )
