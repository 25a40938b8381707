"""Batched generation by a frozen teacher: a grown-in-place KV cache, greedy and sampled rows side by side.

transformers' own ``generate`` copies the whole cache at every token and keeps finished rows; on two cores that
costs more than the model. Here the cache is written in place and finished rows are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin

from draftwood.compiler.checkpoint import Checkpoint

# B rows, P prompt columns, S columns so far, G key/value heads, E head dimension, V vocabulary, N new tokens

# Finished rows are dropped once they are this share of the batch: dropping copies the cache.
_DROP_SHARE = 0.2


class GrownInPlace(CacheLayerMixin):
    """One layer's keys and values, [B, G, capacity, E], of which the first columns are in use."""

    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.length = capacity, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, heads, _, size = key_states.shape
        self.keys = key_states.new_zeros(rows, heads, self.capacity, size)
        self.values = torch.zeros_like(self.keys)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin, self.length = self.length, self.length + key_states.shape[2]
        self.keys[:, :, begin : self.length] = key_states
        self.values[:, :, begin : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity


def load_teacher(folder: Path, dtype: torch.dtype | None = None, device: str | None = None) -> LlamaForCausalLM:
    """The teacher of a folder, frozen, in evaluation mode; float32 unless ``dtype`` says otherwise.

    Raises:
        CheckpointError: the folder is not a teacher that Draftwood supports.
    """
    Checkpoint.open(folder)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype or torch.float32, local_files_only=True)
    return model.to(device).eval().requires_grad_(False)


@torch.inference_mode()
def generate(
    model: LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    uniforms_BN: np.ndarray,
    ends: Sequence[int],
) -> list[list[int]]:
    """Continues every prompt by up to N tokens; a text ends behind its first end token, which it keeps.

    Temperature 0 is greedy. A sampled token is the inverse of the distribution function at the row's own
    uniform number, so what a row yields does not depend on when other rows finish.

    Args:
        prompts: B prompts of one or more token ids; similar lengths save padding.
        uniforms_BN: float, in [0, 1).
    """
    count, new = uniforms_BN.shape
    longest = max(map(len, prompts))
    ids_BP = torch.zeros(count, longest, dtype=torch.int64)
    seen_BS = torch.zeros(count, longest + new, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids_BP[row, longest - len(prompt) :] = torch.tensor(prompt)
        seen_BS[row, longest - len(prompt) :] = True
    device = model.device
    padded = not bool(seen_BS.all())
    seen_BS, uniforms, heat = seen_BS.to(device), torch.from_numpy(uniforms_BN).to(device), torch.tensor(temperatures)
    cache = Cache(layers=[GrownInPlace(longest + new) for _ in range(model.config.num_hidden_layers)])
    positions = (seen_BS[:, :longest].cumsum(1) - 1).clamp(min=0)
    feed, live, texts = ids_BP.to(device), torch.arange(count), [[] for _ in range(count)]
    done = torch.zeros(count, dtype=torch.bool)
    heat, end_ids = heat.to(device), torch.tensor(list(ends), dtype=torch.int64)
    for step in range(new):
        hidden = model.model(
            feed, attention_mask=seen_BS[:, : longest + step] if padded else None,
            position_ids=positions, past_key_values=cache, use_cache=True,
        ).last_hidden_state[:, -1]  # fmt: skip
        drawn = draw(model.lm_head(hidden), heat, uniforms[:, step]).cpu()
        for at in (~done).nonzero()[:, 0].tolist():
            texts[int(live[at])].append(int(drawn[at]))
        done |= torch.isin(drawn, end_ids)
        if bool(done.all()):
            break
        positions, feed = positions[:, -1:] + 1, drawn[:, None].to(device)
        if int(done.sum()) >= max(1, _DROP_SHARE * len(done)):
            keep = (~done).nonzero()[:, 0]
            live, done = live[keep], done[keep]
            keep = keep.to(device)
            seen_BS, uniforms, heat = seen_BS[keep], uniforms[keep], heat[keep]
            positions, feed = positions[keep], feed[keep]
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys[keep], layer.values[keep]
    return texts


def draw(logits_BV: Tensor, temperature_B: Tensor, uniform_B: Tensor) -> Tensor:
    """One token a row, int64 [B]: the argmax where the temperature is 0, else by inverse distribution function."""
    tokens_B = logits_BV.argmax(-1)
    hot = (temperature_B > 0).nonzero()[:, 0]
    if len(hot):
        scaled = logits_BV[hot].float() / temperature_B[hot, None]
        summed = scaled.softmax(-1).cumsum(-1)
        wanted = uniform_B[hot, None].float() * summed[:, -1:]
        tokens_B[hot] = torch.searchsorted(summed, wanted, right=True)[:, 0].clamp(max=logits_BV.shape[1] - 1)
    return tokens_B
