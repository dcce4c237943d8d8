"""A digest of the weights that all agents share: in the trainer, and in an engine in this process or in vLLM's worker."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def base_digest(model: nn.Module) -> str:
    """Of every parameter and buffer of ``model`` that does not learn, bit for bit."""
    digest = hashlib.sha256()
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
        if not tensor.requires_grad:
            digest.update(f"{name} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
