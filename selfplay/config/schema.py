"""Every setting of a run, typed and documented; ``selfplay train --print-config`` shows the effective values."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from selfplay.config.league import LeagueConfig
from selfplay.config.remote import RemoteConfig
from selfplay.types import Scalar

Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class SeatConfig(_Section, frozen=True):
    """Who sits at a seat; the default is a trained LoRA agent named after the seat."""

    player: Annotated[str, Meta(description="agent kind: llm, or a registered bot such as random")] = "llm"
    agent: Annotated[str, Meta(description="adapter lineage, agent@n for a frozen version, or base")] = ""
    options: Annotated[dict[str, Scalar], Meta(description="options of the agent kind")] = {}


class LoraConfig(_Section, frozen=True):
    """The adapter of every agent, unless ``agents.NAME`` says otherwise."""

    rank: Annotated[int, Meta(ge=1, le=512, description="LoRA rank; the engine is sized for the largest")] = 8
    alpha: Annotated[float, Meta(gt=0, description="LoRA alpha; the scale is alpha / rank")] = 16.0
    rslora: Annotated[bool, Meta(description="rank-stabilised: the scale is alpha / √rank")] = False
    targets: Annotated[tuple[str, ...], Meta(description="projections that get an adapter")] = (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    )  # fmt: skip
    layers: Annotated[
        Natural,
        Meta(
            description="only the last so many layers get an adapter: what lies below is computed once a step; 0: all"
        ),
    ] = 0


class AgentConfig(_Section, frozen=True):
    """What one agent does differently."""

    lr: Annotated[Positive | None, Meta(description="learning rate; train.lr when unset")] = None
    clip_norm: Annotated[Positive | None, Meta(description="gradient clip; train.clip_norm when unset")] = None
    rank: Annotated[Annotated[int, Meta(ge=1, le=512)] | None, Meta(description="LoRA rank; lora.rank when unset")] = (
        None
    )
    alpha: Annotated[Positive | None, Meta(description="LoRA alpha; lora.alpha when unset")] = None
    rslora: Annotated[bool | None, Meta(description="rank-stabilised or not; lora.rslora when unset")] = None
    targets: Annotated[tuple[str, ...], Meta(description="adapted projections; lora.targets when empty")] = ()


class TrainConfig(_Section, frozen=True):
    """The optimizer side."""

    parameters: Annotated[
        Literal["lora", "full"],
        Meta(
            description="what an agent trains. lora: an adapter; full: every parameter of a small model, each agent a set of its own"
        ),
    ] = "lora"
    steps: Annotated[Natural, Meta(description="optimizer steps")] = 3
    batch: Annotated[Count, Meta(description="episodes per step, of all agents together")] = 8
    ranks: Annotated[int, Meta(ge=1, le=4096, description="trainer processes (FSDP2 data parallel)")] = 1
    lr: Annotated[Positive, Meta(description="AdamW learning rate")] = 3e-4
    betas: Annotated[tuple[float, float], Meta(description="AdamW betas")] = (0.9, 0.95)
    weight_decay: Annotated[NonNegative, Meta(description="AdamW weight decay, on what agents train only")] = 0.0
    clip_norm: Annotated[Positive, Meta(description="gradient norm clip, per agent")] = 1.0
    warmup_steps: Annotated[Natural, Meta(description="linear warm-up steps, counted per agent")] = 0
    schedule: Annotated[
        Literal["constant", "linear", "cosine"], Meta(description="learning rate after the warm-up, until decay_steps")
    ] = "constant"
    decay_steps: Annotated[
        Count | None,
        Meta(
            description="optimizer steps after which schedule linear and cosine have reached final_lr_share; train.steps when unset"
        ),
    ] = None
    final_lr_share: Annotated[float, Meta(ge=0, le=1, description="share of lr that linear and cosine end at")] = 0.0
    alternate: Annotated[
        Natural, Meta(description="agents learn in turns of so many steps, the others frozen meanwhile; 0: all at once")
    ] = 0
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Meta(description="dtype of the frozen base; adapters stay float32. auto: as the policy engine"),
    ] = "auto"
    shard: Annotated[
        Literal["auto", "base", "none"], Meta(description="FSDP2: shard the frozen base, or keep it whole on each rank")
    ] = "auto"
    micro_batch_tokens: Annotated[Count, Meta(description="tokens of one packed row (one forward and backward)")] = 4096
    activation_checkpointing: Annotated[bool, Meta(description="recompute activations: less memory, more time")] = False
    threads: Annotated[Count, Meta(description="CPU threads of each rank")] = 1
    timeout_s: Annotated[Positive, Meta(description="longest a step may take before the run ends with a fault")] = 600.0


class AlgorithmConfig(_Section, frozen=True):
    """How rewards become a loss: docs/algorithms.md has the formulas."""

    name: Annotated[
        str, Meta(description="registered algorithm: rae, grpo, dr_grpo, rloo, reinforce, reinforce_pp")
    ] = "rae"
    baseline_decay: Annotated[float, Meta(ge=0, lt=1, description="decay of the (agent, seat) reward baseline")] = 0.95
    group: Annotated[
        Count, Meta(description="matches of one scenario (same seed); grpo, dr_grpo, rloo compare them")
    ] = 1
    discount: Annotated[
        float,
        Meta(gt=0, le=1, description="turn-level credit: reward of a turn that is k turns of its seat from the end"),
    ] = 1.0
    illegal_penalty: Annotated[
        NonNegative, Meta(description="taken from the advantage of a turn without a legal move")
    ] = 0.0
    length: Annotated[
        Literal["token", "sequence", "constant"],
        Meta(
            description="mean over the agent's tokens, over its sequences' means, or sequences' sums over length_constant"
        ),
    ] = "token"
    length_constant: Annotated[Positive, Meta(description="tokens by which length=constant divides a sequence")] = 64.0
    loss: Annotated[
        Literal["reinforce", "ppo", "gspo", "cispo", "dppo_tv"],
        Meta(description="what is done with the ratio to the anchor: nothing, clip per token, per sequence, ..."),
    ] = "reinforce"
    anchor: Annotated[
        Literal["trainer", "rollout"],
        Meta(description="denominator of that ratio: the trainer at the step's start, or the engine that sampled"),
    ] = "trainer"
    clip_low: Annotated[NonNegative, Meta(description="ratio is clipped below 1 − clip_low")] = 0.2
    clip_high: Annotated[NonNegative, Meta(description="ratio is clipped above 1 + clip_high")] = 0.2
    tv_bound: Annotated[NonNegative, Meta(description="dppo_tv: largest change of a token's probability")] = 0.2
    correction: Annotated[
        Literal["none", "importance", "token_tis", "sequence_tis", "icepop", "geometric"],
        Meta(description="off-policy weight from the trainer/rollout probability ratio"),
    ] = "token_tis"
    tis_cap: Annotated[
        Positive, Meta(description="truncated importance sampling: cap on trainer/rollout probability ratio")
    ] = 2.0
    keep_ratio: Annotated[tuple[float, float], Meta(description="icepop: tokens whose ratio lies within are kept")] = (
        0.5,
        5.0,
    )
    keep_mean_ratio: Annotated[
        tuple[float, float], Meta(description="geometric: sequences whose mean ratio lies within are kept")
    ] = (0.99, 1.01)
    epochs: Annotated[Count, Meta(description="updates per batch; more than 1 wants a clipped loss")] = 1
    kl: Annotated[NonNegative, Meta(description="weight of the divergence from the reference")] = 0.0
    kl_estimator: Annotated[
        Literal["k1", "k2", "k3", "full"],
        Meta(description="full: over the whole vocabulary; the others from sampled tokens"),
    ] = "full"
    kl_in: Annotated[Literal["loss", "reward"], Meta(description="where the divergence goes in")] = "loss"
    reference: Annotated[
        Literal["base", "moving"],
        Meta(
            description="base: the model without its adapter; moving: the agent itself, renewed every reference_every steps"
        ),
    ] = "base"
    reference_every: Annotated[
        Count, Meta(description="the agent's steps after which a moving reference is renewed")
    ] = 60
    entropy: Annotated[NonNegative, Meta(description="weight of the entropy bonus")] = 0.0


class WarmStartConfig(_Section, frozen=True):
    """Supervised learning of the answer format from scripted players' games, before the run: a base of its own."""

    steps: Annotated[Natural, Meta(description="optimizer steps on the whole base model; 0: no warm start")] = 0
    player: Annotated[str, Meta(description="agent kind whose moves are the answers")] = "random"
    options: Annotated[dict[str, Scalar], Meta(description="options of that agent kind")] = {}
    opponent: Annotated[
        str,
        Meta(
            description="agent kind that it meets, from each seat in turn, and that nothing is learnt from; empty: itself"
        ),
    ] = ""
    episodes: Annotated[Count, Meta(description="games that it plays")] = 256
    batch: Annotated[Count, Meta(description="sequences per step")] = 64
    lr: Annotated[Positive, Meta(description="AdamW learning rate, falling to 0")] = 3e-3


