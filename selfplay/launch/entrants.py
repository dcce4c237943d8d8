"""From what stands on a command line to players: bots, the base model, checkpoints of runs.

In: words such as ``random``, ``base``, ``runs/a``, ``runs/a/adapters/pro``, ``runs/a/adapters/pro/7`` or a pattern of them. Out:
`Entrant`s with their adapters under names that one engine can serve together. All adapters must be of one base model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from selfplay.config import Config
from selfplay.config.load import parse_override
from selfplay.config.schema import JuryConfig
from selfplay.errors import ConfigError, StoreError, UnknownNameError, UserError
from selfplay.launch.serve import Adapter
from selfplay.launch.warm_start import base_model
from selfplay.play.chat_api import ChatApi, api_base
from selfplay.registry import AGENTS, Parameter, check_values, list_entries
from selfplay.store.adapters import AdapterStore
from selfplay.store.peft_format import read_config, whole_modules
from selfplay.store.run_folder import RunFolder
from selfplay.tournament.spec import Entrant
from selfplay.types import BASE, PolicyVersion, check_name

DEFAULT_MODEL = "smollm2-135m"
NOT_ENTRANTS = ("human",)
_OPTION = re.compile(r":(?=[a-z_]+=)")


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """Everybody who plays, and how to serve the models among them."""

    entrants: tuple[Entrant, ...]
    adapters: tuple[Adapter, ...]
    judge: Entrant | None = None
    config: Config
    """Of the policy server; its model is that of the runs."""

    @property
    def judge_agent(self) -> str:
        """What a jury configuration calls the judge."""
        return "" if self.judge is None else f"{self.judge.agent}@{self.judge.version}"

    @property
    def needs_model(self) -> bool:
        return any(e.player == "llm" for e in self.entrants)


def read_field(
    words: Sequence[str], *, model: str | None, config: Config | None = None, judge: str | None = None
) -> Field:
    """The players that ``words`` name, and the adapter that judges them, if one is to.

    Raises `UserError` for a word that names none, or adapters of different models.
    """
    entrants: list[Entrant] = []
    judging = [] if judge is None else [_checkpoint(_judge(judge))]
    folders: list[Path] = [Path(j.adapter) for j in judging]
    for word in words:
        found = _paths(word)
        folders += found
        entrants += [_checkpoint(path) for path in found] if found else [_bot(word)]
    entrants = _distinct(entrants)
    config = _config(folders, model, config)
    served: list[Entrant] = []
    adapters: list[Adapter] = []
    for entrant in [*entrants, *judging]:
        if entrant.adapter:
            adapters.append(_adapter(entrant, len(adapters)))
            version = adapters[-1].served
            entrant = msgspec.structs.replace(entrant, agent=version.agent, version=version.version)
        served.append(entrant)
    return Field(
        entrants=tuple(served[: len(entrants)]), adapters=tuple(adapters), config=config,
        judge=served[-1] if judging else None,
    )  # fmt: skip


def adapters_of(entrants: Sequence[Entrant]) -> tuple[Adapter, ...]:
    """The adapters of players read back from a spec; `StoreError` for one that is not what it was."""
    out = []
    for entrant in entrants:
        if entrant.adapter:
            path = Path(entrant.adapter)
            stored = PolicyVersion(path.parent.name, int(path.name))
            info = AdapterStore(path.parents[1]).verify(stored)
            if info.digest != entrant.digest:
                raise StoreError(f"{path} is another adapter than {entrant.name} was: its digest differs")
            served = PolicyVersion(entrant.agent, entrant.version or 0)
            out.append(Adapter(served=served, stored=stored, root=str(path.parents[1])))
    return tuple(out)


def read_jury(word: str) -> JuryConfig | None:
    """``base``, or ``api:model=NAME`` with ``base=URL`` or SELFPLAY_API_BASE, checked; None for what must be an adapter."""
    name, *rest = _OPTION.split(word)
    if word == BASE:
        return JuryConfig()
    if name != "api":
        return None
    known = [Parameter(name=option, kind="str", default="") for option in ("base", "model")]
    options = check_values("jury api", known, dict(parse_override(part) for part in rest))
    base, model = api_base(str(options["base"])), str(options["model"])
    ChatApi(base, model)  # a wrong address or name is said now
    return JuryConfig(agent="api", api_base=base, api_model=model)


def _judge(word: str) -> Path:
    """The one version folder that ``word`` names."""
    found = _paths(word)
    if len(found) != 1:
        raise UserError(
            f"a jury is base, api:model=NAME, or one adapter, runs/NAME/adapters/AGENT/N: {word!r} names {len(found) or 'none'}"
        )
    return found[0]


def _paths(word: str) -> list[Path]:
    """Version folders that a word names: itself, those of an agent, the newest of each agent of a run, or by pattern."""
    if any(c in word for c in "*?["):
        pattern = Path(word).expanduser()
        top = Path(pattern.anchor or ".")
        names = sorted(map(str, top.glob(str(pattern.relative_to(top)))), key=_natural)
        found = [version for name in names for version in _versions(Path(name))]
        if not found:
            raise UserError(f"{word!r} matches no checkpoint: name adapter folders such as runs/NAME/adapters/AGENT/7")
        return found
    path = Path(word).expanduser()
    if not path.is_dir():
        if "/" in word:
            raise UserError(f"{word} is no folder: name a run, runs/NAME/adapters/AGENT, or one version below it")
        return []
    found = _versions(path)
    if not found and "/" in word:
        raise UserError(
            f"{word} holds no adapter version: name a run, runs/NAME/adapters/AGENT, or one version below it"
        )
    return found


def _versions(path: Path) -> list[Path]:
    if (path / "version.json").is_file():
        return [path]
    if (path / "manifest.json").is_file():
        store = AdapterStore(RunFolder.open(path).adapters)
        return [store.path(v) for a in store.agents() if (v := store.latest(a)) is not None]
    numbered = [p for p in path.iterdir() if (p / "version.json").is_file()] if path.is_dir() else []
    return sorted(numbered, key=lambda p: _natural(str(p)))


def _natural(text: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in text.replace("/", " / ").split()]


def _checkpoint(path: Path) -> Entrant:
    path = path.resolve()
    version = PolicyVersion(check_name(path.parent.name, "agent"), int(path.name))
    info = AdapterStore(path.parents[1]).info(version)
    return Entrant(
        name=f"{version}", player="llm", adapter=str(path), digest=info.digest, options=_options(path, version.agent)
    )


def _options(path: Path, agent: str) -> dict[str, Any]:
    """How the agent is asked in its run: an adapter that learnt from short chats is another player in long ones."""
    run = path.parents[2]
    if not (run / "manifest.json").is_file():
        return {}
    config = RunFolder.open(run).config()
    seats = {seat: s for seat, s in config.seats.items() if (s.agent or seat).partition("@")[0] == agent}
    found = [dict(s.options) for s in seats.values() if s.player == "llm"]
    if any(options != found[0] for options in found):
        raise ConfigError(
            f"{path}: {agent} plays {', '.join(seats)} of its run with different options, so it is no single player here; "
            "eval.anchors measures it in its run, seat by seat"
        )
    return found[0] if found else {}


def _bot(word: str) -> Entrant:
    """``kind``, ``base`` or ``llm``, with ``:option=value`` parts."""
    name, *rest = _OPTION.split(word)
    options: dict[str, Any] = dict(parse_override(part) for part in rest)
    if name in (BASE, "llm"):
        return Entrant(name=BASE if not rest else word, player="llm", options=options)
    kinds = sorted({e.id for e in list_entries(AGENTS)} - {"llm"})
    if name in NOT_ENTRANTS:
        raise UserError(f"{name} cannot play in a tournament: use  selfplay play")
    if name not in kinds:
        if "@" in name:
            raise UserError(f"{name} is a version of a run: give its folder, runs/NAME/adapters/AGENT/N")
        raise UnknownNameError("player", name, [*(k for k in kinds if k not in NOT_ENTRANTS), BASE])
    return Entrant(name=word, player=name, options=options)


def _distinct(entrants: list[Entrant]) -> list[Entrant]:
    """Names told apart by their run where versions of two runs carry the same one; the same player twice is an error."""
    names = [e.name for e in entrants]
    out = []
    for e in entrants:
        if names.count(e.name) > 1 and e.adapter:
            e = msgspec.structs.replace(e, name=f"{Path(e.adapter).parents[2].name}/{e.name}")
        out.append(e)
    for e in out:
        if sum(other.name == e.name for other in out) > 1:
            raise ConfigError(f"player {e.adapter or e.name} was named twice")
    return out


def _config(folders: Sequence[Path], model: str | None, config: Config | None) -> Config:
    """One server for all: the model of the runs, or the one that was asked for."""
    runs = sorted({p.resolve().parents[2] for p in folders})
    models: dict[str, Path] = {}
    for run in runs:
        if (run / "manifest.json").is_file():
            models.setdefault(base_model(RunFolder.open(run)), run)
    if model is None and len(models) > 1:
        told = ", ".join(f"{m} ({run})" for m, run in models.items())
        raise ConfigError(f"adapters of different base models cannot be served by one engine: {told}")
    base = config or (RunFolder.open(next(iter(models.values()))).config() if models else Config(model=DEFAULT_MODEL))
    configs = [read_config(p) for p in folders]
    ranks = [int(c.get("r", 0)) for c in configs]
    policy = msgspec.structs.replace(base.policy, max_rank=max([*ranks, base.lora.rank, base.policy.max_rank]))
    if any(map(whole_modules, configs)):
        policy = msgspec.structs.replace(policy, engine="transformers")  # vLLM serves low-rank adapters only
        base = msgspec.structs.replace(base, train=msgspec.structs.replace(base.train, parameters="full"))
    return msgspec.structs.replace(base, model=model or next(iter(models), base.model), policy=policy)


def _adapter(entrant: Entrant, number: int) -> Adapter:
    """Served under a name of its own: versions of two runs may carry the same one."""
    path = Path(entrant.adapter)
    stored = PolicyVersion(path.parent.name, int(path.name))
    served = PolicyVersion(f"entrant-{number}", stored.version)
    return Adapter(served=served, stored=stored, root=str(path.parents[1]))
