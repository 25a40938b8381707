"""A teacher run over texts one block at a time: only that block's weights are ever in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftwood.compiler.teachers.block import Layer
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.compiler.teachers.registry import family_of, make_decoder

# T rows of a text, N of all texts, H hidden, V vocabulary, K key/value heads, D head dimension, C columns of a piece

_PIECE = 8192  # columns of the output matrix that are computed with at a time
# Called with a linear layer's name in its block and the rows that it is given.
Watch = Callable[[str, Tensor], None]


@dataclass(slots=True)
class State:
    """A text between two blocks: the residual [T, H], and the part that is still to be added to it; None before the
    first."""

    residual_TH: Tensor
    added_TH: Tensor | None = None

    @property
    def total_TH(self) -> Tensor:
        return self.residual_TH if self.added_TH is None else self.residual_TH + self.added_TH


class Blocks:
    """A checkpoint's network; ``run`` takes its states through one block after the other, in fp32."""

    def __init__(self, checkpoint: Checkpoint, texts: Sequence[Tensor]) -> None:
        self.checkpoint, self.texts = checkpoint, texts
        config, longest = checkpoint.config, max(len(text) for text in texts)
        with torch.device("meta"):
            self.decoder: Decoder = make_decoder(config, longest)
        for name, table in family_of(config).tables(config, longest).items():
            self.decoder.register_buffer(name, torch.from_numpy(table))
        used, places = torch.unique(torch.cat(list(texts)), return_inverse=True)
        rows_UH = checkpoint.weight("embed.weight").index_select(0, used).float()
        self.decoder.embed = nn.Embedding.from_pretrained(rows_UH)
        self._ids = places.split([len(text) for text in texts])

    @torch.inference_mode()
    def run(self, watch: Watch = lambda name, rows: None) -> Iterator[tuple[Layer, list[State]]]:
        """Every block with its weights and the states after it; the next block changes the states."""
        states = [State(self.decoder.embedded(ids)) for ids in self._ids]
        for i, layer in enumerate(self.decoder.layers):
            assert isinstance(layer, Layer)
            _fill(layer, self.checkpoint, f"layers.{i}.")
            hooks = [
                module.register_forward_pre_hook(lambda _, given, name=name: watch(name, given[0]))
                for name, module in layer.named_children()
                if not list(module.children()) and module.__class__.__name__.endswith("Linear")
            ]
            for state in states:
                self._through(layer, state)
            for hook in hooks:
                hook.remove()
            yield layer, states
            layer.to_empty(device="meta")

    @torch.inference_mode()
    def scores(self, states: Sequence[State]) -> tuple[Tensor, Tensor]:
        """Each row's log-probability of the token that follows it [N], and its best token [N]."""
        _fill(self.decoder.norm, self.checkpoint, "norm.")
        hidden = [self.decoder.norm(state.total_TH)[:-1] for state in states]
        hidden_NH, next_N = torch.cat(hidden), torch.cat([text[1:] for text in self.texts])
        mass_N = torch.full((len(next_N),), -torch.inf)
        top_N, best_N, chosen_N = mass_N.clone(), torch.zeros_like(next_N), torch.zeros(len(next_N))
        for start, logits_NC in _pieces(self.checkpoint, hidden_NH):
            mass_N = torch.logaddexp(mass_N, logits_NC.logsumexp(-1))
            value_N, place_N = logits_NC.max(-1)
            best_N = torch.where(value_N > top_N, place_N + start, best_N)
            top_N = torch.maximum(top_N, value_N)
            inside_N = (next_N >= start) & (next_N < start + logits_NC.shape[1])
            held_N = (next_N - start).clamp(0, logits_NC.shape[1] - 1)
            chosen_N = torch.where(inside_N, logits_NC.gather(1, held_N[:, None])[:, 0], chosen_N)
        return chosen_N - mass_N, best_N

    def _through(self, layer: Layer, state: State) -> None:
        config, rows = self.checkpoint.config, len(state.residual_TH)
        order, none_1 = torch.arange(rows), torch.zeros(1, dtype=torch.int64)
        normed_TH, residual_TH = layer.enter(state.added_TH, state.residual_TH)
        placement = self.decoder.placement(order[None] <= order[:, None], order, none_1, none_1, 0, rows + 1)
        cos_T1D, sin_T1D = (table[:, None] for table in self.decoder.rotary(order))
        caches = (torch.zeros(config.kv_heads * (rows + 1), config.head_dim) for _ in range(2))
        moved_2PKD = torch.zeros(2, 0, config.kv_heads, config.head_dim)
        out, *_ = layer.attend(
            normed_TH, moved_2PKD, *caches, cos_T1D=cos_T1D, sin_T1D=sin_T1D, placement=placement, form="eager"
        )
        state.added_TH, state.residual_TH = layer.feed_forward(out, residual_TH)


def _fill(module: nn.Module, checkpoint: Checkpoint, prefix: str) -> None:
    values = {name: checkpoint.weight(f"{prefix}{name}") for name in module.state_dict()}
    plain = {name: value.float() if value.is_floating_point() else value for name, value in values.items()}
    module.load_state_dict(plain, assign=True)
    module.requires_grad_(False)


def _pieces(checkpoint: Checkpoint, hidden_NH: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Columns of the logits, and the number of the first."""
    name = "embed.weight" if checkpoint.config.tied else "lm_head.weight"
    weight, quantised = checkpoint.weight(name), "lm_head" in checkpoint.config.quantised
    packed = next((layer for layer in checkpoint.config.packed if layer.name == "lm_head"), None)
    scale = checkpoint.weight("lm_head.weight_scale") if quantised or packed else None
    zero = checkpoint.weight("lm_head.weight_zero") if packed and packed.zeros else None
    minimum = checkpoint.weight("lm_head.weight_minimum") if packed and packed.minimum else None
    for start in range(0, checkpoint.config.vocabulary, _PIECE):
        piece = slice(start, start + _PIECE)
        if scale is None:
            yield start, hidden_NH @ weight[piece].float().t()
        elif packed:
            more = None if zero is None else zero[piece], None, None if minimum is None else minimum[:, piece]
            yield start, torch.ops.draftwood.nbits_linear(hidden_NH, weight[piece], scale[piece], *more)
        else:
            yield start, torch.ops.draftwood.quantised_linear(hidden_NH, weight[:, piece], scale[piece])