class ScorerConfig(_Section, frozen=True):
    """One scorer: what it is, whom it asks, what its word weighs."""

    kind: Annotated[
        str, Meta(description="registered scorer: environment, legality, jury, process, teacher; empty: its name")
    ] = ""
    agent: Annotated[
        str, Meta(description="whom it asks: base, agent@n, or a trained agent's current version; empty: base")
    ] = ""
    model: Annotated[str, Meta(description="another model that is served for it alone; empty: the run's own")] = ""
    weight: Annotated[float, Meta(description="factor of what it says")] = 1.0
    concurrency: Annotated[int, Meta(ge=1, le=100000, description="episodes it scores at once")] = 8
    timeout_s: Annotated[
        Positive, Meta(description="longest for one episode; then the episode is dropped and counted")
    ] = 120.0
    options: Annotated[dict[str, Scalar], Meta(description="options of the scorer")] = {}


class BufferConfig(_Section, frozen=True):
    """Whole episodes between generation and training."""

    depth: Annotated[
        Natural | Literal["unbounded"],
        Meta(
            description="batches generation may run ahead: 0 synchronous, 1 double buffer, K bounded (no trained episode lags more versions), unbounded: a stream that waits for no game; needs max_staleness"
        ),
    ] = 1
    max_staleness: Annotated[
        Natural | None,
        Meta(description="episodes staler than so many versions are dropped and counted; unset: depth alone bounds it"),
    ] = None
    max_episodes: Annotated[Count, Meta(description="most episodes held")] = 4096
    max_bytes: Annotated[Count, Meta(description="most bytes held")] = 256 << 20


