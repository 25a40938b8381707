"""A DSpark drafter in training (2026, arXiv 2607.05147; layout and losses as deepseek-ai/DeepSpec has them).

A context at slot j makes a block: the root, token j + 1, and mask tokens after it. Its row i (0-based) predicts token j
+ 2 + i. It sees the teacher's fused states of the tokens up to j, and all rows of its own block. The sequential head
reads the true token before each target, like the nodes of a tree on the true path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftwood.compiler.drafters.common.checkpoint import CachedCheckpoint
from draftwood.compiler.drafters.common.training import (
    Attention,
    Block,
    RMSNorm,
    Sizes,
    aux_layers,
    read_trained,
    teacher_sizes,
)
from draftwood.compiler.drafters.common.vocabulary import Vocabulary
from draftwood.compiler.drafters.dspark.checkpoint import DEEPSPEC, dspark_parts
from draftwood.compiler.drafters.dspark.network import DSparkConfig, Head, MarkovHead
from draftwood.compiler.training.batch import Batch
from draftwood.compiler.training.student import Student, write_folder

if TYPE_CHECKING:
    from draftwood.compiler.training.teacher import FrozenTeacher

# B texts, S slots, C contexts of a text, N contexts, I levels (rows of a block), T = C * I rows, H hidden size, R rank,
# V vocabulary, Q query heads, E head size

# Rank of the sequential head.
_RANK = 128

# The confidence is learnt from one in this many contexts of a level: it takes whole distributions.
_CONFIDENT = 4
# Rows whose distributions are held at a time.
_CHUNK = 256


class NormedAttention(Attention):
    """Attention whose query and key heads are normed, as Qwen3's are."""

    def __init__(self, sizes: Sizes, width: int) -> None:
        super().__init__(sizes, width)
        self.q_norm, self.k_norm = (RMSNorm(sizes.head_dim, sizes.rms_norm_eps) for _ in range(2))

    def queries(self, x_BTH: Tensor, position_BT: Tensor) -> Tensor:
        return self._rotated(self.q_norm(self._heads(self.q_proj(x_BTH))), position_BT)

    def keys_values(self, x_BTH: Tensor, position_BT: Tensor) -> tuple[Tensor, Tensor]:
        keys_BGTE = self._rotated(self.k_norm(self._heads(self.k_proj(x_BTH))), position_BT)
        values_BGTE = self._heads(self.v_proj(x_BTH))
        return keys_BGTE.repeat_interleave(self.groups, 1), values_BGTE.repeat_interleave(self.groups, 1)


class DenoisedBlock(Block):
    """A block whose rows see a text's slots up to their context, and all rows of their block."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.self_attn = NormedAttention(sizes, sizes.hidden_size)

    def denoised(self, x_BCIH: Tensor, known_BSH: Tensor, place_BCI: Tensor, seen_BCS: Tensor) -> Tensor:
        """``known`` are the fused states of the slots, ``place`` the rows' positions; [B, C, I, H]."""
        normed_BTH = self.input_layernorm(x_BCIH).flatten(1, 2)
        heads_BQTE = self._attended(normed_BTH, known_BSH, place_BCI, seen_BCS)
        x_BCIH = x_BCIH + self.self_attn.joined(heads_BQTE).view_as(x_BCIH)
        return x_BCIH + self.mlp(self.post_attention_layernorm(x_BCIH))

    def _attended(self, normed_BTH: Tensor, known_BSH: Tensor, place_BCI: Tensor, seen_BCS: Tensor) -> Tensor:
        attention, rows = self.self_attn, place_BCI.shape[1:]
        slot_1S = torch.arange(known_BSH.shape[1], device=known_BSH.device)[None]
        keys_BQSE, values_BQSE = attention.keys_values(known_BSH, slot_1S)
        block_pair = attention.keys_values(normed_BTH, place_BCI.flatten(1))
        keys_BQCIE, values_BQCIE = (side.unflatten(2, rows) for side in block_pair)
        queries_BQTE = attention.queries(normed_BTH, place_BCI.flatten(1))
        text_BQTS = (queries_BQTE @ keys_BQSE.transpose(-1, -2)).float()
        text_BQTS = text_BQTS.masked_fill(~seen_BCS.repeat_interleave(rows[1], 1)[:, None], -torch.inf)
        block_BQCII = (queries_BQTE.unflatten(2, rows) @ keys_BQCIE.transpose(-1, -2)).float()
        scores = torch.cat((text_BQTS, block_BQCII.flatten(2, 3)), -1) * queries_BQTE.shape[-1] ** -0.5
        shares = scores.softmax(-1).to(values_BQSE.dtype)
        of_text, of_block = shares.split((slot_1S.shape[1], rows[1]), -1)
        return of_text @ values_BQSE + (of_block.unflatten(2, rows) @ values_BQCIE).flatten(2, 3)


