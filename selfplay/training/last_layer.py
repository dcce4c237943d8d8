"""The last layer, past its keys and values, only where somebody reads the result: at the tokens that predict an action.

In: the last layer of a frozen base. Out: the same layer, whose token-by-token parts compute the active row's wanted tokens and say
0 for all others, whose hidden states nobody looks at. It saves at most what these parts of a single layer cost, so most where layers
are few: 11 % of the trainer's time for the tiny model's two layers in Kuhn poker.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from selfplay.training.flat import ActiveRow

PARTS = ("self_attn.q_proj", "self_attn.o_proj", "mlp")
"""What a layer computes for each token by itself and for no other one, by the usual names; what a layer lacks is left alone."""


def thin_out(layer: nn.Module, row: ActiveRow[Any]) -> None:
    """Let the parts of ``layer``, the last one, compute the wanted tokens of ``row`` only."""
    modules = dict(layer.named_modules())
    for name in PARTS:
        if name in modules:
            modules[name].forward = partial(_forward, modules[name].forward, row)


def _forward(forward: Callable[[Tensor], Any], row: ActiveRow[Any], x: Tensor) -> Any:
    """[1, T, D] → [1, T, E]."""
    if row.wanted is None:
        return forward(x)
    with row.thinned():
        found = forward(x[:, row.wanted])
    if not isinstance(found, Tensor):  # an architecture whose parts return more is computed whole
        return forward(x)
    return found.new_zeros(1, x.shape[1], found.shape[-1]).index_copy(1, row.wanted, found)
