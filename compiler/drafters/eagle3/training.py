"""An EAGLE-3 layer in training: the training-time test (Li et al., 2025; layout of SafeAILab/EAGLE).

Slot j sees the embedding of token j + 1 and the teacher's features of token j. Level 0 predicts token j + 2 there.
Level i is at slot j + i, as in the runtime. Its input is the layer's output of the level before (before the norm) with
the embedding of token j + 1 + i. It attends to the slots up to j, made from the teacher's features, and to its own
levels of this context. So no level ever sees features that a draft would not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from draftwood.compiler.drafters.common.checkpoint import CachedCheckpoint
from draftwood.compiler.drafters.common.training import Block, RMSNorm, Sizes, aux_layers, read_trained, teacher_sizes
from draftwood.compiler.drafters.common.vocabulary import Vocabulary
from draftwood.compiler.drafters.eagle3.checkpoint import eagle3_parts
from draftwood.compiler.drafters.eagle3.layouts import Spelling
from draftwood.compiler.drafters.eagle3.network import Eagle3Config
from draftwood.compiler.drafters.kind import EAGLE3
from draftwood.compiler.training.batch import Batch
from draftwood.compiler.training.student import Student, write_folder

if TYPE_CHECKING:
    from draftwood.compiler.training.teacher import FrozenTeacher

# B texts, S slots, C contexts of a text, N contexts, I levels, H hidden size, Q heads, E head size, V draft ids


class Midlayer(Block):
    """A block that reads an embedding and a hidden state side by side, each after its own norm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes, 2 * sizes.hidden_size)
        self.hidden_norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)

    def joined(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """The attention's input, [..., 2H]: the embedding first."""
        return torch.cat((self.input_layernorm(embedding), self.hidden_norm(hidden)), -1)


class Eagle3Student(Student):
    """``fc``, one layer and a norm; the output matrix is the teacher's."""

    def __init__(
        self, teacher: FrozenTeacher, sizes: Sizes, levels: int, aux: tuple[int, ...], ids_V: Tensor | None
    ) -> None:
        super().__init__(teacher, levels, aux, ids_V)
        self.sizes = sizes
        self.fc = nn.Linear(len(aux) * teacher.config.hidden, sizes.hidden_size, bias=False)
        self.midlayer = Midlayer(sizes)
        self.norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)

    def start_from(self, teacher: FrozenTeacher) -> None:
        """Begins as the teacher's last layer on the last features, its new inputs small and random."""
        last, hidden = teacher.last_layer(), teacher.config.hidden
        for name, weight in last.items():
            parameter = self.midlayer.get_parameter(name)
            if parameter.shape == weight.shape:
                parameter.data.copy_(weight)
            else:  # query, key and value: the embedding's columns come first
                parameter.data[:, :hidden].normal_(std=0.02)
                parameter.data[:, hidden:].copy_(weight)
        self.midlayer.hidden_norm.weight.data.copy_(last["input_layernorm.weight"])
        self.fc.weight.data.normal_(std=0.02)
        self.fc.weight.data[:, -hidden:] += torch.eye(hidden, device=self.fc.weight.device)
        self.norm.weight.data.copy_(teacher.norm_H)

    def features(self, batch: Batch) -> Tensor:
        return torch.stack([self.norm(hidden_NH) for hidden_NH in self.hiddens(batch)], 1)

    def hiddens(self, batch: Batch) -> list[Tensor]:
        """Each level's feedback, [N, H] a level: the layer's output before the norm."""
        mid, attention = self.midlayer, self.midlayer.self_attn
        fused_BSH = self.fc(batch.aux_BSF.to(self.output_VH.dtype))
        slot_1S = torch.arange(fused_BSH.shape[1] - 1, device=fused_BSH.device)[None]
        sees_BSH = mid.joined(self._embedded(batch.ids_BS[:, 1:]), fused_BSH[:, :-1])
        keys, values = attention.keys_values(sees_BSH, slot_1S)
        # A slot's own key is among its levels, so only earlier slots are seen here.
        earlier_BCS = slot_1S[:, None] < batch.slot_BC[:, :, None]
        hidden_BCH, level_pairs, hiddens = batch.spread(fused_BSH).float(), [], []
        for level in range(self.levels):
            x_BCH = mid.joined(self._embedded(batch.ahead(1 + level)), hidden_BCH)
            level_pairs.append(attention.keys_values(x_BCH, batch.slot_BC + level))
            queries_BQCE = attention.queries(x_BCH, batch.slot_BC + level)
            heads_BQCE = attend(queries_BQCE, keys, values, earlier_BCS, level_pairs)
            hidden_BCH = hidden_BCH + attention.joined(heads_BQCE)
            hidden_BCH = hidden_BCH + mid.mlp(mid.post_attention_layernorm(hidden_BCH))
            hiddens.append(hidden_BCH[batch.there_BC])
        return hiddens

    def _embedded(self, ids: Tensor) -> Tensor:
        return self.embedding_TH[ids]

    def losses(self, batch: Batch, features_NIH: Tensor, weight_NI: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """EAGLE-3 has no other term than the cross-entropy with the teacher's distribution."""
        loss, nats_I = self.distribution_loss(batch, features_NIH, weight_NI)
        return loss, {"nats": nats_I}

    def save(self, folder: Path) -> None:
        config = {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
            **asdict(self.sizes), "hidden_act": "silu", "attention_bias": False,
            "vocab_size": len(self.embedding_TH), "draft_vocab_size": len(self.output_VH),
            "max_position_embeddings": self.positions, "target_hidden_size": self.fc.in_features // len(self.aux),
            "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            # The ids again, under the name that leaves no doubt that states entering the layers are meant.
            "aux_layer_ids": list(self.aux),
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.aux), "use_aux_hidden_state": True},
        }  # fmt: skip
        write_folder(folder, self.state_dict() | self.maps(), config)


