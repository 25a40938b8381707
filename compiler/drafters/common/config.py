"""The configuration of a drafter with caches: its blocks, the teacher states it reads, the tokens it proposes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from msgspec import structs

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.llama import LLAMA
from draftwood.errors import CheckpointError
from draftwood.manifest import TokenRows

_WINDOW = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
_LAYER_TYPES = ("full_attention", "sliding_attention")
# Windows are of thousands of tokens; a shorter one than this is no published drafter's.
_LEAST_WINDOW = 64
# Names of the mask token: speculators, SpecForge and Automodel; vLLM; Amazon.
_MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedConfig:
    """The fields that all drafters with caches share."""

    # Their decoder blocks are a Llama's; its vocabulary is the teacher's.
    block: TeacherConfig
    # Width of one teacher state.
    target_hidden: int
    # The teacher states that fc reads, as the layers they enter, ascending; the last layer's output "enters" layer L.
    aux_layers: tuple[int, ...]
    # Tokens it can propose; a map to the teacher's ids goes with fewer than the teacher has.
    draft_vocabulary: int
    # Whether it embeds tokens with its own matrix instead of the teacher's,
    own_embedding: bool
    # and whether its output matrix is the teacher's, or the rows of the draft vocabulary of it.
    tied_head: bool
    # The positions that a row sees, its own counted; None for all before it.
    window: int | None = None
    # Linear layers of the network that are W8A8.
    quantised: tuple[str, ...] = ()

    @property
    def buffers(self) -> tuple[TokenRows, ...]:
        """The memory of a sequence: the caches of its blocks."""
        return tuple(structs.replace(rows, name=f"draft_{rows.name}") for rows in self.block.buffers)

    @property
    def mapped(self) -> bool:
        """Whether draft ids differ from the teacher's."""
        return self.draft_vocabulary < self.block.vocabulary

    @property
    def has_head(self) -> bool:
        """Whether the drafter stores an output matrix; otherwise it uses the teacher's."""
        return self.mapped or not self.tied_head

    @property
    def features(self) -> int:
        """Width of the teacher's states of one token, side by side."""
        return len(self.aux_layers) * self.target_hidden


def read_block(
    fields: Fields, teacher: TeacherConfig, layers: int, model_types: tuple[str, ...] = ("llama",)
) -> TeacherConfig:
    """The drafter's blocks from the fields that a Llama's configuration has, checked against the teacher.

    ``model_types`` are the names of such blocks for this kind of drafter; its window is read by ``read_window``.

    Raises:
        CheckpointError: a field is missing or unsupported, or belongs to a drafter of another teacher.
    """
    # Drafters state the length they were trained at, if any: rotary tables are made as long as the cache.
    usual = {"max_position_embeddings": teacher.max_positions, "num_hidden_layers": layers}
    fields = Fields(fields.path, fields.values | {name: fields.get(name, value) for name, value in usual.items()})
    plain = Fields(fields.path, {name: value for name, value in fields.values.items() if name not in _WINDOW})
    values = LLAMA.values(plain) | {"vocabulary": teacher.vocabulary, "bos": None, "eos": ()}
    if fields.get("model_type", model_types[0]) not in model_types:
        known = " or ".join(map(repr, model_types))
        fields.fail("model_type", f"{known}; blocks of no other family are supported")
    if fields.whole("num_hidden_layers") != layers:
        fields.fail("num_hidden_layers", f"{layers}, as many as the file has tensors for")
    try:
        return TeacherConfig(**values)
    except CheckpointError as error:
        text = str(error)
        raise CheckpointError(text if text.startswith(str(fields.path)) else f"{fields.path}: {text}") from None


def read_window(fields: Fields, layers: int) -> int | None:
    """The number of positions that a row sees, None for all; ``layer_types`` decides, as in speculators and vLLM.

    Raises:
        CheckpointError: layers differ, or the fields contradict each other or are ambiguous.
    """
    kinds = fields.get("layer_types", [])
    if kinds:
        if not isinstance(kinds, list) or kinds not in ([kind] * len(kinds) for kind in _LAYER_TYPES):
            fields.fail("layer_types", f"{' in every layer, or '.join(map(repr, _LAYER_TYPES))} in every layer")
        if kinds[0] == "full_attention":
            return None
        if not fields.flag("use_sliding_window", True):
            fields.fail("use_sliding_window", "true with layer_types that slide, or no such field")
        if (window := fields.whole("sliding_window")) < _LEAST_WINDOW:
            fields.fail("sliding_window", f"{_LEAST_WINDOW} or more")
        return window
    # Without them Qwen's layers slide from max_window_layers on, if sliding is switched on.
    if fields.flag("use_sliding_window", False) and fields.whole("max_window_layers", 0) < layers:
        fields.fail("use_sliding_window", "false, or layer_types that say which layers slide")
    if fields.get("sliding_window") is not None and fields.get("use_sliding_window") is None:
        fields.fail("sliding_window", "null, or layer_types that say which layers slide")
    return None


def read_target(fields: Fields, teacher: TeacherConfig, hidden: int) -> int:
    """Width of one teacher state, checked against the teacher."""
    target = fields.whole("target_hidden_size", hidden)
    if target != teacher.hidden:
        fields.fail(
            "target_hidden_size", f"{teacher.hidden}, the teacher's hidden size; use the drafter of this teacher"
        )
    return target


def check_aux_layers(fields: Fields, name: str, ids: tuple[int, ...], teacher: TeacherConfig) -> tuple[int, ...]:
    """The ids back, if they are ascending layers that a state of this teacher enters."""
    ascending = all(low < high for low, high in pairwise(ids))
    if not ids or not ascending or ids[0] < 0 or ids[-1] > teacher.layers:
        raise CheckpointError(
            f"{fields.path}: {name} gives the states entering layers {list(ids)}; expected ascending"
            f" ids from 0 to {teacher.layers} for a teacher of {teacher.layers} layers; use the drafter of this"
            " teacher, or state its layers as aux_layer_ids"
        )
    return ids


def read_mask_token(sources: Iterable[Fields], teacher: TeacherConfig) -> int:
    """The mask token, from every object and field of config.json in which it is published; they must agree.

    Raises:
        CheckpointError: no field names it, two differ, or it is no token of the teacher.
    """
    sources = tuple(sources)
    named = [(source, name) for source in sources for name in _MASK_TOKENS if source.get(name) is not None]
    ids = sorted({source.whole(name) for source, name in named})
    if not ids:
        sources[0].fail("mask_token_id", "the id of the mask token; if the writer left it out, its training knows it")
    source, name = named[0]
    if len(ids) > 1:
        source.fail(name, f"the same id in every place that names the mask token, not {' and '.join(map(str, ids))}")
    if not 0 <= ids[0] < teacher.vocabulary:
        source.fail(name, f"an id of the teacher, below {teacher.vocabulary}")
    return ids[0]
