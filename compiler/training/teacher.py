"""The frozen teacher of a training: the compiler's own decoder, of any family, over many texts side by side.

Its layers are those that are traced into graphs; only their attention has its own form here. Products and caches are in
``dtype``, the states between layers in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftwood.compiler.teachers.block import Layer
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.compiler.teachers.experts import MixtureLayer
from draftwood.compiler.teachers.registry import family_of, make_decoder

# B texts, T new tokens of each, X = B * T rows, S tokens of a whole text, C columns of a cache, H hidden size,
# A width of the states of all layers asked for, N query heads, K key/value heads, G query heads a key head,
# D head dimension, V vocabulary


class TextCaches:
    """Keys and values of every layer, [2, B, K, C, D]. The first ``length`` columns are in use."""

    def __init__(self, teacher: FrozenTeacher, texts: int, columns: int) -> None:
        config = teacher.config
        shape = (2, texts, config.kv_heads, columns, config.head_dim)
        self.layers = [torch.zeros(shape, dtype=teacher.dtype, device=teacher.device) for _ in range(config.layers)]
        self.length = 0

    def put(self, layer: int, keys_BKTD: Tensor, values_BKTD: Tensor) -> Tensor:
        """Writes a layer's new columns after those in use; gives all of them, [2, B, K, length + T, D]."""
        end = self.length + keys_BKTD.shape[2]
        self.layers[layer][:, :, :, self.length : end] = torch.stack((keys_BKTD, values_BKTD))
        return self.layers[layer][:, :, :, :end]

    def part(self, texts: slice) -> TextCaches:
        """These texts' share of the same storage, with its own length."""
        share = copy(self)
        share.layers = [cache[:, texts] for cache in self.layers]
        return share

    def keep(self, texts: Tensor) -> None:
        """Drops all texts but these, a layer at a time: both forms of all layers may not fit together."""
        for layer, cache in enumerate(self.layers):
            self.layers[layer] = cache[:, texts]


