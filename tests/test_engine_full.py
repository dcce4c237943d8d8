"""Whole models in the transformers engine: each row of a batch by the version that it belongs to; what does not fit is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from tests.policy_samples import adapter_config, random_adapter
from transformers import AutoModelForCausalLM

from selfplay.agent import Sampling
from selfplay.errors import StoreError, SyncError
from selfplay.policy.adapter_check import check_adapter, rules_of
from selfplay.policy.decoding import Batch, Row
from selfplay.policy.routed_lora import build_adapter, install_routing, parameter_shapes
from selfplay.store.adapters import AdapterStore
from selfplay.sync import pack
from selfplay.types import PolicyVersion
from selfplay.wire.messages import BucketHeader

Tensors = dict[str, torch.Tensor]
PREFIX = "base_model.model."
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def version(model: Any, seed: int) -> Tensors:
    """Another model of the same shape, by PEFT name; what is shared under each name."""
    generator = torch.Generator().manual_seed(seed)
    noise = {n: torch.randn(p.shape, generator=generator) * 0.1 for n, p in model.named_parameters()}
    first = {id(p): n for n, p in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {PREFIX + n: (p + noise[first[id(p)]]).detach() for n, p in every}


def header(tensors: Tensors) -> BucketHeader:
    modules = list(dict.fromkeys(n.removeprefix(PREFIX).rpartition(".")[0] for n in tensors))
    config = {"r": 1, "lora_alpha": 1, "target_modules": "dummy-target-modules", "modules_to_save": modules}
    return pack(tensors, dtype="float32", transport="shm", address="x", adapter_config=config).header


@pytest.mark.parametrize("which", ["tiny_model", "tied_model"])
def test_base_adapter_and_whole_models_in_one_batch(which: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(which)
    model, plain = load(folder), {None: load(folder)}
    shapes, like = parameter_shapes(model), next(model.parameters())
    whole = {name: version(model, seed) for seed, name in enumerate(("con", "pro"))}
    lora = random_adapter(str(folder), 3)
    bank = install_routing(model, PROJECTIONS, whole=True)
    for name, tensors in whole.items():
        bank.adapters[name] = build_adapter(tensors, header(tensors), like, shapes)
        plain[name] = load(folder)
        plain[name].load_state_dict({n.removeprefix(PREFIX): t for n, t in tensors.items()})
    lora_header = pack(lora, dtype="float32", transport="shm", address="x", adapter_config=adapter_config()).header
    bank.adapters["low-rank"] = build_adapter(lora, lora_header, like, shapes)
    plain["low-rank"] = load(folder)
    for name, parameter in plain["low-rank"].named_parameters():
        stem = PREFIX + name.removesuffix(".weight")
        if f"{stem}.lora_A.weight" in lora:
            parameter.data += 2.0 * lora[f"{stem}.lora_B.weight"] @ lora[f"{stem}.lora_A.weight"]
    batch = Batch(model, bank, torch.Generator().manual_seed(0))
    for together in (["pro", None, "low-rank", "con", "pro"], ["pro", "con"], ["con"]):
        rows = [
            Row(
                request=f"{i}",
                ids=list(range(40 + i, 52)),
                sampling=Sampling(temperature=0.0, max_tokens=4),
                stop_ids=frozenset(),
                adapter=adapter,
            )
            for i, adapter in enumerate(together)
        ]
        batch.join(rows)
        while batch.rows:
            batch.step()
        for row in rows:
            with torch.no_grad():
                ids = torch.tensor([[*row.ids, *row.sampled]])
                logs = torch.log_softmax(plain[row.adapter](ids).logits[0, len(row.ids) - 1 : -1], -1)
            assert row.sampled == logs.argmax(-1).tolist(), row.adapter
            assert row.logprobs == pytest.approx(logs.max(-1).values.tolist(), abs=1e-4), row.adapter


def test_parameters_that_are_not_the_models_are_named(tiny_model: Path) -> None:
    model = load(tiny_model)
    like, shapes, good = next(model.parameters()), parameter_shapes(model), version(model, 0)
    less = {n: t for n, t in good.items() if n != f"{PREFIX}model.norm.weight"}
    with pytest.raises(SyncError, match=r"lacks model\.norm\.weight, and the model has it"):
        build_adapter(less, header(less), like, shapes)
    more = good | {f"{PREFIX}model.norm.bias": torch.ones(64)}
    with pytest.raises(SyncError, match=r"has model\.norm\.bias, which the model does not have"):
        build_adapter(more, header(more), like, shapes)
    other = good | {f"{PREFIX}lm_head.weight": torch.ones(3, 64)}
    with pytest.raises(SyncError, match=r"lm_head\.weight has the shape \(3, 64\), the model's has \(260, 64\)"):
        build_adapter(other, header(other), like, shapes)


def test_an_engine_of_adapters_refuses_a_whole_model(tiny_model: Path) -> None:
    tensors = {f"{PREFIX}lm_head.weight": torch.ones(260, 64)}
    with pytest.raises(SyncError, match=r"serves low-rank adapters: whole models need train\.parameters=full"):
        check_adapter(header(tensors), rules_of(str(tiny_model), PROJECTIONS, 8))
    rules = rules_of(str(tiny_model), PROJECTIONS, 8, whole_models=True)
    check_adapter(header(tensors), rules)
    odd = replace(header(tensors), layout=((f"{PREFIX}lm_head.lora_A", (260, 64), 0),))
    with pytest.raises(SyncError, match="is not a module's parameter"):
        check_adapter(odd, rules)


def writer(tensors: Tensors, modules: list[str]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "modules_to_save": modules}
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(config))

    return write


def test_a_folder_holds_what_it_announces(tmp_path: Path) -> None:
    store, name = AdapterStore(tmp_path), PolicyVersion("pro", 0)
    norm, matrix = f"{PREFIX}model.norm.weight", f"{PREFIX}lm_head.lora_A.weight"
    with pytest.raises(
        StoreError, match=r"says that 'lm_head' is saved, and adapter_model\.safetensors does not hold it"
    ):
        store.publish(name, writer({norm: torch.ones(4)}, ["lm_head", "model.norm"]), parent=None)
    with pytest.raises(StoreError, match="is not a LoRA matrix"):
        store.publish(name, writer({norm: torch.ones(4)}, []), parent=None)
    with pytest.raises(StoreError, match="is not a module's parameter"):
        store.publish(name, writer({norm: torch.ones(4), matrix: torch.ones(2, 2)}, ["model.norm"]), parent=None)
    store.publish(name, writer({norm: torch.ones(4)}, ["model.norm"]), parent=None)
    assert store.bucket_header(name).layout == ((norm, (4,), 0),)
