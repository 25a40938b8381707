"""A FastEagle cascade in training (Huang et al., 2025, arXiv 2509.20416): N layers, one pass, one token a layer.

Slot j sees the teacher's fused features of token j and the embedding of token j + 1. Layer i (0-based) reads the output
of the layer before and predicts token j + 2 + i. Every layer is supervised at its own future position. Layers may be
narrower than the teacher's, since every draft reads all of them. The paper gives neither the terms of its loss nor
their weights. Each of our layers has two losses: the cross-entropy with the teacher's distribution, and the smooth-L1
distance of the normed output from the teacher's final state there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftwood.compiler.drafters.common.checkpoint import CachedCheckpoint
from draftwood.compiler.drafters.common.config import CachedConfig
from draftwood.compiler.drafters.common.training import Block, RMSNorm, Sizes, aux_layers, read_trained, teacher_sizes
from draftwood.compiler.training.batch import Batch
from draftwood.compiler.training.student import Student, write_folder
from draftwood.errors import RequestError

if TYPE_CHECKING:
    from draftwood.compiler.training.teacher import FrozenTeacher

# B texts, S slots, N contexts, I levels (layers), H hidden size


class FastEagleStudent(Student):
    """``fc``, ``proj``, one layer a level and a norm; the output matrix is the teacher's."""

    def __init__(
        self, teacher: FrozenTeacher, sizes: Sizes, levels: int, aux: tuple[int, ...], ids_V: Tensor | None
    ) -> None:
        super().__init__(teacher, levels, aux, ids_V)
        self.sizes, hidden = sizes, sizes.hidden_size
        self.fc = nn.Linear(len(aux) * teacher.config.hidden, hidden, bias=False)
        self.proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList(Block(sizes) for _ in range(levels))
        self.norm = RMSNorm(hidden, sizes.rms_norm_eps)
        # Factor of embeddings in training; the stored matrix that reads them includes it.
        self.scale = 1.0

    def start_from(self, teacher: FrozenTeacher) -> None:
        """Begins with copies of the teacher's last layer, or of a part, on the last features; embeddings enter small.

        Layers after the first write nothing at first: each begins with the guess of the layer before. Embeddings are
        often far smaller than states (1 : 50 in a teacher of 8 M). Steps of equal size would hardly change the weights
        that read them. In training they are therefore brought to the states' scale.
        """
        last = narrowed(teacher.last_layer(), teacher_sizes(teacher), self.sizes)
        for level, layer in enumerate(cast(Iterable[Block], self.layers)):
            layer.load_state_dict(last)
            if level:
                layer.self_attn.o_proj.weight.data.zero_()
                layer.mlp.down_proj.weight.data.zero_()
        eye = torch.eye(self.sizes.hidden_size, device=self.fc.weight.device)
        self.fc.weight.data.normal_(std=0.02)
        self.fc.weight.data[:, -len(eye) :] += eye
        self.proj.weight.data.copy_(torch.cat((eye, 0.02 * torch.randn_like(eye)), 1))
        self.scale = _scale(teacher, self.aux[-1])
        self.norm.weight.data.copy_(teacher.norm_H)

    def shape(self) -> dict[str, Any]:
        sizes = self.sizes
        own = [sizes.num_attention_heads, sizes.num_key_value_heads, sizes.intermediate_size]
        return {**super().shape(), "layer_sizes": own}

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        super().take({**tensors, **self._scaled(tensors, 1 / self.scale)})

    def _scaled(self, tensors: Mapping[str, Tensor], factor: float) -> dict[str, Tensor]:
        """``proj.weight``, if present, in float32, with its columns for an embedding multiplied."""
        scaled = {name: tensors[name].float().clone() for name in ("proj.weight",) if name in tensors}
        for tensor in scaled.values():
            tensor[:, self.sizes.hidden_size :] *= factor
        return scaled

    def features(self, batch: Batch) -> Tensor:
        fused_BSH = self.fc(batch.aux_BSF.to(self.output_VH.dtype))[:, :-1]
        embedded_BSH = self.embedding_TH[batch.ids_BS[:, 1:]]
        x_BSH = self.proj(torch.cat((fused_BSH, self.scale * embedded_BSH.to(fused_BSH.dtype)), -1)).float()
        features = []
        for layer in self.layers:
            x_BSH = layer(x_BSH)
            features.append(self.norm(batch.pick(x_BSH)))
        return torch.stack(features, 1)

    def losses(self, batch: Batch, features_NIH: Tensor, weight_NI: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        parts: dict[str, Tensor] = {}
        tokens, parts["nats"] = self.distribution_loss(batch, features_NIH, weight_NI)
        wanted_NIH = batch.last_BSH.flatten(0, 1)[batch.places(self.levels)]
        distance_NI = F.smooth_l1_loss(features_NIH.float(), wanted_NIH.float(), reduction="none").mean(-1)
        parts["feature"] = (distance_NI.detach() * (weight_NI > 0)).sum(0)
        return tokens + (distance_NI * weight_NI).sum(), parts

    def save(self, folder: Path) -> None:
        tensors = self.state_dict()
        tensors |= self._scaled(tensors, self.scale) | self.maps()
        config = {
            "architectures": ["FastEagleDrafter"], "model_type": "fasteagle", "num_hidden_layers": self.levels,
            **asdict(self.sizes), "vocab_size": len(self.embedding_TH), "draft_vocab_size": len(self.output_VH),
            "target_hidden_size": self.fc.in_features // len(self.aux), "aux_layer_ids": list(self.aux),
        }  # fmt: skip
        write_folder(folder, tensors, config)


@torch.no_grad()
def _scale(teacher: FrozenTeacher, layer: int) -> float:
    """How much larger the states that enter a layer are than embeddings: medians over the first token ids."""
    ids_1S = torch.arange(min(64, teacher.config.vocabulary), device=teacher.device)[None]
    _, small, large = (
        state.square().mean(-1).sqrt().median() for state in teacher.states(ids_1S, (0, layer)).chunk(3, -1)
    )
    return float(large / small)


def narrowed(state: dict[str, Tensor], wide: Sizes, narrow: Sizes) -> dict[str, Tensor]:
    """A block's tensors with fewer heads and MLP units.

    It keeps the first key/value heads, each with the first of its query heads. It also keeps the units that write most,
    by the norms of their rows of ``up_proj`` and columns of ``down_proj``.

    ``state`` is a Llama block's of sizes ``wide``; hidden and head sizes stay.
    """
    groups = [sizes.num_attention_heads // sizes.num_key_value_heads for sizes in (wide, narrow)]
    key_heads = torch.arange(narrow.num_key_value_heads)
    query_heads = (key_heads[:, None] * groups[0] + torch.arange(groups[1])).flatten()
    reach = state["mlp.up_proj.weight"].float().norm(dim=1) * state["mlp.down_proj.weight"].float().norm(dim=0)
    units = reach.topk(narrow.intermediate_size).indices.sort().values
    queries, keys = (
        (h[:, None] * wide.head_dim + torch.arange(wide.head_dim)).flatten() for h in (query_heads, key_heads)
    )
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "gate_proj": units, "up_proj": units}
    columns = {"o_proj": queries, "down_proj": units}
    narrow_state = {}
    for name, tensor in state.items():
        part = name.split(".")[-2]
        along, index = (0, rows[part]) if part in rows else (1, columns.get(part))
        narrow_state[name] = tensor if index is None else tensor.index_select(along, index.to(tensor.device))
    return narrow_state


def begin(teacher: FrozenTeacher, options: Mapping[str, Any], ids_V: Tensor | None) -> FastEagleStudent:
    """A student of the chosen levels and sizes."""
    sizes = _sizes(options["layer_sizes"], teacher_sizes(teacher))
    student = FastEagleStudent(teacher, sizes, options["levels"], aux_layers(teacher), ids_V)
    student.shared_noise = options["shared_noise"]
    return student


def _sizes(asked: Sequence[int] | None, wide: Sizes) -> Sizes:
    """The dimensions of a layer: the teacher's, or the heads, key/value heads and MLP width that are asked for."""
    if asked is None:
        return wide
    heads, kv_heads, width = asked
    group = wide.num_attention_heads // wide.num_key_value_heads
    for name, size, most in (
        ("the MLP width", width, wide.intermediate_size),
        ("the number of key/value heads", kv_heads, wide.num_key_value_heads),
        ("the number of query heads", heads, group * kv_heads),
    ):
        if not 1 <= size <= most:
            raise RequestError(
                f"--layer-sizes: {name} is {size}; expected 1 to {most}: a layer begins as part of the teacher's last"
            )
    if heads % kv_heads:
        raise RequestError(f"--layer-sizes: {heads} query heads; expected a multiple of the {kv_heads} key/value heads")
    return replace(wide, num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=width)


def read_back(
    opened: CachedCheckpoint[CachedConfig], teacher: FrozenTeacher, levels: int | None
) -> tuple[FastEagleStudent, dict[str, Tensor]]:
    """A trained drafter as a student, and its values."""
    sizes, tensors, ids_V = read_trained(opened, opened.parts, {})
    config = opened.config
    return FastEagleStudent(teacher, sizes, config.block.layers, config.aux_layers, ids_V), tensors