class FrozenTeacher:
    """A teacher without gradients."""

    def __init__(self, checkpoint: Checkpoint, decoder: Decoder, dtype: torch.dtype) -> None:
        self.checkpoint, self.decoder, self.dtype = checkpoint, decoder, dtype
        self.config: TeacherConfig = checkpoint.config
        self.device = decoder.rope_cos.device

    @classmethod
    def open(
        cls, folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> FrozenTeacher:
        """The teacher of a folder, by default on the GPU if there is one.

        One in W8A8 is always in float32, which its whole numbers need.

        Raises:
            CheckpointError: the folder is not a teacher that Draftwood supports.
        """
        checkpoint, device = Checkpoint.open(folder), device or training_device()
        config = checkpoint.config
        dtype = torch.float32 if config.quantised else dtype
        with torch.device("meta"):
            decoder = make_decoder(config, config.max_positions)
        values = {name: _typed(name, checkpoint.weight(name), dtype).to(device) for name in checkpoint.names()}
        for name, table in family_of(config).tables(config, config.max_positions).items():
            values[name] = torch.from_numpy(table).to(device)
        decoder.load_state_dict(values, assign=True)
        decoder.requires_grad_(False)
        return cls(checkpoint, decoder, dtype)

    @property
    def embedding_VH(self) -> Tensor:
        """The embedding."""
        return self.decoder.embed.weight

    @property
    def output_VH(self) -> Tensor:
        """The output matrix, of numbers even if it is quantised."""
        if self.config.tied:
            return self.decoder.embed.weight
        head = self.decoder.lm_head
        return head.weight if isinstance(head, nn.Linear) else self.checkpoint.matrix("lm_head.weight").to(self.device)

    @property
    def norm_H(self) -> Tensor:
        """The weight of the last norm."""
        return self.decoder.norm.weight

    @property
    def mlp_width(self) -> int:
        """How many units of the last layer's MLP a row meets: of a mixture those of all experts that it goes to."""
        last = self.decoder.layers[-1]
        if isinstance(last, MixtureLayer):
            return last.config.experts_per_token * last.config.expert_intermediate
        return self.config.intermediate

    def last_layer(self) -> dict[str, Tensor]:
        """The last layer's matrices and norms, under the names of a Llama's layer: a drafter's layer begins with them.

        Biases and norms of heads are left out. Of a mixture, its first experts stand side by side, as many as a row
        goes to, each with an equal share.
        """
        last, name = cast(Layer, self.decoder.layers[-1]), f"layers.{self.config.layers - 1}"
        tensors = {
            "input_layernorm.weight": last.attn_norm.weight,
            "post_attention_layernorm.weight": last.mlp_norm.weight,
            "self_attn.o_proj.weight": self.checkpoint.matrix(f"{name}.o.weight"),
        }
        qkv = self.checkpoint.matrix(f"{name}.qkv.weight").split(last.widths)
        tensors |= {f"self_attn.{part}_proj.weight": matrix for part, matrix in zip("qkv", qkv, strict=True)}
        sides: tuple[Tensor, ...]
        if isinstance(last, MixtureLayer):
            count = last.config.experts_per_token
            gate, up = last.experts.gate_up[:count].chunk(2, 1)
            sides, down = (gate.flatten(0, 1), up.flatten(0, 1)), last.experts.down[:count].transpose(0, 1) / count
        else:
            sides = self.checkpoint.matrix(f"{name}.gate_up.weight").chunk(2)
            down = self.checkpoint.matrix(f"{name}.down.weight")
        tensors |= {
            "mlp.gate_proj.weight": sides[0],
            "mlp.up_proj.weight": sides[1],
            "mlp.down_proj.weight": down.flatten(1),
        }
        return {name: tensor.to(self.device, torch.float32) for name, tensor in tensors.items()}

    @torch.no_grad()
    def states(self, ids_BS: Tensor, layers: Sequence[int] = ()) -> Tensor:
        """States of whole texts, float32 [B, S, A]: those after the last norm, then those that enter ``layers``.

        The entry after the last layer is the last layer's output. Padding is on the right, and no token sees it.
        """
        position_BS = torch.arange(ids_BS.shape[1], device=self.device).expand_as(ids_BS)
        return self._run(ids_BS, position_BS, lambda layer, *rows: torch.stack(rows), None, layers)

    @torch.inference_mode()
    def step(
        self, ids_BT: Tensor, position_BT: Tensor, caches: TextCaches, seen_BC: Tensor | None,
        layers: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Logits [B, V] after the last of T tokens that are written to the caches, and ``states`` of all T.

        ``seen_BC`` says which columns hold tokens of a text, the new ones counted; None if all do.
        """
        states_BTA = self._run(ids_BT, position_BT, caches.put, seen_BC, layers)
        caches.length += ids_BT.shape[1]
        with self._products():
            return self.decoder.head(states_BTA[:, -1, : self.config.hidden]), states_BTA

    def _products(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def _run(
        self, ids_BT: Tensor, position_BT: Tensor, put: Callable[..., Tensor], seen_BC: Tensor | None,
        layers: Sequence[int],
    ) -> Tensor:  # fmt: skip
        """``put`` takes a layer's number, new keys and values, and gives all that rows may look at."""
        turned_X1D = tuple(table[:, None] for table in self.decoder.rotary(position_BT.flatten()))
        mask = None if seen_BC is None else _mask(seen_BC, ids_BT.shape[1])
        entering: dict[int, Tensor] = {}
        with self._products():
            residual_XH, added_XH = self.decoder.embedded(ids_BT.flatten()).float(), None
            for i, layer in enumerate(cast(Iterable[Layer], self.decoder.layers)):
                normed_XH, residual_XH = layer.enter(added_XH, residual_XH)
                if i in layers:
                    entering[i] = residual_XH
                q, k, v = self._heads(layer, normed_XH, turned_X1D, ids_BT.shape)
                keys, values = put(i, k, v)
                added_XH, residual_XH = layer.feed_forward(_attended(q, keys, values, mask), residual_XH)
            assert added_XH is not None, "a teacher has at least one layer"
            entering[self.config.layers] = added_XH + residual_XH
            last_XH, _ = self.decoder.norm.added(added_XH, residual_XH)
        return torch.cat([last_XH, *(entering[i] for i in layers)], -1).unflatten(0, ids_BT.shape)

    def _heads(
        self, layer: Layer, normed_XH: Tensor, turned_X1D: Sequence[Tensor], shape: Sequence[int]
    ) -> list[Tensor]:
        """q [B, N, T, D], k and v [B, K, T, D], the first two turned."""
        q, k, v = (rows.unflatten(-1, (-1, self.config.head_dim)) for rows in layer.project(normed_XH))
        q, k = (torch.ops.npu.npu_rotary_mul(rows, *turned_X1D) for rows in (q, k))
        return [rows.to(self.dtype).unflatten(0, shape).transpose(1, 2) for rows in (q, k, v)]


def training_device() -> torch.device:
    """The GPU if PyTorch finds one, else the CPU; ``CUDA_VISIBLE_DEVICES`` hides GPUs."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _typed(name: str, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers in ``dtype``, but for the scales of a quantised layer, whose weights are whole numbers."""
    return weight.to(dtype) if weight.is_floating_point() and not name.endswith("_scale") else weight


def _mask(seen_BC: Tensor, rows: int) -> Tensor:
    """The columns that each of the last ``rows`` columns sees, bool [B, 1, T, C]; padding sees itself, so no row is
    empty."""
    column_C = torch.arange(seen_BC.shape[1], device=seen_BC.device)
    own_T1 = column_C[-rows:, None]
    return ((seen_BC[:, None] & (column_C <= own_T1)) | (column_C == own_T1))[:, None]


def _attended(q_BNTD: Tensor, keys_BKCD: Tensor, values_BKCD: Tensor, mask: Tensor | None) -> Tensor:
    """Attended rows [X, N * D]; without a mask every row sees all that stand before it."""
    if q_BNTD.shape[2] == 1:
        # The query heads of one key head as rows of one product: nothing is repeated, and every kernel takes a mask.
        q_BKGD = q_BNTD[:, :, 0].unflatten(1, (keys_BKCD.shape[1], -1))
        return F.scaled_dot_product_attention(q_BKGD, keys_BKCD, values_BKCD, attn_mask=mask).flatten(1)
    if mask is not None and q_BNTD.is_cuda:  # only kernels that know no groups of heads take a mask there
        group = q_BNTD.shape[1] // keys_BKCD.shape[1]
        keys_BKCD, values_BKCD = (rows.repeat_interleave(group, 1) for rows in (keys_BKCD, values_BKCD))
    causal = mask is None and q_BNTD.shape[2] > 1
    out = F.scaled_dot_product_attention(
        q_BNTD, keys_BKCD, values_BKCD, attn_mask=mask, is_causal=causal, enable_gqa=True
    )
    return out.transpose(1, 2).flatten(0, 1).flatten(1)
