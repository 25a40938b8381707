"""Optimiser and learning-rate schedule of a drafter's training."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from draftwood.compiler.training.precision import compute_dtype


def stable_decay(step: int, share: float) -> float:
    """Learning-rate factor: linear warm-up, a plateau, then a linear decay to 2 % over the second half.

    ``share`` is how much of the training is done. The warm-up takes 50 steps, or a tenth of a shorter training. The
    plateau does not depend on the length, so a run can be lengthened or cut short from any checkpoint.
    """
    if share >= 0.5:
        return max(0.02, 2 * (1 - share))
    return min(1.0, max((step + 1) / 50, 10 * share))


class _InFloat32(TorchFunctionMode):
    """Keeps what is cast to bfloat16 in float32. Muon orthogonalises in bfloat16, and a processor that does not
    multiply it fast spent three quarters of a step of Medusa's heads on that."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.bfloat16:
            return args[0].to(torch.float32, copy=True)  # Muon divides it in place
        return func(*args, **(kwargs or {}))


class HybridOptimizer:
    """Muon for hidden matrices, AdamW for embeddings, output matrices, norms and biases.

    Muon converges in fewer tokens than AdamW on small decoders (K. Jordan et al., 2024); with its update
    scaled to AdamW's root mean square one learning rate serves both.
    """

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        # A row a token: no matrices in Muon's sense.
        table = ("embed_tokens.weight", "lm_head.weight", "markov_w1.weight", "markov_w2.weight", ".out.weight")
        matrices = [p for n, p in named if p.ndim == 2 and not n.endswith(table)]
        chosen = {id(p) for p in matrices}
        rest = [p for _, p in named if id(p) not in chosen]
        self.learning_rate = learning_rate
        self.parts: list[torch.optim.Optimizer] = []
        if matrices:
            self.parts.append(
                torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
            )
        if rest:
            self.parts.append(
                torch.optim.AdamW(rest, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
            )
        self.parameters = [p for _, p in named]

    def step(self, factor: float, clip: float = 1.0) -> bool:
        """Clips the gradient norm, applies one update at ``factor`` times the learning rate, clears gradients.

        False, and no update, if the norm is no number: every parameter would be none from there on.
        """
        if not nn.utils.clip_grad_norm_(self.parameters, clip).isfinite():
            return False
        wide = compute_dtype(self.parameters[0].device) == torch.float32
        with _InFloat32() if wide else nullcontext():
            for part in self.parts:
                for group in part.param_groups:
                    group["lr"] = self.learning_rate * factor
                part.step()
                part.zero_grad(set_to_none=True)
        return True

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)
