"""The layers below every adapter: what they make of a row is the same in each pass over it, so it is computed once.

In: the lower layers of a frozen base. Out: the same layers, which hand on what they found in an earlier pass over the row
when they are given it. With adapters on the upper half only, the second of several epochs costs half of a forward pass less,
and no backward pass ever goes below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn


class Trunk:
    """Wraps ``layers``, in order, which must not change and get no gradient."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.hidden: Tensor | None = None
        """[1, T, D] after the last of them, of the present row; None before it was computed."""
        for layer in layers:
            layer.forward = partial(self._forward, layer.forward, layer is layers[-1])

    def begin(self, hidden: Tensor | None) -> None:
        """The next passes are over a row of which ``hidden`` is known, or over a new one."""
        self.hidden = hidden

    def _forward(self, forward: Callable[..., Any], last: bool, hidden: Tensor, *args: Any, **options: Any) -> Any:
        if self.hidden is not None:
            return self.hidden
        out = forward(hidden, *args, **options)
        if last and isinstance(out, Tensor):  # an architecture whose layers return more is computed anew each time
            self.hidden = out.detach()
        return out
