"""The checking child: ``python -m selfplay.check.child JSON`` (a `Request`), events as JSON lines on its own descriptor."""

from __future__ import annotations

import faulthandler
import os
import sys

import msgspec

from selfplay.check.events import Event, Request
from selfplay.check.runner import check_here
from selfplay.errors import ConfigError, EnvironmentFault, UserError

_STACK_BEFORE_S = 2.0


def main(argument: str) -> None:
    """Run the checks and leave at once."""
    request = msgspec.json.decode(argument, type=Request)
    os.set_inheritable(request.events, False)
    faulthandler.dump_traceback_later(max(0.5, request.limit_s - _STACK_BEFORE_S), exit=False)
    with os.fdopen(request.events, "wb", buffering=0) as events:

        def tell(event: Event) -> None:
            events.write(msgspec.json.encode(event) + b"\n")

        try:
            report = check_here(
                request.env, request.params, num_games=request.num_games,
                begin=lambda name: tell(Event(begin=name)), emit=lambda check: tell(Event(check=check)),
                raw_output=lambda: _written(request.output),
            )  # fmt: skip
            tell(Event(report=report))
        except ConfigError as e:
            tell(Event(error=str(e), kind="config"))
        except (UserError, EnvironmentFault) as e:
            tell(Event(error=str(e), kind="user"))
    os._exit(0)  # an environment's threads or exit hooks must not hold the answer back


def _written(output: int) -> tuple[int, str]:
    """(bytes, how they begin) of what went straight to standard output."""
    size = os.fstat(output).st_size
    return size, os.pread(output, 40, 0).decode("utf-8", "replace") if size else ""


if __name__ == "__main__":
    main(sys.argv[1])
