"""``selfplay play`` with a real policy server behind the seam."""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec
import pytest

from selfplay.types import Episode, episode_faults


@pytest.mark.engine
def test_the_base_model_plays_kuhn_poker() -> None:
    argv = ["play", "kuhn-poker-v0", "--players", "base,random", "--model", "tiny", "--games", "2", "--json"]
    code = f"import sys; from selfplay.cli.main import main; sys.exit(main({argv!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    episodes = msgspec.convert(json.loads(done.stdout)["episodes"], list[Episode])
    assert len(episodes) == 2
    for episode in episodes:
        assert episode_faults(episode) == []
        asked = [t for t in episode.turns if t.agent == "base"]
        assert asked
        assert all(t.sampled_ids and t.prompt_ids and 0 < len(t.sampled_ids) <= 8 for t in asked)
