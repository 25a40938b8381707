"""Batched generation by a frozen teacher: a KV cache written in place, greedy and sampled rows side by side.

transformers' own ``generate`` copies the whole cache at every token and keeps finished rows to the end; on two
cores that costs as much as the model. Here the cache is written in place and finished rows are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.utils import logging

from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.errors import RequestError
from draftwood.runtime.speculation.sampling import Sampling, draw

# B rows, P prompt columns, C all columns, T fed columns, G key/value heads, E head size, V vocabulary

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
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return placed(model).eval().requires_grad_(False)


def placed(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The model itself, moved to the GPU if there is one."""
    nn.Module.to(model, "cuda" if torch.cuda.is_available() else "cpu")  # transformers has wrong types for its own
    return model


@torch.inference_mode()
def generate(
    model: LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    new: int,
    ends: Sequence[int],
) -> list[list[int]]:
    """Continues every prompt by up to ``new`` tokens; a text ends behind its first end token, which it keeps.

    Tokens are drawn as an engine draws them: by logits, seed and position, whatever other rows do.

    Args:
        prompts: B prompts of one or more token ids; similar lengths save padding.
        samplings: one a prompt.
    """
    rows = _Rows(model, prompts, samplings, new)
    texts: list[list[int]] = [[] for _ in prompts]
    ends_ = torch.tensor(ends, dtype=torch.int64)
    open_B = torch.ones(len(prompts), dtype=torch.bool)
    for _ in range(new):
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
        self, model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling], new: int
    ) -> None:
        count, longest = len(prompts), max(map(len, prompts))
        feed_BP = torch.zeros(count, longest, dtype=torch.int64)
        seen_BC = torch.zeros(count, longest + new, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            feed_BP[row, longest - len(prompt) :] = torch.tensor(prompt)
            seen_BC[row, longest - len(prompt) :] = True
        self.padded = not bool(seen_BC.all())  # without a mask attention takes a faster path
        self.names = list(range(count))
        self.written = 0
        self.feed_BT, self.seen_BC = feed_BP.to(model.device), seen_BC.to(model.device)
        self.positions_BT = (self.seen_BC[:, :longest].cumsum(1) - 1).clamp(min=0)
        self.samplings = list(samplings)
        self.layers = [InPlaceLayer(longest + new) for _ in range(model.config.num_hidden_layers)]
        self.cache = Cache(layers=list(self.layers))

    def step(self, model: LlamaForCausalLM) -> Tensor:
        """Feeds what is pending and draws the next token of every row, int64 [B] on the host."""
        self.written += self.feed_BT.shape[1]
        hidden_BTH = model.model(
            self.feed_BT, attention_mask=self.seen_BC[:, : self.written] if self.padded else None,
            position_ids=self.positions_BT, past_key_values=self.cache, use_cache=True,
        ).last_hidden_state  # fmt: skip
        self.positions_BT = self.positions_BT[:, -1:] + 1
        drawn_B = draws(model.lm_head(hidden_BTH[:, -1]), self.samplings, self.positions_BT[:, 0].tolist())
        self.feed_BT = drawn_B[:, None].to(model.device)
        return drawn_B

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but these."""
        self.names = [self.names[row] for row in rows.tolist()]
        self.samplings = [self.samplings[row] for row in rows.tolist()]
        rows = rows.to(self.feed_BT.device)
        for name in ("feed_BT", "seen_BC", "positions_BT"):
            setattr(self, name, getattr(self, name)[rows])
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]


def draws(logits_BV: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """One token a row for its absolute position, int64 [B] on the host."""
    tokens_B = logits_BV.max(-1).indices.cpu()  # several times faster than argmax on a CPU
    for row, (sampling, position) in enumerate(zip(samplings, positions, strict=True)):
        if not sampling.greedy:
            tokens_B[row] = draw(logits_BV[row].float().cpu().numpy(), sampling, position)
    return tokens_B


class InPlaceLayer(CacheLayerMixin):
    """One layer's keys and values, [B, G, capacity, E], of which the first columns are in use."""

    is_sliding = False
    keys: Tensor
    values: Tensor

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
