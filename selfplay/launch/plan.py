"""Everything about a run that is known before anything heavy starts: checked config, environment, agents, model.

In: a config. Out: a `RunPlan`, or a `UserError` of one line. No model is loaded and no process of the run started.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec.structs import replace

from selfplay.config import Config, engine_targets
from selfplay.config.derive import check_adapter_slots, check_config, check_full_size, resolve_transport
from selfplay.controller.anchors import check_anchors
from selfplay.controller.evaluator import plan_evaluation
from selfplay.controller.publisher import Transport
from selfplay.errors import ConfigError, suggestion
from selfplay.evaluation import GameTree
from selfplay.launch.demonstrate import Teacher, check_players
from selfplay.launch.launchers import check_launcher
from selfplay.launch.remote import check_remote
from selfplay.launch.serving import Serving, plan_serving, require_package
from selfplay.league import Matchmaker
from selfplay.league.league import check_league, league_slots
from selfplay.models import ResolvedModel
from selfplay.models.machine import has_gpu
from selfplay.registry import AGENTS, EnvironmentSpec, describe, list_entries
from selfplay.scoring import Algorithm, Panel, load_algorithm, load_panel
from selfplay.tournament.spec import TournamentSpec
from selfplay.types import BASE, PolicyVersion

PROBE_BOUND: dict[str, float] = {"float32": 0.02, "bfloat16": 0.15}
"""Mean |Δlogprob| between trainer and engine that is still rounding, by dtype of the base."""


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What will run."""

    config: Config
    spec: EnvironmentSpec
    matchmaker: Matchmaker
    algorithm: Algorithm
    agents: tuple[str, ...]
    """Trained agents, sorted."""
    frozen: tuple[PolicyVersion, ...]
    """Frozen versions that play or judge."""
    slots: int
    """Adapter versions the engine holds at once."""
    serving: Serving
    panel: Panel
    """The scorers."""
    judges: dict[str, Serving]
    """Scorer → the other model that is served for it."""
    transport: Transport
    train_dtype: Literal["float32", "bfloat16"]
    """Of the trainer's frozen base."""
    max_move_tokens: int
    tree: GameTree | None
    """The whole game, where ``eval.every`` asks for exact evaluation."""


def plan_run(config: Config, say: Callable[[str], None]) -> RunPlan:
    """Check everything that can be checked early. ``say`` hears of what takes seconds."""
    check_config(config)
    algorithm = load_algorithm(config.algorithm)
    spec = describe(config.env, dict(config.env_params))
    if (warm := config.warm_start).steps:
        check_players(spec, config.env_params, Teacher(warm.player, warm.options), warm.opponent)
    if spec.id != config.env:
        say(f"environment {config.env} is {spec.id}")
    config = one_at_a_time(config, spec, say)
    matchmaker = Matchmaker(spec, config, known_players=[e.id for e in list_entries(AGENTS)])
    check_remote(config, matchmaker.match(0))
    tree = plan_evaluation(config, matchmaker.match(0).seats)
    check_anchors(config.eval.anchors, [e.id for e in list_entries(AGENTS)], matchmaker.match(0))
    require_package("torch", "train", "training")
    check_launcher(config)
    panel = load_panel(config)
    _check_scorers(config, matchmaker)
    trained = matchmaker.trained_agents
    frozen = tuple(sorted({*matchmaker.frozen_versions, *panel.teachers()}))
    check_league(config.league, trained, [e.id for e in list_entries(AGENTS)])
    num_frozen = len(frozen) + league_slots(config.league, len(trained))
    slots = check_adapter_slots(config, num_trained=len(trained), num_frozen=num_frozen)
    transport = resolve_transport(config, has_gpu=has_gpu())
    serving = plan_serving(config, say)
    if config.train.parameters == "full":
        check_full_size(config, serving.model.num_parameters)
    else:
        _check_targets(config, serving.model)
    max_move_tokens = config.rollout.max_tokens or spec.max_move_tokens
    _check_context(max_move_tokens, serving)
    return RunPlan(
        config=config, spec=spec, matchmaker=matchmaker, algorithm=algorithm, agents=trained, frozen=frozen, slots=slots,
        serving=serving, transport=transport, panel=panel,
        judges={n: plan_serving(replace(config, model=s.model), say) for n, s in config.scorers.items() if s.model},
        train_dtype=serving.dtype if config.train.dtype == "auto" else config.train.dtype,
        max_move_tokens=max_move_tokens, tree=tree,
    )  # fmt: skip


def one_at_a_time(config: Config, spec: EnvironmentSpec, say: Callable[[str], None]) -> Config:
    """The config with as many games per worker as the environment allows."""
    allowed = spec.games_at_once(config.rollout.concurrency)
    if allowed == config.rollout.concurrency:
        return config
    say(
        f"{spec.id} is played one game at a time in each of {config.rollout.workers} workers, as it declares; rollout.workers sets how many"
    )
    return replace(config, rollout=replace(config.rollout, concurrency=allowed))


def gate_spec(plan: RunPlan) -> TournamentSpec:
    """The run's game, as the folder of the gate's games says it."""
    config, match = plan.config, plan.matchmaker.match(0)
    return TournamentSpec(
        env=match.env, env_source=plan.spec.source, env_params=plan.spec.values(match.env_params), seats=tuple(s.seat for s in match.seats),
        players=(), pairs=config.league.gate_pairs, seed=config.seed, model=config.model, jury=config.jury,
        temperature=config.rollout.temperature, max_move_tokens=plan.max_move_tokens, limits=match.limits,
    )  # fmt: skip


def _check_scorers(config: Config, matchmaker: Matchmaker) -> None:
    known = (BASE, *matchmaker.trained_agents)
    for name, scorer in config.scorers.items():
        agent = scorer.agent
        if agent and "@" not in agent and agent not in known:
            raise ConfigError(
                f"scorers.{name}.agent={agent!r}: it must be base, agent@n, or a trained agent{suggestion(agent, known)}"
            )


def _check_context(max_move_tokens: int, serving: Serving) -> None:
    if max_move_tokens >= serving.max_model_len:
        raise ConfigError(
            f"an answer of {max_move_tokens} tokens leaves no room for a prompt in the {serving.max_model_len} that model {serving.model.name} "
            "is served with: lower rollout.max_tokens, or raise policy.max_model_len (at most the model's own length)"
        )


def _check_targets(config: Config, model: ResolvedModel) -> None:
    for target in engine_targets(config):
        if target not in model.linear_names:
            raise ConfigError(
                f"lora.targets: model {model.name} has no {target}; it has {', '.join(model.linear_names)}"
            )
    if config.lora.layers > model.num_layers:
        raise ConfigError(
            f"lora.layers={config.lora.layers}: model {model.name} has {model.num_layers} layers; 0 means all of them"
        )