class RolloutConfig(_Section, frozen=True):
    """Environment pools and how episodes are played."""

    workers: Annotated[int, Meta(ge=1, le=4096, description="environment worker processes")] = 1
    concurrency: Annotated[int, Meta(ge=1, le=100000, description="episodes at once in each worker")] = 16
    temperature: Annotated[Positive, Meta(description="sampling temperature; training uses the same")] = 1.0
    top_k: Annotated[
        int, Meta(ge=0, le=64, description="sample among the k likeliest tokens; training repeats the choice. 0: all")
    ] = 0
    top_p: Annotated[
        float, Meta(gt=0, le=1, description="sample among the likeliest tokens of this mass; below 1 it needs top_k")
    ] = 1.0
    max_tokens: Annotated[Natural, Meta(description="tokens per move; 0: what the environment declares")] = 0
    max_turns: Annotated[
        Natural, Meta(description="turns per episode before it is truncated; 0: what the environment declares")
    ] = 0
    max_episode_tokens: Annotated[
        Count, Meta(description="prompt and sampled tokens per episode before it is truncated")
    ] = 65_536
    episode_timeout_s: Annotated[
        Positive, Meta(description="wall-clock limit of an episode before it is truncated")
    ] = 300.0
    request_timeout_s: Annotated[Positive, Meta(description="limit of one generation request")] = 120.0
    partial: Annotated[
        Literal["continue", "abort_resume", "cancel_group", "drain"],
        Meta(
            description="what a new version does to play under way. continue: nothing; abort_resume: answers are aborted and go on from their tokens under the new version; cancel_group: games that are too old begin anew; drain: games under way end first"
        ),
    ] = "continue"
    max_restarts: Annotated[
        Natural, Meta(description="restarts of environment workers in a run before it ends with a fault")
    ] = 5
    max_failures: Annotated[Natural, Meta(description="failed episodes in a row before the run ends with a fault")] = 20


class PolicyConfig(_Section, frozen=True):
    """The policy server."""

    engine: Annotated[
        Literal["auto", "vllm", "transformers"],
        Meta(description="auto: vllm where it is installed, else transformers; said at start"),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Meta(
            description="dtype of the served base; auto: as the model is stored, but float32 on a CPU that only emulates bfloat16"
        ),
    ] = "auto"
    engines: Annotated[Count, Meta(description="policy servers (data parallel); an episode stays with one of them")] = 1
    max_model_len: Annotated[int, Meta(ge=64, description="longest context in tokens; not above the model's own")] = (
        2048
    )
    max_live_adapters: Annotated[
        Natural, Meta(description="adapter versions in one engine batch; 0: derived from agents, depth and opponents")
    ] = 0
    max_rank: Annotated[
        int, Meta(ge=0, le=512, description="largest LoRA rank the engine is sized for; 0: lora.rank")
    ] = 0
    max_num_seqs: Annotated[Count, Meta(description="sequences in one engine batch")] = 64
    kv_cache_mb: Annotated[Count, Meta(description="KV cache of the CPU engine")] = 512
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1, description="share of GPU memory for the engine")] = 0.5
    threads: Annotated[Count, Meta(description="CPU threads of the engine")] = 1
    start_timeout_s: Annotated[Positive, Meta(description="longest the engine may take to start")] = 300.0


