"""A warm start: scripted players show the answer format of an environment, and a base model learns it.

    config, model ─► child: games of scripted players ─► segments ─► supervised learning ─► model folder ─► ResolvedModel

The child is a process of its own (``python -m selfplay.launch.warm_start JSON``), so that torch stays out of the controller
and its memory is given back.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from selfplay.config import Config
from selfplay.errors import EXIT_FAULT, EXIT_OK, SelfplayError, StoreError, TrainerError, UserError
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


class WarmStartJob(msgspec.Struct, frozen=True, kw_only=True):
    """What the child is told."""

    config: Config
    source: str
    target: str


def warm_start(
    config: Config, model: ResolvedModel, target: Path, say: Callable[[str], None]
) -> tuple[ResolvedModel, dict[str, Scalar]]:
    """The warm-started model and its record; made now unless ``target`` has it already.

    Raises `UserError` for players that cannot show anything, `TrainerError` when the learning failed.
    """
    if not (target / RECORD).is_file():
        say(
            f"warm start: {config.warm_start.episodes} games of {config.warm_start.player} teach {model.name} the format"
        )
        _run_child(WarmStartJob(config=config, source=str(model.path), target=str(target)), say)
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
        for line in child.stdout:
            say(line.rstrip())
        errors = child.stderr.read().strip().splitlines()
    if child.returncode:
        last = errors[-1] if errors else "no output"
        kind = TrainerError if child.returncode == EXIT_FAULT else UserError
        raise kind(f"the warm start failed (exit {child.returncode}): {last[:300]}")


def main(argument: str) -> int:
    """The child; it ends with its parent, whose end of standard input stays open as long as it lives."""
    live_with_parent()
    job = msgspec.json.decode(argument, type=WarmStartJob)
    try:
        _learn(job)
    except SelfplayError as error:
        print(str(error).splitlines()[0], file=sys.stderr)
        return EXIT_FAULT if isinstance(error, TrainerError) else 2
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
    report = fit(
        Path(job.source), Path(job.target), segments, warm, seed=config.seed,
        max_tokens=config.train.micro_batch_tokens, say=lambda text: print(text, flush=True),
    )  # fmt: skip
    record: dict[str, Scalar] = {
        "env": spec.id, "player": warm.player, "opponent": warm.opponent, "episodes": len(episodes), "sequences": report.sequences,
        "steps": report.steps, "first_loss": report.first_loss, "last_loss": report.last_loss, "seed": config.seed,
    }  # fmt: skip
    write_bytes(Path(job.target) / RECORD, msgspec.json.encode(record))


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
