"""Long games and odd characters, from the engine's answers to what is trained on and what is on disk: nothing is cut quietly."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tests.test_tokens_exact import game, trained_contexts
from tests.toy_games import Turns

from selfplay.scoring import episode_segments
from selfplay.scoring.packing import plan_micro_batches
from selfplay.store.episode_log import EpisodeLog
from selfplay.store.text import json_line
from selfplay.training.rows import pack_row
from selfplay.types import episode_faults
from selfplay.wire.codec import encode

CAP = 64
"""Tokens of one answer: the default of `Sampling`."""
TURNS_EACH = 12
LENGTH = 2048
GROWTH = 300
BOTH = {"a": 1.0, "b": -1.0}


class Growing(Turns):
    """Every view is some 300 tokens long."""

    def view(self, seat: str) -> str:
        return "y" * GROWTH


class Foreign(Turns):
    """Half an emoji, and scripts of several directions, with joiners."""

    def view(self, seat: str) -> str:
        return "x\ud83d y สวัสดี مرحبا 👩\u200d👩\u200d👧"


def test_the_last_of_twelve_turns_is_trained_in_rows_of_any_length(tmp_path: Path) -> None:
    """Every answer is as long as it may be, so a game is many times longer than one, and than the rows asked for."""
    table = Turns(random.Random(0), length=2 * TURNS_EACH)
    episode, engine = game(tmp_path, "chatml", "x " * CAP, stops=True, table=table)
    assert [len(t.sampled_ids) for t in episode.turns] == [CAP] * 2 * TURNS_EACH
    segments = episode_segments(episode, BOTH)
    assert sorted(trained_contexts(segments)) == sorted(engine.seen)
    last = {s.seat: trained_contexts([s])[-1] for s in segments}
    assert list(last.values()) == engine.seen[-2:], "the last turn of each seat, behind all that came before"
    for max_tokens in (CAP, 1 << 20):
        ((*rows,),) = plan_micro_batches(segments, ranks=1, max_tokens=max_tokens)
        packed = [pack_row(row, torch.device("cpu")) for row in rows]
        assert sum(len(row.picks) for row in packed) == 2 * TURNS_EACH * CAP
        for segment in segments:
            (row,) = [p for r, p in zip(rows, packed, strict=True) if segment in r]
            actions = row.targets[row.picks].tolist()
            assert any(actions[i : i + CAP] == list(last[segment.seat][1]) for i in range(0, len(actions), CAP))


def test_a_game_that_outgrows_the_model_ends_as_cut_by_context_and_what_was_played_can_be_trained_on(
    tmp_path: Path,
) -> None:
    """Both seats' chats grow until one has no room: first its budget shrinks, then the game ends without an invented loss."""
    table = Growing(random.Random(0), length=1000)
    episode, engine = game(tmp_path, "chatml", "x " * CAP, stops=True, table=table, max_model_len=LENGTH)
    assert (episode.ended, episode.winners, set(episode.rewards.values())) == ("truncated", (), {0.0})
    assert "context" in episode.reason
    assert episode_faults(episode) == []
    answers = [len(answer) for _, answer in engine.seen]
    assert LENGTH // (GROWTH + CAP + 20) <= len(answers) // 2 <= LENGTH // (GROWTH + CAP)
    assert all(len(context) + len(answer) <= LENGTH for context, answer in engine.seen)
    assert set(answers[:-1]) == {CAP}
    segments = episode_segments(episode, BOTH)
    assert {s.seat for s in segments} == {"a", "b"}
    assert all(len(s.ids) <= LENGTH for s in segments)
    assert sorted(trained_contexts(segments)) == sorted(engine.seen)
    assert len(pack_row(segments, torch.device("cpu")).picks) == sum(answers)


def test_half_characters_and_all_scripts_reach_log_and_export_with_the_ids_as_sampled(tmp_path: Path) -> None:
    """The answer stops inside a character; the view holds half of one."""
    table = Foreign(random.Random(0), length=4)
    episode, engine = game(tmp_path / "model", "chatml", "x " + "\N{GRINNING FACE}" * CAP, stops=True, table=table)
    assert [t.text[-1] for t in episode.turns] == ["\ufffd"] * 4
    prompt = engine.chat.decode(engine.seen[0][0])
    assert "x\ufffd y สวัสดี مرحبا 👩\u200d👩\u200d👧" in prompt
    with EpisodeLog.open(tmp_path / "log", write=True, say=lambda _: None) as log:
        (number,) = log.append_many([encode(episode)])
        ((found, read),) = log.episodes(number)
    assert (found, read) == (number, episode)
    assert sorted(trained_contexts(episode_segments(read, BOTH))) == sorted(engine.seen)
    line = json_line(read)
    assert json.loads(line)["turns"][0]["text"] == episode.turns[0].text
    assert line.isprintable()