class DSparkStudent(Student):
    """``fc``, layers, a norm and two heads; embedding and output matrix are the teacher's.

    Features are [N, I, H + R + 1]: a level's hidden state, the latent of its sequential head, its confidence's logit.
    """

    def __init__(
        self, teacher: FrozenTeacher, sizes: Sizes, levels: int, aux: tuple[int, ...], layers: int, rank: int,
        head: Head, mask_token: int,
    ) -> None:  # fmt: skip
        super().__init__(teacher, levels, aux, None)
        self.sizes, self.rank, self.mask_token, hidden = sizes, rank, mask_token, sizes.hidden_size
        vocabulary = len(self.output_VH)
        self.fc = nn.Linear(len(aux) * teacher.config.hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, sizes.rms_norm_eps)
        self.layers = nn.ModuleList(DenoisedBlock(sizes) for _ in range(layers))
        self.norm = RMSNorm(hidden, sizes.rms_norm_eps)
        self.markov_head = MarkovHead(head, vocabulary, vocabulary, hidden, rank)
        self.confidence_head = nn.ModuleDict({"proj": nn.Linear(hidden + rank, 1)})

    def start_from(self, teacher: FrozenTeacher) -> None:
        """Begins with copies of the teacher's last layer, on its last features; the sequential head adds nothing.
        Layers after the first write nothing at first."""
        last, hidden = teacher.last_layer(), teacher.config.hidden
        for depth, layer in enumerate(cast(Iterable[DenoisedBlock], self.layers)):
            layer.load_state_dict(last, strict=False)  # all but the norms of heads
            if depth:
                layer.self_attn.o_proj.weight.data.zero_()
                layer.mlp.down_proj.weight.data.zero_()
        self.fc.weight.data.normal_(std=0.02)
        self.fc.weight.data[:, -hidden:] += torch.eye(hidden, device=self.fc.weight.device)
        self.hidden_norm.weight.data.copy_(last["input_layernorm.weight"])
        self.norm.weight.data.copy_(teacher.norm_H)
        self._start_head()

    def shape(self) -> dict[str, Any]:
        return {**super().shape(), "layers": len(self.layers)}

    def _start_head(self) -> None:
        """Begins the bias in the span of the output matrix's largest singular vectors. There similar tokens have
        similar rows. Rows that begin at random would stay random for rare tokens."""
        head, output_VH = self.markov_head, self.output_VH.float() * self.norm.weight.data
        head.markov_w2.weight.data.zero_()
        _take_span(head.markov_w2.weight.data, output_VH, 2 * output_VH.square().mean().sqrt())
        head.markov_w1.weight.data.normal_(std=0.1)
        _take_span(head.markov_w1.weight.data, self.embedding_TH.float(), torch.ones(()))
        for part in (head.joint_proj.weight.data, head.joint_proj.bias.data):
            part[-self.rank :] = 0

    def output(self, level: int) -> Tensor:
        """The teacher's matrix and the bias's matrix, joined [V, H + R]: one product gives a node's logits."""
        return torch.cat((self.output_VH, self.markov_head.markov_w2.weight.to(self.output_VH.dtype)), 1)

    def features(self, batch: Batch) -> Tensor:
        hidden_NIH = self._denoised(batch)
        state_NR, features = hidden_NIH.new_zeros(len(hidden_NIH), self.rank), []
        for level in range(self.levels):
            token_N, level_NH = batch.ahead(1 + level)[batch.there_BC], hidden_NIH[:, level]
            token_NR, latent_NR, state_NR = self.markov_head(token_N, level_NH, state_NR)
            # The confidence head does not change the training of the other parts.
            read_NX = torch.cat((level_NH, token_NR), -1).detach()
            features.append(torch.cat((level_NH, latent_NR, self.confidence_head["proj"](read_NX)), -1))
        return torch.stack(features, 1)

    def _denoised(self, batch: Batch) -> Tensor:
        """The blocks' hidden states after the last norm, [N, I, H]."""
        known_BSH = self.hidden_norm(self.fc(batch.aux_BSF.to(self.output_VH.dtype)))
        slot_S, level_I = (torch.arange(size, device=known_BSH.device) for size in (known_BSH.shape[1], self.levels))
        place_BCI = batch.slot_BC[:, :, None] + 1 + level_I
        seen_BCS = slot_S <= batch.slot_BC[:, :, None]
        ids_BCI = torch.where(level_I == 0, batch.ahead(1)[:, :, None], self.mask_token)
        x_BCIH = self.embedding_TH[ids_BCI].float()
        for layer in cast(Iterable[DenoisedBlock], self.layers):
            x_BCIH = layer.denoised(x_BCIH, known_BSH, place_BCI, seen_BCS)
        return self.norm(x_BCIH[batch.there_BC])

    def losses(self, batch: Batch, features_NIH: Tensor, weight_NI: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross-entropy with the teacher's distribution, and that of the confidence with the acceptance."""
        nodes_NIH, logit_NI = features_NIH[..., :-1], features_NIH[..., -1].float()
        loss, nats_I = self.distribution_loss(batch, nodes_NIH, weight_NI)
        order_N, order_I = (torch.arange(size, device=weight_NI.device) for size in weight_NI.shape)
        some_NI = ((order_N[:, None] + order_I) % _CONFIDENT == 0) & (weight_NI > 0)
        wanted_R = self._accepted(batch, nodes_NIH.detach()[some_NI], some_NI)
        missed_R = F.binary_cross_entropy_with_logits(logit_NI[some_NI], wanted_R, reduction="none")
        loss = loss + _CONFIDENT * (missed_R * weight_NI[some_NI]).sum()
        sums_I = torch.zeros_like(logit_NI).masked_scatter(some_NI, missed_R.detach()).sum(0)
        return loss, {"nats": nats_I, "confidence": sums_I * _CONFIDENT}

    @torch.no_grad()
    def _accepted(self, batch: Batch, nodes_RH: Tensor, some_NI: Tensor) -> Tensor:
        """The share of draws from some nodes that the teacher would accept, [R]: 1 less the total variation."""
        output_VX, dtype = self.output(0), self.output_VH.dtype
        last_RH = batch.last_BSH.flatten(0, 1)[batch.places(self.levels)[some_NI]].to(dtype)
        accepted = []
        for nodes, last in zip(nodes_RH.to(dtype).split(_CHUNK), last_RH.split(_CHUNK), strict=True):
            drafted_RV, taught_RV = (
                F.linear(*pair).float().softmax(-1) for pair in ((nodes, output_VX), (last, self.output_VH))
            )
            accepted.append(torch.minimum(drafted_RV, taught_RV).sum(-1))
        return torch.cat(accepted) if accepted else nodes_RH.new_zeros(0, dtype=torch.float32)

    def logits(self, features_NH: Tensor, level: int, noise_NV: Tensor | None = None) -> Tensor:
        return super().logits(features_NH[:, :-1], level, noise_NV)

    def save(self, folder: Path) -> None:
        count = len(self.layers)
        config = {
            "architectures": [DEEPSPEC], "model_type": "qwen3", "num_hidden_layers": count, **asdict(self.sizes),
            "hidden_act": "silu", "attention_bias": False, "layer_types": ["full_attention"] * count,
            "vocab_size": len(self.output_VH), "max_position_embeddings": self.positions,
            "target_hidden_size": self.fc.in_features // len(self.aux), "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "block_size": self.levels, "mask_token_id": self.mask_token,
            "target_layer_ids": [layer - 1 for layer in self.aux], "aux_layer_ids": list(self.aux),
            "markov_rank": self.rank, "markov_head_type": self.markov_head.kind,
            "enable_confidence_head": True, "confidence_head_with_markov": True,
        }  # fmt: skip
        write_folder(folder, self.state_dict(), config)


def _take_span(rows_VR: Tensor, of_VH: Tensor, size: Tensor) -> None:
    """Sets columns to a matrix's principal components, the largest first, with that root mean square over all."""
    left_VX, sizes_X, _ = torch.linalg.svd(of_VH, full_matrices=False)
    width = min(rows_VR.shape[1], len(sizes_X))
    found_VX = left_VX[:, :width] * sizes_X[:width]
    rows_VR[:, :width] = found_VX * (size / found_VX.square().mean().sqrt())


# Random ids that a step's cross-entropy covers in addition to its texts' ids.
_NEGATIVES = 1024


def begin(teacher: FrozenTeacher, options: Mapping[str, Any], ids_V: Tensor | None) -> DSparkStudent:
    """A student of the chosen levels and layers. Its sequential head is the recurrent one. Its mask token is the one
    that texts begin with; no text has it further on."""
    mask = teacher.config.bos or 0
    sizes, aux = teacher_sizes(teacher), aux_layers(teacher)
    student = DSparkStudent(teacher, sizes, options["levels"], aux, options["layers"], _RANK, "rnn", mask)
    student.negatives, student.shared_noise = _NEGATIVES, options["shared_noise"]
    return student


def read_back(
    opened: CachedCheckpoint[DSparkConfig], teacher: FrozenTeacher, levels: int | None
) -> tuple[DSparkStudent, dict[str, Tensor]]:
    """A trained drafter as a student, and its values."""
    config = opened.config
    others = {
        "a part of the vocabulary": config.mapped,
        "a first draft by a mask token's row": not config.from_root,
        "no confidence head that reads the token before": config.confidence != "markov",
    }
    vocabulary = Vocabulary(config.block.vocabulary, config.block.vocabulary, config.draft_vocabulary)
    sizes, tensors, _ = read_trained(opened, dspark_parts(config, vocabulary), others)
    options = config.block.layers, config.markov_rank, config.markov_head, config.mask_token
    return DSparkStudent(teacher, sizes, config.levels, config.aux_layers, *options), tensors
