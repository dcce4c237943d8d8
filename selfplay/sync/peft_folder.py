"""Writing an adapter in PEFT format: the ``write`` argument of `AdapterStore.publish`.

In: LoRA matrices by PEFT name and the adapter's settings. Out: adapter_model.safetensors and adapter_config.json, which
transformers, peft and vLLM load as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from selfplay.errors import StoreError
from selfplay.store.peft_format import CONFIG_NAME, WEIGHTS_NAME
from selfplay.types import Scalar

_DEFAULTS: dict[str, Scalar | list[str] | None] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "inference_mode": True,
    "bias": "none",
    "lora_dropout": 0.0,
    "fan_in_fan_out": False,
    "use_rslora": False,
    "use_dora": False,
    "init_lora_weights": True,
    "modules_to_save": None,
}


def save_adapter(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Scalar | list[str]],
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Write ``tensors`` (cast to ``dtype``) and ``config`` (r, lora_alpha, target_modules, ...) into ``folder``.

    Raises `StoreError` with the system's words when the disk does not take it.
    """
    whole = {n: t.detach().to("cpu", dtype or t.dtype).contiguous() for n, t in tensors.items()}
    try:
        save_file(whole, folder / WEIGHTS_NAME, metadata={"format": "pt"})
        text = json.dumps({**_DEFAULTS, **config}, indent=2, sort_keys=True) + "\n"
        (folder / CONFIG_NAME).write_text(text, encoding="utf-8")
    except OSError as e:
        raise StoreError(f"cannot write the adapter into {folder}: {e.strerror or e}") from e
    except SafetensorError as e:  # a full disk comes as this, without an errno
        raise StoreError(f"cannot write the adapter into {folder}: {e}") from e
