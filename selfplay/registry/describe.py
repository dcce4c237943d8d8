"""Describe an environment from outside: its code runs in a short-lived child process and never in the caller.

In: an id and parameters. Out: an `EnvironmentSpec`, or the error that the child met. The child answers on a private
copy of its standard output; whatever the environment prints goes to standard error. An endless import, a crash or a
flood of output ends as one bounded, clear `UserError`.

Run as ``python -m selfplay.registry.describe JSON`` with JSON ``{"env": id, "params": {...}}``.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping

import msgspec

from selfplay.environment import Environment
from selfplay.errors import ConfigError, EnvironmentFault, UserError
from selfplay.registry.adapters import load_adapter
from selfplay.registry.entries import ADAPTERS, find_entry
from selfplay.registry.environments import (
    environment_parameters,
    environment_presets,
    environment_source,
    make_environment,
    resolve_environment_id,
)
from selfplay.registry.spec import EnvironmentSpec
from selfplay.types import Scalar

_SECRET_PARTS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
_MAX_ERROR_BYTES = 4096


class _Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    env: str
    params: dict[str, Scalar]
    names_of: str = ""
    """A scheme whose games are to be listed, instead of an environment."""


class _Reply(msgspec.Struct, frozen=True, kw_only=True):
    spec: EnvironmentSpec | None = None
    names: tuple[str, ...] | None = None
    kind: str = ""
    error: str = ""


def describe(env_id: str, params: Mapping[str, Scalar] | None = None, timeout_s: float = 20.0) -> EnvironmentSpec:
    """What is known of an environment with these parameters, without importing it here.

    Raises `UserError` (or `ConfigError` for a parameter) for everything that keeps it from being described.
    """
    resolved = resolve_environment_id(env_id)
    reply = _asked(resolved, _Request(resolved, dict(params or {})), timeout_s)
    if reply.spec is None:
        raise (ConfigError if reply.kind == "config" else UserError)(reply.error)
    return reply.spec


def adapted_names(scheme: str, timeout_s: float = 60.0) -> tuple[str, ...]:
    """The games of an adapter, asked for in a child process; raises `UserError` when its library is not there."""
    find_entry(ADAPTERS, scheme)
    reply = _asked(f"{scheme}:", _Request(f"{scheme}:", {}, scheme), timeout_s)
    if reply.names is None:
        raise UserError(reply.error)
    return reply.names


def _asked(resolved: str, asked: _Request, timeout_s: float) -> _Reply:
    code, out, err = _run_child(resolved, msgspec.json.encode(asked).decode(), timeout_s)
    try:
        return msgspec.json.decode(out, type=_Reply)
    except msgspec.DecodeError:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        last = err.strip().splitlines()[-1:] or ["no message"]
        raise UserError(f"environment {resolved!r} could not be described: its process {how}: {last[0]}") from None


def scrubbed_environ() -> dict[str, str]:
    """This process's environment variables without those that look like secrets."""
    return {k: v for k, v in os.environ.items() if not any(part in k.upper() for part in _SECRET_PARTS)}


def _run_child(env_id: str, request: str, timeout_s: float) -> tuple[int, bytes, str]:
    """(exit code, standard output, end of standard error) of the describing child, which is killed at the timeout."""
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "selfplay.registry.describe", request],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
            env=scrubbed_environ(), start_new_session=True,
        )  # fmt: skip
        try:
            out, _ = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise UserError(
                f"environment {env_id!r} was not imported and built within {timeout_s:g} s: "
                f"its module or constructor does not return"
            ) from None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - _MAX_ERROR_BYTES))
        return child.returncode, out, errors.read().decode("utf-8", "replace")


def build_spec(env_id: str, params: Mapping[str, Scalar]) -> EnvironmentSpec:
    """Import, build one instance and read it; runs environment code in this process."""
    resolved = resolve_environment_id(env_id)
    game = make_environment(resolved, params, seed=0)
    doc = inspect.cleandoc(type(game).__doc__ or "")
    low, high = game.reward_range
    return EnvironmentSpec(
        id=resolved,
        source=environment_source(resolved),
        seats=_checked_seats(resolved, game),
        zero_sum=bool(game.zero_sum),
        reward_range=(float(low), float(high)),
        max_turns=int(game.max_turns),
        max_move_tokens=int(game.max_move_tokens),
        needs_jury=type(game).jury_questions is not Environment.jury_questions,
        concurrent=bool(game.concurrent),
        forfeit=game.forfeit,
        parameters={p.name: p.default for p in environment_parameters(resolved)},
        presets={k: dict(v) for k, v in environment_presets(resolved).items()},
        doc=doc.partition("\n")[0],
        rules=doc,
    )


def _checked_seats(env_id: str, game: Environment) -> tuple[str, ...]:
    seats = tuple(game.seats)
    if not seats or len(set(seats)) != len(seats) or not all(0 < len(s) <= 200 and s.isprintable() for s in seats):
        raise UserError(
            f"environment {env_id!r} has seats {seats!r}: it needs at least one, each with a name of its own"
        )
    return seats


def _reply(text: str) -> _Reply:
    try:
        request = msgspec.json.decode(text, type=_Request)
        if request.names_of:
            return _Reply(names=tuple(load_adapter(request.names_of).names()))
        return _Reply(spec=build_spec(request.env, request.params))
    except ConfigError as e:
        return _Reply(kind="config", error=str(e))
    except (UserError, EnvironmentFault) as e:
        return _Reply(kind="user", error=str(e))


def main() -> None:
    """Entry of the child: one reply on the real standard output, everything else on standard error."""
    answer = os.dup(1)
    os.dup2(2, 1)
    data = msgspec.json.encode(_reply(sys.argv[1]))
    with os.fdopen(answer, "wb") as out:
        out.write(data)
    os._exit(0)  # an environment's threads or exit hooks must not hold the answer back


if __name__ == "__main__":
    main()
