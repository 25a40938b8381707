"""bfloat16 if the machine multiplies it fast, float32 elsewhere."""

from __future__ import annotations

import torch


def compute_dtype(device: torch.device) -> torch.dtype:
    """The element type of matrix products in training."""
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported()
    else:
        capabilities = torch.cpu.get_capabilities()
        fast = bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16"))
    return torch.bfloat16 if fast else torch.float32


def autocast(device: torch.device) -> torch.autocast:
    """Context in which matrix products take ``compute_dtype``."""
    dtype = compute_dtype(device)
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)
