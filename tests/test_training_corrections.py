"""Every off-policy correction and every policy loss against figures worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from selfplay.config.schema import AlgorithmConfig
from selfplay.training.corrections import CORRECTIONS, correct, log_ratio
from selfplay.training.surrogates import SURROGATES, Tokens, surrogate

LOG = math.log
RATIOS = [0.4, 1.0, 4.0, 8.0]
"""π_old/μ of four tokens; the first two are one sequence, the last two another."""
SEQUENCES = [0, 0, 1, 1]


def weights(name: str, **settings: Any) -> tuple[list[float], list[bool], list[bool]]:
    config = AlgorithmConfig(correction=name, **settings)  # type: ignore[arg-type]
    found = correct(config, torch.tensor([LOG(r) for r in RATIOS]), torch.tensor(SEQUENCES))
    return [round(w, 5) for w in found.weights.tolist()], found.capped.tolist(), found.masked.tolist()


def test_none_and_importance() -> None:
    assert weights("none")[0] == [1, 1, 1, 1]
    assert weights("importance")[0] == [0.4, 1, 4, 8]


def test_token_tis_caps_each_token() -> None:
    assert weights("token_tis", tis_cap=2.0) == ([0.4, 1, 2, 2], [False, False, True, True], [False] * 4)


def test_sequence_tis_caps_the_product() -> None:
    """0.4 · 1 and 4 · 8 = 32, capped at 2."""
    assert weights("sequence_tis", tis_cap=2.0) == ([0.4, 0.4, 2, 2], [False, False, True, True], [False] * 4)


def test_icepop_keeps_what_lies_between() -> None:
    """Between .5 and 5: the first and the last are out."""
    assert weights("icepop") == ([0, 1, 4, 0], [False] * 4, [True, False, False, True])


def test_geometric_keeps_sequences_whose_mean_ratio_is_near_one() -> None:
    """Means √(.4 · 1) = .632 and √(4 · 8) = 5.66; within [.6, 1.5] only the first, whole and unweighted."""
    found = weights("geometric", keep_mean_ratio=(0.6, 1.5))
    assert found == ([1, 1, 0, 0], [False] * 4, [False, False, True, True])
    assert weights("geometric")[0] == [0, 0, 0, 0]


def test_a_broken_token_stays_a_number() -> None:
    clamped = log_ratio(torch.tensor([-1.0, -1000.0]), torch.tensor([-1000.0, -1.0]))
    assert clamped.tolist() == [20.0, -20.0]
    config = AlgorithmConfig(correction="sequence_tis", tis_cap=1e30)
    assert math.isfinite(correct(config, clamped.repeat(50), torch.zeros(100, dtype=torch.long)).weights.max().item())


@pytest.mark.parametrize("name", CORRECTIONS)
def test_no_tokens_give_no_weights(name: str) -> None:
    config = AlgorithmConfig(correction=name)  # type: ignore[arg-type]
    assert correct(config, torch.zeros(0), torch.zeros(0, dtype=torch.long)).weights.shape == (0,)


# ── policy losses ────────────────────────────────────────────────────────────────────────────────

POLICY, ANCHOR = [0.9, 0.3, 0.2, 0.5], [0.6, 0.6, 0.2, 0.25]
"""Ratios ρ: 1.5, .5, 1, 2."""
ADVANTAGES = [1.0, -1.0, 3.0, -2.0]


def found(name: str, **settings: Any) -> tuple[list[float], list[float], list[bool], list[bool]]:
    """(what is maximised, its gradient by log π, clipped, masked)."""
    config = AlgorithmConfig(loss=name, **settings)  # type: ignore[arg-type]
    logprobs = torch.tensor([LOG(p) for p in POLICY], requires_grad=True)
    tokens = Tokens(
        logprobs=logprobs, anchor=torch.tensor([LOG(p) for p in ANCHOR]), advantages=torch.tensor(ADVANTAGES),
        sequences=torch.tensor(SEQUENCES),
    )  # fmt: skip
    out = surrogate(config, tokens)
    (slope,) = torch.autograd.grad(out.gain.sum(), logprobs)
    return out.gain.tolist(), slope.tolist(), out.clipped.tolist(), out.masked.tolist()


def test_reinforce_weighs_the_score_by_the_ratio() -> None:
    gain, slope, clipped, masked = found("reinforce")
    assert gain == pytest.approx([1.5 * LOG(0.9), -0.5 * LOG(0.3), 3 * LOG(0.2), -4 * LOG(0.5)], rel=1e-5)
    assert slope == pytest.approx([1.5, -0.5, 3, -4], rel=1e-5)
    assert not any(clipped + masked)


def test_ppo_takes_the_worse_of_ratio_and_clipped_ratio() -> None:
    """Clip to [.8, 1.2]: 1.2 · 1 < 1.5, −.8 < −.5, 3, and −2 · 2 is worse than −2 · 1.2, so it is not clipped."""
    gain, slope, clipped, _ = found("ppo")
    assert gain == pytest.approx([1.2, -0.8, 3, -4], rel=1e-5)
    assert slope == pytest.approx([0, 0, 3, -4], rel=1e-5)
    assert clipped == [True, True, False, False]


def test_gspo_clips_the_sequences_ratio() -> None:
    """s = √(1.5 · .5) = .866 and √(1 · 2) = 1.414. Clip to [.9, 1.3]: −.9 is clipped; 3 · 1.3 is clipped, −2 · 1.414 is not."""
    gain, slope, clipped, _ = found("gspo", clip_low=0.1, clip_high=0.3)
    low, high = math.sqrt(0.75), math.sqrt(2)
    assert gain == pytest.approx([low, -0.9, 3.9, -2 * high], rel=1e-5)
    assert slope == pytest.approx([low, 0, 0, -2 * high], rel=1e-5)
    assert clipped == [False, True, True, False]


def test_cispo_clips_the_weight_and_keeps_the_gradient() -> None:
    gain, slope, clipped, _ = found("cispo")
    assert gain == pytest.approx([1.2 * LOG(0.9), -0.8 * LOG(0.3), 3 * LOG(0.2), -2.4 * LOG(0.5)], rel=1e-5)
    assert slope == pytest.approx([1.2, -0.8, 3, -2.4], rel=1e-5)
    assert clipped == [True, True, False, True]


def test_dppo_drops_what_moved_far_enough() -> None:
    """Moved by .3, −.3, 0, .25. Dropped: A > 0 and moved > .2; A < 0 and moved < −.2. The last moved up with A < 0: kept."""
    gain, slope, _, masked = found("dppo_tv")
    assert gain == pytest.approx([0, 0, 3, -4], rel=1e-5)
    assert slope == pytest.approx([0, 0, 3, -4], rel=1e-5)
    assert masked == [True, True, False, False]


@pytest.mark.parametrize("name", SURROGATES)
def test_all_losses_agree_where_the_policy_is_the_anchor(name: str) -> None:
    """At ρ = 1 each has the plain policy gradient A · ∇log π."""
    config = AlgorithmConfig(loss=name)  # type: ignore[arg-type]
    logprobs = torch.tensor([LOG(p) for p in POLICY], requires_grad=True)
    tokens = Tokens(
        logprobs=logprobs,
        anchor=logprobs.detach(),
        advantages=torch.tensor(ADVANTAGES),
        sequences=torch.tensor(SEQUENCES),
    )
    (slope,) = torch.autograd.grad(surrogate(config, tokens).gain.sum(), logprobs)
    assert slope.tolist() == pytest.approx(ADVANTAGES)
