"""What ``selfplay train`` and ``selfplay resume`` do: plan, run folder, session, and how it ended.

In: a config or a run folder. Out: an exit code; the manifest says the same. A user's mistake is raised as `UserError`
before anything heavy has started.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from selfplay.config import Config, changed_keys, load_config
from selfplay.controller.report import Observer, RunSummary
from selfplay.errors import ConfigError, RunError, StoreError, UserError
from selfplay.launch.local import Session
from selfplay.launch.plan import RunPlan, plan_run
from selfplay.launch.warm_start import FOLDER, RECORD, warm_start
from selfplay.store.adapters import AdapterStore
from selfplay.store.atomic import store_errors
from selfplay.store.checkpoints import Checkpoint, Checkpoints
from selfplay.store.manifest import new_manifest
from selfplay.store.run_folder import RunFolder, check_run_name, default_run_name
from selfplay.types import PolicyVersion

FIXED = (
    "env",
    "env_params",
    "model",
    "name",
    "runs_dir",
    "seed",
    "seats",
    "lora",
    "warm_start",
    "policy.dtype",
    "train.dtype",
    "train.parameters",
    "algorithm.name",
    "league.exploiters",
)
"""What a resumed run may not change: other matches, other tensors, another model, or a state that another algorithm left
would not be the same run."""


def start_run(config: Config, observer: Observer, frozen: Sequence[Path] = ()) -> RunSummary:
    """Train a new run to its end. ``frozen``: version folders of other runs that play in it under the names they have there."""
    if config.name:
        check_run_name(config.name)
    plan = plan_run(config, observer.event)
    _check_frozen(plan, [PolicyVersion(path.parent.name, int(path.name)) for path in frozen])
    with _new_folder(config, plan) as run:
        run.update_manifest(model_digest=plan.serving.model.digest)
        observer.event(f"run folder {run.path}")
        for path in frozen:
            with store_errors(path):
                shutil.copytree(path, run.adapters / path.parent.name / path.name)
        return _drive(plan, run, None, observer)


def _new_folder(config: Config, plan: RunPlan) -> RunFolder:
    """The run's folder; a place that cannot be written is the user's to change."""
    try:
        name = config.name or default_run_name(config.runs_dir, plan.spec.id)
        return RunFolder.create(
            config.runs_dir, name, config, new_manifest(config, name=name, env_source=plan.spec.source)
        )
    except StoreError as error:
        raise ConfigError(f"runs_dir={config.runs_dir}: {error}") from None


def resume_run(path: Path, overrides: Sequence[str], observer: Observer) -> RunSummary:
    """Go on with a run from its newest whole checkpoint; from its start when it never came to one."""
    with RunFolder.own(path) as run:
        config = load_config(run.config_path, overrides)
        _check_changes(run.first_config(), config)
        plan = plan_run(config, observer.event)
        _check_same_parts(plan, run, observer)
        AdapterStore(run.adapters).remove_leftovers()
        _check_frozen(plan, AdapterStore(run.adapters))
        checkpoints = Checkpoints(run.checkpoints, keep=config.checkpoint.keep, say=observer.event)
        checkpoints.remove_leftovers()
        checkpoint = checkpoints.latest()
        run.write_config(config)
        run.update_manifest(status="running", reason="", resumes=run.manifest().resumes + 1)
        observer.event(f"resuming {run.path} at step {checkpoint.step if checkpoint else 0}")
        return _drive(plan, run, checkpoint, observer)


def _warm(plan: RunPlan, run: RunFolder, observer: Observer) -> RunPlan:
    """The plan with the warm-started base where one is asked for; made once, and recorded in the manifest."""
    if not plan.config.warm_start.steps:
        return plan
    folder = run.path / FOLDER
    _remove_unfinished(run, folder)
    try:
        model, record = warm_start(plan.config, plan.serving.model, folder, observer.event)
    except UserError as error:
        run.update_manifest(status="failed", reason=str(error).splitlines()[0])
        raise
    except KeyboardInterrupt:
        observer.event("nothing of the warm start is kept")
        observer.event(f"begin it anew with  selfplay resume {run.path}")
        raise
    run.update_manifest(warm_start=record | {"digest": model.digest})
    return msgspec.structs.replace(plan, serving=msgspec.structs.replace(plan.serving, model=model))


def _remove_unfinished(run: RunFolder, folder: Path) -> None:
    """What a warm start left that never came to its record goes; the base of a run that was played is never made again."""
    if (folder / RECORD).is_file():
        return
    if run.manifest().warm_start:
        raise StoreError(
            f"{folder} is missing or damaged: the adapters of this run belong on the base that its warm start made"
        )
    if folder.exists():
        with store_errors(folder):
            shutil.rmtree(folder)


def _check_changes(before: Config, after: Config) -> None:
    for key in changed_keys(before, after):
        if any(key == fixed or key.startswith(fixed + ".") for fixed in FIXED):
            raise ConfigError(f"{key} cannot change when a run is resumed: start a new run instead")


def _check_frozen(plan: RunPlan, there: AdapterStore | Sequence[PolicyVersion]) -> None:
    """Frozen versions that play, judge or teach are the run's own, or were given to a run that has none yet."""
    if isinstance(there, AdapterStore):
        missing = [v for v in plan.frozen if v not in there.versions(v.agent)]
        where = "the run's adapters do not hold it"
    else:
        missing, where = [v for v in plan.frozen if v not in there], "a new run has no versions yet"
    if missing:
        raise ConfigError(
            f"{missing[0]} is named as a frozen version, and {where}: name an agent or base instead, or resume a run that has it"
        )


def _check_same_parts(plan: RunPlan, run: RunFolder, observer: Observer) -> None:
    manifest = run.manifest()
    if manifest.model_digest and manifest.model_digest != plan.serving.model.digest:
        raise ConfigError(
            f"model {plan.serving.model.name} is not the one this run was started with: its weights differ"
        )
    if manifest.env_source != plan.spec.source:
        observer.event(
            f"the environment was {manifest.env_source} and is {plan.spec.source} now: recorded in the manifest"
        )
        run.update_manifest(env_source=plan.spec.source)


def _drive(plan: RunPlan, run: RunFolder, checkpoint: Checkpoint | None, observer: Observer) -> RunSummary:
    try:
        plan = _warm(plan, run, observer)
        summary = asyncio.run(Session(plan, run, checkpoint, observer).run())
    except (asyncio.CancelledError, KeyboardInterrupt):
        run.update_manifest(status="interrupted", reason="stopped at once by a signal")
        raise KeyboardInterrupt from None
    except RunError as error:
        run.update_manifest(status="failed", reason=str(error).splitlines()[0])
        first = "mend that, then " if isinstance(error, StoreError) else ""
        raise type(error)(f"{error}\n{first}continue with  selfplay resume {run.path}") from error
    run.update_manifest(status=summary.outcome)
    return summary
