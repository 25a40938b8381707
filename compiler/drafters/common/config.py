"""What a drafter with caches is: its blocks, the teacher states it reads, the tokens it proposes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.llama import LLAMA
from draftwood.errors import CheckpointError

AUX_STATES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedConfig:
    """What all of them share."""

    # Their decoder blocks are a Llama's; its vocabulary is the teacher's.
    block: TeacherConfig
    # Width of one teacher state.
    target_hidden: int
    # The teacher states that fc reads, as the layers they enter, ascending; what leaves the last layer
    # "enters" layer L.
    aux_layers: tuple[int, ...]
    # Tokens it can propose; a map to the teacher's ids goes with fewer than the teacher has.
    draft_vocabulary: int
    # Whether it embeds tokens with a matrix of its own instead of the teacher's,
    own_embedding: bool
    # and whether its output matrix is the teacher's, or the rows of the draft vocabulary of it.
    tied_head: bool

    @property
    def mapped(self) -> bool:
        """Whether draft ids differ from the teacher's."""
        return self.draft_vocabulary < self.block.vocabulary

    @property
    def has_head(self) -> bool:
        """Whether an output matrix is stored with the drafter; otherwise the teacher's serves as it is."""
        return self.mapped or not self.tied_head


def read_block(fields: Fields, teacher: TeacherConfig, layers: int, model_type: str = "llama") -> TeacherConfig:
    """The drafter's blocks from the fields that a Llama's configuration has, checked against the teacher.

    ``model_type`` is what the kind of drafter calls such blocks.

    Raises:
        CheckpointError: a field is missing or unsupported, or belongs to a drafter of another teacher.
    """
    # Drafters state the length they were trained at, if any: rotary tables are made as long as the cache.
    usual = {"max_position_embeddings": teacher.max_positions, "num_hidden_layers": layers}
    fields = Fields(fields.path, fields.values | {name: fields.get(name, value) for name, value in usual.items()})
    values = LLAMA.values(fields) | {"bos": None, "eos": ()}
    if fields.get("model_type", model_type) != model_type:
        fields.fail("model_type", f"{model_type!r}; blocks of no other family are supported")
    if fields.whole("vocab_size") != teacher.vocabulary:
        fields.fail("vocab_size", f"{teacher.vocabulary} as the teacher has; use the drafter of this teacher")
    if fields.whole("num_hidden_layers") != layers:
        fields.fail("num_hidden_layers", f"{layers}; a deeper drafter of this kind is not supported")
    try:
        return TeacherConfig(**values)
    except CheckpointError as error:
        text = str(error)
        raise CheckpointError(text if text.startswith(str(fields.path)) else f"{fields.path}: {text}") from None


def read_widths(fields: Fields, teacher: TeacherConfig, block: TeacherConfig) -> tuple[int, int]:
    """(target_hidden, draft_vocabulary), checked against the teacher."""
    target = fields.whole("target_hidden_size", block.hidden)
    if target != teacher.hidden:
        fields.fail(
            "target_hidden_size", f"{teacher.hidden}, the teacher's hidden size; use the drafter of this teacher"
        )
    draft = fields.whole("draft_vocab_size", block.vocabulary)
    if not 1 <= draft <= block.vocabulary:
        fields.fail("draft_vocab_size", f"1 to {block.vocabulary}, the teacher's vocabulary")
    return target, draft


def check_aux_layers(fields: Fields, name: str, ids: tuple[int, ...], teacher: TeacherConfig) -> tuple[int, ...]:
    """The ids back, if they are three ascending layers that a state of this teacher enters."""
    ascending = all(low < high for low, high in pairwise(ids))
    if len(ids) != AUX_STATES or not ascending or ids[0] < 0 or ids[-1] > teacher.layers:
        raise CheckpointError(
            f"{fields.path}: {name} gives the states entering layers {list(ids)}; expected {AUX_STATES} ascending"
            f" ids from 0 to {teacher.layers} for a teacher of {teacher.layers} layers; use the drafter of this"
            " teacher, or state its layers as aux_layer_ids"
        )
    return ids
