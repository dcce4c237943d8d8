"""A published folder is an ordinary PEFT adapter: peft loads it unchanged and it changes what the model says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from selfplay.models import resolve_model
from selfplay.store.adapters import AdapterStore
from selfplay.sync import make_receiver, save_adapter, unpack
from selfplay.types import PolicyVersion

pytestmark = pytest.mark.engine
V0 = PolicyVersion("pro", 0)


def lora_tensors(model: Any) -> dict[str, torch.Tensor]:
    return {k: v for k, v in peft.get_peft_model_state_dict(model).items() if "lora_" in k}


def trained(base: Path) -> Any:
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))  # fmt: skip
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(model(torch.arange(40).view(1, -1)).logits)


def test_what_save_adapter_writes_loads_with_peft_unchanged(tmp_path: Path) -> None:
    base, store = resolve_model("tiny").path, AdapterStore(tmp_path)
    model = trained(base)
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["down_proj", "q_proj"]}
    store.publish(V0, lambda folder: save_adapter(folder, lora_tensors(model), config), parent=None)
    fresh = transformers.AutoModelForCausalLM.from_pretrained(base)
    plain = logits(fresh)
    loaded = peft.PeftModel.from_pretrained(fresh, store.path(V0)).eval()
    assert torch.equal(logits(loaded), logits(model))
    assert not torch.allclose(logits(loaded), plain, atol=1e-2)
    assert store.verify(V0)


def test_what_peft_writes_can_be_published_and_received(tmp_path: Path) -> None:
    model, store = trained(resolve_model("tiny").path), AdapterStore(tmp_path)
    store.publish(V0, lambda folder: model.save_pretrained(folder), parent=None)
    header = store.bucket_header(V0)
    found = unpack(header, make_receiver("file", address="", rank=1, world_size=2, timeout_s=5).receive(header, 5))
    expected = lora_tensors(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], expected[n]) for n in expected)
    assert sorted(header.adapter_config["target_modules"]) == ["down_proj", "q_proj"]  # type: ignore[arg-type]


def test_one_adapter_can_be_cast_on_the_way_to_disk(tmp_path: Path) -> None:
    model, store = trained(resolve_model("tiny").path), AdapterStore(tmp_path)
    tensors = lora_tensors(model)
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["down_proj", "q_proj"]}
    store.publish(V0, lambda folder: save_adapter(folder, tensors, config, dtype=torch.bfloat16), parent=None)
    header = store.bucket_header(V0)
    assert header.dtype == "bfloat16"
    found = unpack(header, make_receiver("file", address="", rank=1, world_size=2, timeout_s=5).receive(header, 5))
    assert all(torch.equal(found[n], tensors[n].bfloat16()) for n in tensors)
