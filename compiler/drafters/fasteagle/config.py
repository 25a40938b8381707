"""What network the config.json of a FastEagle drafter describes."""

from __future__ import annotations

from dataclasses import dataclass

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.drafters.common.config import (
    CachedConfig,
    check_aux_layers,
    read_block,
    read_target,
    read_window,
)
from draftwood.compiler.drafters.common.vocabulary import Vocabulary
from draftwood.compiler.teachers.config import TeacherConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class FastEagleConfig(CachedConfig):
    """A cascade, one block a level, and maybe a cell."""

    # Width of the state of the cell that tells levels their parent's token; 0 without one, as in the paper.
    cell_size: int = 0
    # Tokens of each level that the cell ranks.
    cell_shortlist: int = 0


def read_fasteagle_config(
    fields: Fields, teacher: TeacherConfig, vocabulary: Vocabulary, tied_head: bool
) -> FastEagleConfig:
    """The network that config.json describes.

    Raises:
        CheckpointError: a field is missing or does not fit the teacher.
    """
    for name, expected in (("architectures", ["FastEagleDrafter"]), ("model_type", "fasteagle")):
        if fields.get(name) != expected:
            fields.fail(name, f"{expected!r}, a FastEagle drafter")
    block = read_block(fields, teacher, max(fields.whole("num_hidden_layers"), 1), ("fasteagle",))
    if read_window(fields, block.layers) is not None:
        fields.fail("layer_types", "'full_attention' in every layer, or no such field")
    if block.hidden != teacher.hidden:
        fields.fail("hidden_size", f"{teacher.hidden} as the teacher has, whose embedding the drafter reads")
    size, shortlist = _cell(fields, vocabulary)
    return FastEagleConfig(
        block=block,
        target_hidden=read_target(fields, teacher, block.hidden),
        aux_layers=check_aux_layers(fields, "aux_layer_ids", fields.tokens("aux_layer_ids", None), teacher),
        draft_vocabulary=vocabulary.draft,
        own_embedding=False,
        tied_head=tied_head,
        cell_size=size,
        cell_shortlist=shortlist,
    )


def _cell(fields: Fields, vocabulary: Vocabulary) -> tuple[int, int]:
    """Width of the cell's state, and its shortlist; zeros where there is no cell."""
    if fields.get("cell_size") is None:
        if fields.get("cell_shortlist") is not None:
            fields.fail("cell_shortlist", "no such field without cell_size")
        return 0, 0
    size, shortlist = fields.whole("cell_size"), fields.whole("cell_shortlist")
    if size < 1:
        fields.fail("cell_size", "1 or more, or no such field where there is no cell")
    if not 1 <= shortlist <= vocabulary.draft:
        fields.fail("cell_shortlist", f"1 to {vocabulary.draft}, the tokens that the drafter can propose")
    return size, shortlist