class SyncConfig(_Section, frozen=True):
    """How adapter versions reach the engine."""

    transport: Annotated[
        Literal["auto", "nccl", "gloo", "shm", "file"], Meta(description="auto: nccl on GPUs, gloo on CPU")
    ] = "auto"
    interrupt: Annotated[
        Literal["turn", "episode", "token", "drain", "blocking"],
        Meta(
            description="when a new version answers. turn: from the next turn on; episode: one version per agent and episode; token: from the next token on, in mid-answer; drain: when the agent's answers under way are done; blocking: generation of everybody stands still during the sync"
        ),
    ] = "turn"
    cache: Annotated[
        Literal["keep", "recompute"],
        Meta(
            description="with interrupt=token, the keys and values of what an answer has so far. keep: of the old version; recompute: under the new one"
        ),
    ] = "keep"
    timeout_s: Annotated[Positive, Meta(description="longest one sync may take before it is given up")] = 60.0
    retries: Annotated[
        Natural,
        Meta(
            description="further tries of a sync that failed, while the old version serves, before the run ends with a fault"
        ),
    ] = 2
    probe_mean: Annotated[
        NonNegative,
        Meta(
            description="bound on mean |Δlogprob| trainer against engine after each sync; 0: by dtype (0.02 in float32, 0.15 in bfloat16)"
        ),
    ] = 0.0


class JuryConfig(_Section, frozen=True):
    """Who judges environments that ask for a jury."""

    agent: Annotated[str, Meta(description="base, agent@n, or api")] = "base"
    api_base: Annotated[str, Meta(description="OpenAI-compatible address of an API jury")] = ""
    api_model: Annotated[str, Meta(description="model name of an API jury; the key is read from SELFPLAY_API_KEY")] = ""


class EvalConfig(_Section, frozen=True):
    """What a run measures of itself while it trains."""

    every: Annotated[
        Natural,
        Meta(
            description="steps between evaluations of the current versions, the last step has one in any case; 0: none"
        ),
    ] = 0
    exact: Annotated[
        bool, Meta(description="NashConv from the whole game tree; false for games that are too large for it")
    ] = True
    anchors: Annotated[
        tuple[str, ...], Meta(description="players that never change, which the current versions meet: bots, or base")
    ] = ()
    games: Annotated[Count, Meta(description="games against each anchor from each trained seat")] = 50


class CheckpointConfig(_Section, frozen=True):
    """What a resume can go back to."""

    every: Annotated[Count, Meta(description="steps between checkpoints")] = 1
    keep: Annotated[Count, Meta(description="checkpoints kept")] = 2


class LaunchConfig(_Section, frozen=True):
    """Who starts the processes of a run."""

    orchestration: Annotated[
        Literal["local", "ray"],
        Meta(description="local: child processes of the controller; ray: actors in a placement group on its host"),
    ] = "local"
    ray_address: Annotated[str, Meta(description="ray cluster to join, for example auto; empty: start one here")] = ""
    start_timeout_s: Annotated[
        Positive, Meta(description="longest the cluster may take to find room, and to start a process")
    ] = 300.0


class Config(_Section, frozen=True):
    """One training run."""

    env: Annotated[str, Meta(description="environment id, for example debate-v0")] = ""
    env_params: Annotated[dict[str, Scalar], Meta(description="parameters of the environment")] = {}
    model: Annotated[str, Meta(description="smollm2-135m, tiny, a local folder, or a hub id")] = "smollm2-135m"
    name: Annotated[str, Meta(description="run name; empty: environment and time")] = ""
    runs_dir: Annotated[str, Meta(description="where run folders are made")] = "runs"
    seed: Annotated[int, Meta(ge=0, lt=2**31, description="decides matches, environments and initial adapters")] = 0
    stall_timeout_s: Annotated[
        Positive, Meta(description="the run ends with a fault when nothing moved for so long")
    ] = 300.0
    seats: Annotated[dict[str, SeatConfig], Meta(description="seat → who sits there")] = {}
    agents: Annotated[dict[str, AgentConfig], Meta(description="agent → what it does differently")] = {}
    lora: LoraConfig = LoraConfig()
    train: TrainConfig = TrainConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    scorers: Annotated[
        dict[str, ScorerConfig], Meta(description="scorer → settings; none set: the environment's reward alone")
    ] = {}
    warm_start: WarmStartConfig = WarmStartConfig()
    buffer: BufferConfig = BufferConfig()
    rollout: RolloutConfig = RolloutConfig()
    policy: PolicyConfig = PolicyConfig()
    sync: SyncConfig = SyncConfig()
    jury: JuryConfig = JuryConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    launch: LaunchConfig = LaunchConfig()
    league: LeagueConfig = LeagueConfig()
    remote: RemoteConfig = RemoteConfig()
