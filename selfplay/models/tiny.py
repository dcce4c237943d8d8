"""``tiny``: a random small Llama with a byte-level tokenizer and a ChatML template, for tests and quick looks.

Built without torch, always the same: token id = byte value, then four special tokens. It says nothing sensible, but it
is a real model: transformers and vLLM load it as any other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from selfplay.errors import MissingExtraError
from selfplay.models.cache import built_once

NAME = "tiny"
FORMAT = 1
SPECIALS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|pad|>")
IM_START, IM_END, END_OF_TEXT, PAD = range(256, 260)
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 128, 2, 2, 1, 32
VOCAB = 256 + len(SPECIALS)
MAX_LENGTH = 4096
SEED = 20_240_229

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def materialise(cache: Path) -> Path:
    """The model's folder in the cache, built when it is not there."""
    return built_once(cache / f"{NAME}-{FORMAT}", lambda p: all((p / f).is_file() for f in _FILES), write)


def write(folder: Path) -> None:
    """Write all files of the model into ``folder``."""
    try:
        import numpy  # noqa: F401
        from safetensors.numpy import save_file
    except ImportError as e:
        raise MissingExtraError(f"model {NAME}", "train", e.name or "safetensors") from e
    save_file(_weights(), folder / "model.safetensors", metadata={"format": "pt"})
    for name, value in _documents().items():
        (folder / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _weights() -> dict[str, Any]:
    """Scaled so that hidden states keep unit size and the logits spread by about one: neither uniform nor frozen."""
    import numpy as np

    rng = np.random.Generator(np.random.PCG64(SEED))

    def matrix(out: int, into: int, scale: float = 1.0) -> Any:
        return (rng.standard_normal((out, into)) * scale / into**0.5).astype(np.float32)

    def ones() -> Any:
        return np.ones(HIDDEN, dtype=np.float32)

    out = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN, HIDDEN**0.5), "model.norm.weight": ones()}
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        out[at + "self_attn.q_proj.weight"] = matrix(HEADS * HEAD_DIM, HIDDEN)
        out[at + "self_attn.k_proj.weight"] = matrix(KV_HEADS * HEAD_DIM, HIDDEN)
        out[at + "self_attn.v_proj.weight"] = matrix(KV_HEADS * HEAD_DIM, HIDDEN)
        out[at + "self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD_DIM)
        out[at + "mlp.gate_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
        out[at + "mlp.up_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
        out[at + "mlp.down_proj.weight"] = matrix(HIDDEN, INTERMEDIATE)
        out[at + "input_layernorm.weight"] = ones()
        out[at + "post_attention_layernorm.weight"] = ones()
    out["lm_head.weight"] = matrix(VOCAB, HIDDEN)
    return out


def _documents() -> dict[str, Any]:
    return {
        "config.json": _config(),
        "generation_config.json": {"bos_token_id": END_OF_TEXT, "eos_token_id": IM_END, "pad_token_id": PAD},
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE, "model_max_length": MAX_LENGTH,
            "bos_token": SPECIALS[2], "eos_token": SPECIALS[1], "pad_token": SPECIALS[3],
            "extra_special_tokens": [SPECIALS[0]], "clean_up_tokenization_spaces": False,
        },
    }  # fmt: skip


def _config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32",
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_LENGTH, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "initializer_range": 0.02,
        "bos_token_id": END_OF_TEXT, "eos_token_id": IM_END, "pad_token_id": PAD, "use_cache": True,
    }  # fmt: skip


def _tokenizer() -> dict[str, Any]:
    """Byte-level BPE without merges, in the format of the ``tokenizers`` library."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [
            {"id": 256 + i, "content": s, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
            for i, s in enumerate(SPECIALS)
        ],
        "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {c: b for b, c in enumerate(byte_characters())}, "merges": [],
        },
    }  # fmt: skip


def byte_characters() -> tuple[str, ...]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table, extra = {b: chr(b) for b in plain}, 256
    for b in range(256):
        if b not in table:
            table[b], extra = chr(extra), extra + 1
    return tuple(table[b] for b in range(256))
