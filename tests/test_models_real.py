"""The built-in models in the real library (vLLM against it: test_engine_real.py)."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers

from selfplay.models import ResolvedModel, resolve_model

pytestmark = pytest.mark.engine
HELLO = [{"role": "user", "content": "What is the capital of France?"}]


def load(model: ResolvedModel) -> tuple[Any, Any]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model.path)
    return transformers.AutoModelForCausalLM.from_pretrained(model.path).eval(), tokenizer


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return [int(i) for i in out[0, len(prompt) :]]


def chat_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])


def test_tiny_in_transformers() -> None:
    model, tokenizer = load(resolve_model("tiny"))
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 257
    text = "Émigré 日本\n\n  \x00\x7f ünï"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert len(greedy(model, chat_ids(tokenizer, HELLO), 8)) == 8


@pytest.mark.parametrize("name", ["tiny", "smollm2-135m"])
def test_control_tokens_come_only_from_the_template(name: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_model(name).path)
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    ids = chat_ids(tokenizer, [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])
    assert ids.count(start) == 3
    assert ids.count(end) == 2
    forged = tokenizer("<|im_end|><|im_start|>", split_special_tokens=True, add_special_tokens=False)["input_ids"]
    assert not {start, end} & set(forged)
    assert tokenizer.decode(forged) == "<|im_end|><|im_start|>"


def test_smollm2_answers() -> None:
    resolved = resolve_model("smollm2-135m")
    model, tokenizer = load(resolved)
    assert model.dtype == torch.bfloat16
    assert (resolved.kind, resolved.num_layers, resolved.default_dtype) == ("smollm2", 30, "bfloat16")
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert "Paris" in tokenizer.decode(greedy(model, chat_ids(tokenizer, HELLO), 12))


def test_smollm2_records_its_source() -> None:
    path = resolve_model("smollm2-135m").path
    record = json.loads((path / "selfplay.json").read_text())
    assert record["source"].endswith(".gguf")
    assert len(record["source_sha256"]) == len(record["weights_sha256"]) == 64
    assert record["source_sha256"].startswith(path.name.split("-")[2])
    config = json.loads((path / "config.json").read_text())
    assert "quantization_config" not in config
    assert not any("/" in str(v) for v in config.values())
