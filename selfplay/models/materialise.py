"""``python -m selfplay.models.materialise SOURCE.gguf FOLDER``: dequantise a GGUF chat model into Hugging Face format.

A process of its own, so that the caller stays free of torch and transformers, and its memory is given back.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

END_OF_TURN = "<|im_end|>"


def main(source: Path, target: Path) -> None:
    """Write weights (bfloat16, safetensors), tokenizer with its chat template, and a generation_config into ``target``."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    # transformers asks for this table once per module of the model; building it anew each time takes longer than the rest.
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if not tokenizer.chat_template:
        raise SystemExit(f"{source.name} carries no chat template")
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    if end is None or end == tokenizer.unk_token_id:
        raise SystemExit(f"{source.name} has no {END_OF_TURN} token")
    model.config.eos_token_id = end
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=end, pad_token_id=tokenizer.pad_token_id or end
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    _forget_source(target)


def _forget_source(target: Path) -> None:
    """Drop the paths of this machine and the quantisation from config.json: the folder is a plain model now."""
    path = target / "config.json"
    config = json.loads(path.read_bytes())
    for key in ("_name_or_path", "_model_name_or_path", "quantization_config"):
        config.pop(key, None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
