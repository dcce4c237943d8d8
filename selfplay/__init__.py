"""selfplay: train several language-model agents against and with each other, and measure honestly whether they improved.

The names below are the public API; the package imports nothing until one of them is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selfplay.agent import Answer, Decision, Message, Player, PlayerContext, PolicyClient, Sampling
    from selfplay.check import check_environment
    from selfplay.environment import Environment, Forfeit, JuryQuestion, Outcome, named_move
    from selfplay.errors import EnvironmentFault, IllegalMove, RunError, SelfplayError, UserError
    from selfplay.registry import make_environment
    from selfplay.types import Episode, Limits, Match, PolicyVersion, SeatAssignment, Turn

_HOMES = {
    "selfplay.agent": ("Answer", "Decision", "Message", "Player", "PlayerContext", "PolicyClient", "Sampling"),
    "selfplay.check": ("check_environment",),
    "selfplay.registry": ("make_environment",),
    "selfplay.environment": ("Environment", "Forfeit", "JuryQuestion", "Outcome", "named_move"),
    "selfplay.errors": ("EnvironmentFault", "IllegalMove", "RunError", "SelfplayError", "UserError"),
    "selfplay.types": ("Episode", "Limits", "Match", "PolicyVersion", "SeatAssignment", "Turn"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Answer",
    "Decision",
    "Environment",
    "EnvironmentFault",
    "Episode",
    "Forfeit",
    "IllegalMove",
    "JuryQuestion",
    "Limits",
    "Match",
    "Message",
    "Outcome",
    "Player",
    "PlayerContext",
    "PolicyClient",
    "PolicyVersion",
    "RunError",
    "Sampling",
    "SeatAssignment",
    "SelfplayError",
    "Turn",
    "UserError",
    "__version__",
    "check_environment",
    "make_environment",
    "named_move",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("selfplay")
    elif name in _HOME_OF:
        value = getattr(import_module(_HOME_OF[name]), name)
    else:
        raise AttributeError(f"module 'selfplay' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
