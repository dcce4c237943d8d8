"""A run on two ranks that share the base, and sitting down against what it made. Modes and transports: test_run_modes.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.runs import TINY, Run

from selfplay.store.episode_log import EpisodeLog
from selfplay.tournament.spec import TournamentSpec

pytestmark = pytest.mark.engine


def test_two_ranks_share_the_base_and_a_checkpoint_sits_down(tmp_path: Path) -> None:
    settings = (
        "train.ranks=2", "train.shard=base", "sync.transport=shm", "policy.engine=transformers",
        "eval.every=3", "eval.exact=false", 'eval.anchors=["base", "random"]', "eval.games=1",
    )  # fmt: skip
    run = Run(tmp_path, "train", "--env", "debate-v0", "train.steps=2", "name=r", "--json", *TINY, *settings)
    assert run.wait() == 0, run.error_text()
    result = run.result()
    assert {a: tuple(v) for a, v in result["versions"].items()} == {"pro": (0, 2), "con": (0, 2)}
    rows = [json.loads(line) for line in (tmp_path / "runs/r/metrics.jsonl").read_text().splitlines()]
    assert max(r["staleness_max"] for r in rows) <= 1
    assert all(r[f"agents/{a}/probe_mean"] < 0.001 for r in rows for a in ("pro", "con"))
    evaluated = [r["step"] for r in rows if "evaluation/base/points" in r]
    assert evaluated == [2]  # the last step, whatever eval.every says
    assert rows[-1]["accounting/stored"] == len(rows) * rows[-1]["episodes"]  # games against anchors are not among them

    play = Run(tmp_path, "play", "debate-v0", "--run", "runs/r", "--players", "pro@2,base", "--jury", "even", "--json")
    assert play.wait() == 0, play.error_text()
    assert '"pro"' in play.out.read_text()

    judged = Run(
        tmp_path, "tournament", "--env", "debate-v0", "-p", "split=eval", "--players", "runs/r/adapters/pro/2", "base",
        "--jury", "runs/r/adapters/con/2", "--pairs", "1", "--out", "t", "--json",
    )  # fmt: skip
    assert judged.wait() == 0, judged.error_text()
    spec = TournamentSpec.load(tmp_path / "t")
    assert spec.judge is not None
    assert spec.judge.name == "con@2"
    assert spec.jury.agent == "entrant-1@2"
    with EpisodeLog.open(tmp_path / "t/episodes", write=False, say=print) as log:
        asked = [record for _, episode in log.episodes() for record in episode.jury]
    assert len(asked) == 4  # two games, each in both orders, and the judge answered for itself
    assert {record.juror for record in asked} == {"entrant-1@2"}
