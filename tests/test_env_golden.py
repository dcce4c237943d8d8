"""Recorded games of the first-party environments, replayed line by line."""

from __future__ import annotations

import pytest

from playthrough import GAMES, GOLDEN, record


@pytest.mark.parametrize("name", sorted(GAMES))
def test_a_recorded_game_plays_out_as_it_did(name: str) -> None:
    recorded = (GOLDEN / f"{name}.txt").read_text("utf-8")
    assert record(name).splitlines() == recorded.splitlines()
    assert record(name) == recorded


def test_every_environment_has_a_record() -> None:
    from selfplay.registry import ENVIRONMENTS, list_entries

    ours = {e.id for e in list_entries(ENVIRONMENTS) if e.distribution == "selfplay"}
    assert ours <= {env_id for env_id, *_ in GAMES.values()}
