"""Batched generation by a frozen teacher: a KV cache written in place, greedy and sampled rows side by side.

transformers' own ``generate`` copies the whole cache at every token and keeps finished rows to the end; on two
cores that costs as much as the model. Here the cache is written in place and finished rows are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.utils import logging

from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.errors import RequestError

# B rows, P prompt columns, C all columns, T fed columns, G key/value heads, E head size, V vocabulary, N new tokens

# Finished rows are dropped once they are this share of the batch: dropping copies the cache.
_DROP_SHARE = 0.2


def load_teacher(folder: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """The teacher of a folder, frozen and in evaluation mode, on the GPU if there is one.

    Raises:
        CheckpointError: the folder is not a teacher that Draftwood supports.
        RequestError: it is not of the Llama family, the only one trained here.
    """
    family = Checkpoint.open(folder).config.family
    if family != "llama":
        raise RequestError(f"{folder}: a teacher of the family {family}; drafters are trained for llama only")
    logging.disable_progress_bar()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval().requires_grad_(False)


@torch.inference_mode()
def generate(
    model: LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    uniforms_BN: np.ndarray,
    ends: Sequence[int],
) -> list[list[int]]:
    """Continues every prompt by up to N tokens; a text ends behind its first end token, which it keeps.

    Args:
        prompts: B prompts of one or more token ids; similar lengths save padding.
        temperatures: one a prompt, 0 for greedy.
        uniforms_BN: float in [0, 1): row and step decide the draw, whatever other rows do.
    """
    rows = _Rows(model, prompts, temperatures, uniforms_BN)
    texts: list[list[int]] = [[] for _ in prompts]
    ends_ = torch.tensor(ends, dtype=torch.int64)
    open_B = torch.ones(len(prompts), dtype=torch.bool)
    for _ in range(uniforms_BN.shape[1]):
        drawn_B = rows.step(model)
        for row in open_B.nonzero()[:, 0].tolist():
            texts[rows.names[row]].append(int(drawn_B[row]))
        open_B &= ~torch.isin(drawn_B, ends_)
        if not open_B.any():
            break
        if int((~open_B).sum()) >= max(1, _DROP_SHARE * len(open_B)):
            rows.keep(open_B.nonzero()[:, 0])
            open_B = open_B[open_B]
    return texts


class _Rows:
    """The rows still being written: cache, left-padded mask, positions, and the tokens to feed next."""

    def __init__(
        self, model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], temperatures: Sequence[float],
        uniforms_BN: np.ndarray,
    ) -> None:  # fmt: skip
        count, new = uniforms_BN.shape
        longest = max(map(len, prompts))
        feed_BP = torch.zeros(count, longest, dtype=torch.int64)
        seen_BC = torch.zeros(count, longest + new, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            feed_BP[row, longest - len(prompt) :] = torch.tensor(prompt)
            seen_BC[row, longest - len(prompt) :] = True
        self.padded = not bool(seen_BC.all())  # without a mask attention takes a faster path
        self.names = list(range(count))
        self.column = self.written = 0
        self.feed_BT, self.seen_BC = feed_BP.to(model.device), seen_BC.to(model.device)
        self.positions_BT = (self.seen_BC[:, :longest].cumsum(1) - 1).clamp(min=0)
        self.heat_B = torch.tensor(temperatures, device=model.device)
        self.uniforms_BN = torch.from_numpy(uniforms_BN).to(model.device)
        self.cache = Cache(layers=[InPlaceLayer(longest + new) for _ in range(model.config.num_hidden_layers)])

    def step(self, model: LlamaForCausalLM) -> Tensor:
        """Feeds what is pending and draws the next token of every row, int64 [B] on the host."""
        self.written += self.feed_BT.shape[1]
        hidden_BTH = model.model(
            self.feed_BT, attention_mask=self.seen_BC[:, : self.written] if self.padded else None,
            position_ids=self.positions_BT, past_key_values=self.cache, use_cache=True,
        ).last_hidden_state  # fmt: skip
        drawn_B = draw(model.lm_head(hidden_BTH[:, -1]), self.heat_B, self.uniforms_BN[:, self.column])
        self.feed_BT, self.positions_BT = drawn_B[:, None], self.positions_BT[:, -1:] + 1
        self.column += 1
        return drawn_B.cpu()

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but these."""
        self.names = [self.names[row] for row in rows.tolist()]
        rows = rows.to(self.feed_BT.device)
        for name in ("feed_BT", "seen_BC", "positions_BT", "heat_B", "uniforms_BN"):
            setattr(self, name, getattr(self, name)[rows])
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]


def draw(logits_BV: Tensor, temperature_B: Tensor, uniform_B: Tensor) -> Tensor:
    """One token a row, int64 [B]: the argmax where the temperature is 0, else by inverse distribution function."""
    tokens_B = logits_BV.max(-1).indices  # several times faster than argmax on a CPU
    hot = (temperature_B > 0).nonzero()[:, 0]
    if len(hot):
        summed = (logits_BV[hot].float() / temperature_B[hot, None]).softmax(-1).cumsum(-1)
        wanted = uniform_B[hot, None].float() * summed[:, -1:]
        tokens_B[hot] = torch.searchsorted(summed, wanted, right=True)[:, 0].clamp(max=logits_BV.shape[1] - 1)
    return tokens_B


class InPlaceLayer(CacheLayerMixin):
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

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
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
