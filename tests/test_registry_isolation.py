"""The two ways to swap the global random state agree, and nothing of an episode stays behind."""

from __future__ import annotations

import random
import sys

import pytest

from selfplay.registry import Isolation, isolation


@pytest.fixture(params=["memory", "tuples"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "tuples":
        monkeypatch.setattr(isolation, "_global_state", None)
    return str(request.param)


def _draws(seed: int) -> list[float]:
    own = Isolation(seed)
    out = []
    for _ in range(3):
        with own:
            out += [random.random(), random.gauss(0, 1), random.getrandbits(70)]
        random.random()
    return out


def test_a_stream_goes_on_across_sections_whatever_happens_between(way: str) -> None:
    first = _draws(1)
    random.seed(99)
    assert _draws(1) == first
    assert _draws(2) != first
    reference = Isolation(1)
    with reference:
        assert [random.random(), random.gauss(0, 1), random.getrandbits(70)] == first[:3]


def test_the_outer_state_is_restored_also_after_an_error(way: str) -> None:
    random.seed(4)
    random.gauss(0, 1)
    before, stdout = random.getstate(), sys.stdout

    def breaks() -> None:
        with Isolation(1):
            random.seed(7)
            raise KeyError

    with pytest.raises(KeyError):
        breaks()
    assert random.getstate() == before
    assert sys.stdout is stdout


def test_both_ways_give_the_same_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = _draws(11)
    monkeypatch.setattr(isolation, "_global_state", None)
    assert _draws(11) == fast
