"""Blocks whose MLP is a mixture of experts: a router sends every row to a few of many (1701.06538)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftwood.compiler.checkpoints.weight import WeightParts
from draftwood.compiler.teachers.block import Layer
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.errors import CheckpointError

# A layer's weights by our names, and by transformers' since it keeps experts together.
_WHOLE = {
    "router.weight": "gate.weight", "experts.gate_up": "experts.gate_up_proj", "experts.down": "experts.down_proj"
}  # fmt: skip

# T rows, H hidden, E experts, K of them chosen by a row, I width of an expert


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureConfig(TeacherConfig):
    """With the experts; ``intermediate`` is the width of the layers that have none."""

    # E: experts of a layer, at most 1024, as the NPU's grouped product takes them,
    experts: int
    # and how many of them a row goes to.
    experts_per_token: int
    # Width of an expert's SwiGLU product.
    expert_intermediate: int
    # Whether the shares of the chosen experts are divided by their sum.
    shares_normalised: bool
    # Layers that have a plain MLP.
    dense_layers: tuple[int, ...]

    def __post_init__(self) -> None:
        # slots=True makes a new class, which super() without arguments does not know.
        super(MixtureConfig, self).__post_init__()
        ranges = {
            "experts": 1024,
            "experts_per_token": self.experts,
            "expert_intermediate": 2**31 - 1,
        }
        for name, most in ranges.items():
            if not 1 <= getattr(self, name) <= most:
                raise CheckpointError(f"{name} is {getattr(self, name)}; expected 1 to {most}")
        if any(not 0 <= layer < self.layers for layer in self.dense_layers):
            raise CheckpointError(f"dense_layers is {self.dense_layers}; expected layers below {self.layers}")


class Experts(nn.Module):
    """The matrices of all experts of a layer, one after another."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        E, I, H = config.experts, config.expert_intermediate, config.hidden  # noqa: E741
        self.gate_up = nn.Parameter(torch.empty(E, 2 * I, H))
        self.down = nn.Parameter(torch.empty(E, H, I))

    def forward(self, normed_TH: Tensor, ids_TK: Tensor, shares_TK: Tensor) -> Tensor:
        """The weighed sum of the experts that each row goes to."""
        mixed_TH: Tensor = torch.ops.draftwood.experts(normed_TH, ids_TK, shares_TK, self.gate_up, self.down)
        return mixed_TH


class MixtureLayer(Layer):
    """Every row's MLP is the weighed sum of the experts that its router scores highest."""

    config: MixtureConfig

    def make_mlp(self) -> None:
        self.router = nn.Linear(self.config.hidden, self.config.experts, bias=False)
        self.experts = Experts(self.config)

    def mlp(self, normed_TH: Tensor) -> Tensor:
        shares_TK, ids_TK = self.route(normed_TH)
        mixed_TH: Tensor = self.experts(normed_TH, ids_TK, shares_TK)
        return mixed_TH

    def route(self, normed_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Shares [T, K] and int32 ids [T, K] of the experts that rows go to."""
        scores_TE = self.router(normed_TH)
        shares_TK, ids_TK, _ = torch.ops.npu.npu_moe_gating_top_k_softmax(
            scores_TE, None, self.config.experts_per_token
        )
        if self.config.shares_normalised:
            shares_TK = shares_TK / shares_TK.sum(-1, keepdim=True)
        return shares_TK, ids_TK


class MixtureDecoder(Decoder):
    """A decoder with mixture layers, and plain layers if the configuration has them."""

    config: MixtureConfig

    def make_layer(self, index: int) -> Layer:
        return (Layer if index in self.config.dense_layers else MixtureLayer)(self.config)


def with_mixture(
    block: Mapping[str, WeightParts], config: TeacherConfig, ours: str, theirs: str, names: tuple[str, str, str]
) -> dict[str, WeightParts]:
    """The weights of a layer, with a mixture instead of its MLP if the configuration has one there. ``names`` are the
    files' names for an expert's gate, up and down."""
    assert isinstance(config, MixtureConfig)
    if int(ours.rpartition(".")[2]) in config.dense_layers:
        return dict(block)
    E, I, H = config.experts, config.expert_intermediate, config.hidden  # noqa: E741
    gate, up, down = names
    experts = [f"{theirs}.experts.{i}" for i in range(E)]
    halves = tuple((f"{expert}.{name}.weight", (I, H)) for expert in experts for name in (gate, up))
    downs = tuple((f"{expert}.{down}.weight", (H, I)) for expert in experts)
    plain = (f"{ours}.gate_up.weight", f"{ours}.down.weight")
    return {name: parts for name, parts in block.items() if name not in plain} | {
        f"{ours}.router.weight": WeightParts(((f"{theirs}.gate.weight", (E, H)),)),
        f"{ours}.experts.gate_up": WeightParts(halves, shape=(E, 2 * I, H)),
        f"{ours}.experts.down": WeightParts(downs, shape=(E, H, I)),
    }


def as_stored(parts: Mapping[str, WeightParts], stored: Collection[str]) -> dict[str, WeightParts]:
    """The weights of a teacher whose files may have all experts of a layer in one tensor, as transformers 5 has them in
    memory."""
    found = dict(parts)
    for name, part in parts.items():
        *block, ours = name.split(".", 2)
        if (whole := f"model.{'.'.join(block)}.mlp.{_WHOLE.get(ours)}") in stored:
            found[name] = WeightParts(((whole, part.shape or part.tensors[0][1]),))
    return found
