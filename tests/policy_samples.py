"""Small tokenizers, templates, adapters and references for the tests of the policy server."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selfplay.agent import Message
from selfplay.models.tiny import IM_END, byte_characters
from selfplay.types.match import Scalar

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN3 = (
    "{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}{%- if m['role'] == 'user' -%}"
    "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}{%- set text = m['content'] -%}"
    "{%- if m['role'] == 'assistant' and '</think>' in text and loop.index0 < ns.last -%}"
    "{%- set text = text.split('</think>')[-1].lstrip('\n') -%}{%- endif -%}"
    "{{- '<|im_start|>' + m['role'] + '\n' + text + '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("o", "r"), ("Ġw", "or"), ("Ċ", "Ċ")]


def write_tokenizer(
    folder: Path, template: str, specials: Sequence[str], eos: str, added: Sequence[str] = (), normalizer: Any = None
) -> Path:
    """A byte-level BPE tokenizer with a few merges: ``specials`` are hidden when decoding, ``added`` are not."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {c: i for i, c in enumerate(byte_characters())}
    for a, b in MERGES:
        vocab.setdefault(a + b, len(vocab))
    tokens = [
        {
            "id": len(vocab) + i, "content": s, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": normalizer is not None, "special": s in specials,
        }
        for i, s in enumerate([*specials, *added])
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab,
        "merges": [list(m) for m in MERGES],
    }  # fmt: skip
    whole = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": tokens, "normalizer": normalizer,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model,
    }  # fmt: skip
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, "eos_token": eos}
    (folder / "tokenizer.json").write_text(json.dumps(whole, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def chat(*contents: str, system: str = "You play.") -> tuple[Message, ...]:
    """System, then user and assistant in turn."""
    roles = ("user", "assistant")
    return (Message("system", system), *(Message(roles[i % 2], c) for i, c in enumerate(contents)))


def adapter_config(rank: int = 8, alpha: float = 16.0) -> dict[str, Scalar | list[str]]:
    """What a header carries."""
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return {"r": rank, "lora_alpha": alpha, "target_modules": targets}


def random_adapter(folder: str, seed: int, *, rank: int = 8, scale: float = 0.2) -> dict[str, Any]:
    """LoRA matrices by PEFT name for every projection of the model in ``folder``; large enough to change its words."""
    import torch

    from selfplay.policy.adapter_check import rules_of

    targets = tuple(str(t) for t in adapter_config()["target_modules"])  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, shape in sorted(rules_of(folder, targets, rank).shapes.items()):
        if module.rpartition(".")[2] in targets:
            name = f"base_model.model.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, shape[1], generator=generator) / shape[1] ** 0.5
            tensors[f"{name}.lora_B.weight"] = torch.randn(shape[0], rank, generator=generator) * scale
    return tensors


class Reference:
    """transformers and peft, one request at a time: what every engine must agree with."""

    def __init__(self, folder: str, adapters: dict[str, dict[str, Any]], place: Path) -> None:
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        from selfplay.sync import save_adapter

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for name, tensors in adapters.items():
            (place / name).mkdir(parents=True)
            save_adapter(place / name, tensors, adapter_config())
            if isinstance(model, PeftModel):
                model.load_adapter(place / name, adapter_name=name)
            else:
                model = PeftModel.from_pretrained(model, place / name, adapter_name=name)
        self._model: Any = model.eval()

    def greedy(self, ids: Sequence[int], adapter: str | None, num: int) -> tuple[list[int], list[float]]:
        """Up to ``num`` most likely tokens, to the end of the turn, and their log-probabilities; without any cache."""
        context, chosen, logprobs = list(ids), [], []
        for _ in range(num):
            row = self.logprobs(context, adapter)[-1]
            chosen.append(int(row.argmax()))
            logprobs.append(float(row.max()))
            context.append(chosen[-1])
            if chosen[-1] == IM_END:
                break
        return chosen, logprobs

    def forced(self, ids: Sequence[int], adapter: str | None, temperature: float = 1.0) -> list[float]:
        """Log-probabilities [T−1] of ``ids[1:]``."""
        rows = self.logprobs(ids, adapter, temperature)
        return [float(rows[i, token]) for i, token in enumerate(ids[1:])]

    def logprobs(self, ids: Sequence[int], adapter: str | None, temperature: float = 1.0) -> Any:
        """Log-probabilities [T, V] of whatever may follow each token."""
        import contextlib

        import torch

        if adapter is not None:
            self._model.set_adapter(adapter)
        with torch.inference_mode(), self._model.disable_adapter() if adapter is None else contextlib.nullcontext():
            logits = self._model(torch.tensor([list(ids)])).logits[0].float()
        return torch.log_softmax(logits / temperature, dim=-1)


def left_by(logprobs: Any, top_k: int, top_p: float) -> tuple[int, ...]:
    """What top-k, then top-p leave of ``logprobs`` [V], by their definitions: tokens as likely as the k-th are left too."""
    ranked = sorted(((float(x), token) for token, x in enumerate(logprobs)), reverse=True)
    if top_k:
        ranked = [r for r in ranked if r[0] >= ranked[top_k - 1][0]]
    total, so_far, left = sum(math.exp(x) for x, _ in ranked), 0.0, []
    for x, token in ranked:
        if so_far < top_p:
            left.append(token)
        so_far += math.exp(x) / total
    return tuple(sorted(left))


def taught_adapter(folder: str, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> dict[str, Any]:
    """An adapter under which the model in ``folder`` answers ``prompt_ids`` with ``answer_ids``, greedily."""
    import torch
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    config = adapter_config()
    torch.manual_seed(0)
    base: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model: Any = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=list(config["target_modules"])))  # type: ignore[call-overload]
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    ids = torch.tensor([[*prompt_ids, *answer_ids]])
    for _ in range(300):
        rows = model(ids).logits[0, len(prompt_ids) - 1 : -1].float()
        loss = torch.nn.functional.cross_entropy(rows, ids[0, len(prompt_ids) :])
        if loss.item() < 0.2:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return dict(get_peft_model_state_dict(model))
