"""Adapters are checked against the model's own files before an engine sees them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.policy_samples import adapter_config

from selfplay.errors import EngineError, SyncError
from selfplay.models import tiny
from selfplay.policy.adapter_check import AdapterRules, check_adapter, rules_of
from selfplay.wire.messages import BucketHeader

Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> AdapterRules:
    folder = tmp_path_factory.mktemp("tiny")
    tiny.write(folder)
    return rules_of(str(folder), ("q_proj", "down_proj"), 8)


def header(**changes: object) -> BucketHeader:
    good = BucketHeader(
        transport="shm", address="x", offset=0, num_bytes=4, crc32=0, dtype="float32",
        layout=((f"{Q}.lora_A.weight", (8, 64), 0), (f"{Q}.lora_B.weight", (64, 8), 512)),
        adapter_config=adapter_config(),
    )  # fmt: skip
    return msgspec.structs.replace(good, **changes)


def test_a_fitting_adapter_passes(rules: AdapterRules) -> None:
    check_adapter(header(), rules)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"adapter_config": adapter_config(rank=12)}, r"rank 12 is outside 1\.\.8"),
        ({"adapter_config": {"lora_alpha": 1.0}}, "rank None"),
        ({"adapter_config": {"r": True, "lora_alpha": 1.0}}, "rank True"),
        ({"adapter_config": adapter_config(alpha=float("nan"))}, "lora_alpha nan"),
        ({"adapter_config": {**adapter_config(), "use_dora": True}}, "use_dora"),
        ({"adapter_config": {**adapter_config(), "bias": "all"}}, "bias='all'"),
        ({"layout": ()}, "no tensors"),
        ({"layout": ((f"{Q}.lora_A.weight", (8, 64), 0),)}, "only lora_A of model.layers.0.self_attn.q_proj"),
        ({"layout": ((f"{Q}.lora_A.weight", (8, 63), 0), (f"{Q}.lora_B.weight", (64, 8), 0))}, r"\(8, 63\), expected \(8, 64\)"),
        ({"layout": ((f"{Q}.lora_A.weight", (4, 64), 0), (f"{Q}.lora_B.weight", (64, 4), 0))}, r"expected \(8, 64\)"),
        ({"layout": ((Q.removeprefix("base_model.") + ".lora_A.weight", (8, 64), 0),)}, "is not a LoRA matrix"),
        ({"layout": ((f"{Q}.lora_A.default.weight", (8, 64), 0),)}, "is not a LoRA matrix"),
        ({"layout": ((Q.replace("layers.0", "layers.9") + ".lora_A.weight", (8, 64), 0),)}, "no projection model.layers.9"),
        ({"layout": ((Q.replace("q_proj", "k_proj") + ".lora_A.weight", (8, 64), 0),)}, "serves adapters on down_proj, q_proj"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(rules: AdapterRules, changes: dict[str, object], words: str) -> None:
    with pytest.raises(SyncError, match=words):
        check_adapter(header(**changes), rules)


def test_a_model_folder_without_readable_weights(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no safetensors weights"):
        rules_of(str(tmp_path), ("q_proj",), 8)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(EngineError, match="cannot read the weights' header"):
        rules_of(str(tmp_path), ("q_proj",), 8)