def attend(
    queries_BQCE: Tensor, keys_BQSE: Tensor, values_BQSE: Tensor, seen_BCS: Tensor, levels: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """Attention over the visible slots and over the context's levels, one key and value each; [B, Q, C, E]."""
    scores_BQCS = (queries_BQCE @ keys_BQSE.transpose(-1, -2)).float().masked_fill(~seen_BCS[:, None], -torch.inf)
    scores_BQCI = torch.stack([(queries_BQCE * keys).sum(-1) for keys, _ in levels], -1).float()
    shares = (torch.cat((scores_BQCS, scores_BQCI), -1) * queries_BQCE.shape[-1] ** -0.5).softmax(-1)
    slots = keys_BQSE.shape[2]
    out_BQCE = shares[..., :slots].to(values_BQSE.dtype) @ values_BQSE
    for level, (_, values_BQCE) in enumerate(levels):
        out_BQCE = out_BQCE + shares[..., slots + level, None].to(out_BQCE.dtype) * values_BQCE
    return out_BQCE


def begin(teacher: FrozenTeacher, options: Mapping[str, Any], ids_V: Tensor | None) -> Eagle3Student:
    """A student of the chosen levels; its layer is as large as the teacher's."""
    student = Eagle3Student(teacher, teacher_sizes(teacher), options["levels"], aux_layers(teacher), ids_V)
    student.shared_noise = options["shared_noise"]
    return student


def read_back(
    opened: CachedCheckpoint[Eagle3Config], teacher: FrozenTeacher, levels: int | None
) -> tuple[Eagle3Student, dict[str, Tensor]]:
    """A trained drafter as a student that drafts ``levels`` ahead, by default as a training does; and its values."""
    levels, config = levels or EAGLE3.options["levels"].default, opened.config
    others = {
        "more than one block": config.block.layers > 1,
        "norms of query and key heads": config.block.qk_norm,
        "norms before fc": config.feature_norm != "none",
        "norm_before_residual": config.norm_before_residual,
        "normed feedback": config.norm_output,
    }
    vocabulary = Vocabulary(config.block.vocabulary, config.block.vocabulary, config.draft_vocabulary)
    parts = eagle3_parts(config, vocabulary, Spelling("", "midlayer", 1))
    sizes, tensors, ids_V = read_trained(opened, parts, others)
    return Eagle3Student(teacher, sizes, levels, config.aux_layers, ids_V), tensors
