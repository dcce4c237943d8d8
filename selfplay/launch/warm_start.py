"""A warm start: scripted players show the answer format of an environment, and a base model learns it.

    config, model ─► child: games of scripted players ─► segments ─► supervised learning ─► model folder ─► ResolvedModel

The child is a process of its own (``python -m selfplay.launch.warm_start JSON``), so that torch stays out of the controller
and its memory is given back.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from selfplay.config import Config
from selfplay.errors import EXIT_FAULT, EXIT_OK, EXIT_USER, SelfplayError, StoreError, TrainerError, UserError
from selfplay.models import ResolvedModel
from selfplay.models.cache import cache_folder
from selfplay.models.folder import inspect_folder
from selfplay.process import live_with_parent
from selfplay.registry import describe
from selfplay.store.atomic import write_bytes
from selfplay.store.run_folder import RunFolder
from selfplay.types import Episode, Scalar

FOLDER = "warm_start"
"""In a run folder: the base model that the run plays with."""
RECORD = "warm_start.json"
"""In that folder: where it comes from."""
EXIT_STORE = 3
"""How the child says that the disk is the fault."""
_KINDS: dict[int, type[SelfplayError]] = {EXIT_USER: UserError, EXIT_STORE: StoreError}
"""Exit code of the child → what it raises here; all others are the learning's own fault, among them every violent end."""


class WarmStartJob(msgspec.Struct, frozen=True, kw_only=True):
    """What the child is told."""

    config: Config
    model: str
    """Name of the model that learns, as the user wrote it."""
    digest: str
    """sha256 over its weight files."""
    source: str
    target: str


def warm_start(
    config: Config, model: ResolvedModel, target: Path, say: Callable[[str], None]
) -> tuple[ResolvedModel, dict[str, Scalar]]:
    """The warm-started model and its record; made now unless ``target`` has it already.

    Raises `UserError` for players that cannot show anything, `StoreError` when the folder cannot be written, `TrainerError`
    when the learning failed or its process was ended.
    """
    if not (target / RECORD).is_file():
        say(
            f"warm start: {config.warm_start.episodes} games of {config.warm_start.player} teach {model.name} the format"
        )
        job = WarmStartJob(
            config=config, model=model.name, digest=model.digest, source=str(model.path), target=str(target)
        )
        _run_child(job, say)
    record = msgspec.json.decode((target / RECORD).read_bytes(), type=dict[str, Scalar])
    return inspect_folder(model.name, target, model.kind, cache_folder(None)), record


def base_model(run: RunFolder) -> str:
    """The model that a run's adapters belong on: the one it names, or what its warm start made of that.

    Raises `StoreError` when that is gone: on the model as it was before, the adapters would be other players.
    """
    if not run.config().warm_start.steps:
        return run.config().model
    folder = run.path / FOLDER
    if not (folder / "config.json").is_file():
        raise StoreError(f"{folder} is missing: the adapters of this run belong on the base that its warm start made")
    return str(folder)


def _run_child(job: WarmStartJob, say: Callable[[str], None]) -> None:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "selfplay.launch.warm_start", msgspec.json.encode(job).decode()]
    with subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        try:
            for line in child.stdout:
                say(line.rstrip())
            errors = child.stderr.read().strip().splitlines()
        except BaseException:  # whoever leaves here leaves nobody behind who still writes
            child.kill()
            child.wait()
            raise
    if child.returncode:
        last = errors[-1] if errors else "no output"
        kind = _KINDS.get(child.returncode, TrainerError)
        raise kind(f"the warm start failed ({_ending(child.returncode)}): {last[:300]}")


def _ending(code: int) -> str:
    with contextlib.suppress(ValueError):
        return f"ended by {signal.Signals(-code).name}"
    return f"exit {code}"


def main(argument: str) -> int:
    """The child; it ends with its parent, whose end of standard input stays open as long as it lives."""
    live_with_parent()
    job = msgspec.json.decode(argument, type=WarmStartJob)
    try:
        _learn(job)
    except SelfplayError as error:
        print(str(error).splitlines()[0], file=sys.stderr)
        return next((code for code, kind in _KINDS.items() if isinstance(error, kind)), EXIT_FAULT)
    return EXIT_OK


def _learn(job: WarmStartJob) -> None:
    from selfplay.launch.demonstrate import Teacher, demonstrations
    from selfplay.policy.chat import HfChat
    from selfplay.scoring import episode_segments
    from selfplay.training.sft import fit

    config, warm = job.config, job.config.warm_start
    spec = describe(config.env, dict(config.env_params))
    episodes = demonstrations(
        spec, config.env_params, teacher=Teacher(warm.player, warm.options), num=warm.episodes, seed=config.seed,
        chat=HfChat(job.source), opponent=warm.opponent, options={name: seat.options for name, seat in config.seats.items() if seat.player == "llm"},
    )  # fmt: skip
    _check_length(episodes, config.rollout.max_tokens or spec.max_move_tokens)
    segments = [s for e in episodes for s in episode_segments(e, dict.fromkeys(spec.seats, 1.0))]
    fit(
        Path(job.source), Path(job.target), segments, warm, seed=config.seed,
        max_tokens=config.train.micro_batch_tokens, say=lambda text: print(text, flush=True),
        complete=lambda folder, report: write_bytes(
            folder / RECORD, msgspec.json.encode(_asked(job) | msgspec.structs.asdict(report))
        ),
    )  # fmt: skip


def _asked(job: WarmStartJob) -> dict[str, Scalar]:
    """What it takes to make the same model again, options under the keys that they have in a config."""
    config, warm = job.config, job.config.warm_start
    asked: dict[str, Scalar] = {
        "source": job.model, "source_digest": job.digest, "env": describe(config.env, dict(config.env_params)).id,
        "player": warm.player, "opponent": warm.opponent, "episodes": warm.episodes, "batch": warm.batch, "lr": warm.lr,
        "seed": config.seed, "micro_batch_tokens": config.train.micro_batch_tokens,
    }  # fmt: skip
    options = {"options": warm.options, "env_params": config.env_params}
    options |= {f"seats.{name}.options": s.options for name, s in config.seats.items() if s.player == "llm"}
    return asked | {f"{where}.{key}": value for where, some in options.items() for key, value in some.items()}


def _check_length(episodes: Sequence[Episode], max_tokens: int) -> None:
    """Raise `UserError` for an answer that the model could learn and then never say to its end."""
    longest = max(
        (t for e in episodes for t in e.turns if t.sampled_ids), key=lambda t: len(t.sampled_ids), default=None
    )
    if longest is not None and (needed := len(longest.sampled_ids)) - 1 > max_tokens:
        raise UserError(
            f"the answer {longest.text[:80]!r} has {needed} tokens for this model with the end of its turn, and play allows {max_tokens}: "
            f"set rollout.max_tokens={needed}"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
