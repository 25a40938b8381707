"""Which states of the teacher an EAGLE-3 drafter reads, as the layers that they enter.

No ids means the states entering layers 2, L // 2 and L - 3 everywhere. Writers that capture by hooks name the same
states 1, L // 2 - 1 and L - 4, the layers they *leave* (SpecForge: ``resolve_eagle_capture_layers`` in
specforge/algorithms/model_providers.py at a6b6b02; ModelOpt, Automodel and DeepSpec read ``hidden_states[id + 1]``),
and servers tell the two spellings apart by guessing. A list that is one of the two usual ones in the other spelling is
refused, except under SpecForge's name, where it is published both ways. An own field settles every case:
``aux_layer_ids``, the layers whose entering states are meant.
"""

from __future__ import annotations

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.drafters.common.config import check_aux_layers
from draftwood.compiler.drafters.eagle3.layouts import AUX_IDS, SPECFORGE, Writer
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.errors import CheckpointError


def read_aux_layers(fields: Fields, nested: Fields, writer: Writer, teacher: TeacherConfig) -> tuple[int, ...]:
    """The layers entered, ascending, from the top of config.json or from its eagle_config, ``nested``.

    Raises:
        CheckpointError: the ids do not fit the teacher, contradict each other, or leave open what they mean.
    """
    if not nested.flag("use_aux_hidden_state", True):
        raise CheckpointError(
            f"{fields.path}: use_aux_hidden_state is false; expected true: a drafter on the last state alone is not"
            " EAGLE-3"
        )
    if fields.get("aux_layer_ids") is not None:
        return check_aux_layers(fields, "aux_layer_ids", fields.tokens("aux_layer_ids", None), teacher)
    usual = (2, teacher.layers // 2, teacher.layers - 3)
    ids = _stated(fields, nested, writer)
    if not ids:
        found = check_aux_layers(fields, f"{writer.field} left out", usual, teacher)
    else:
        found = check_aux_layers(fields, writer.field, _entered(fields, writer, ids, usual), teacher)
    if fields.whole("num_aux_hidden_states", len(found)) != len(found):
        fields.fail("num_aux_hidden_states", f"{len(found)}, as many as there are layer ids, or aux_layer_ids")
    return found


def _stated(fields: Fields, nested: Fields, writer: Writer) -> tuple[int, ...]:
    """The ids as config.json has them; none where it leaves them out."""
    if writer.field != AUX_IDS and not fields.tokens(writer.field, None):
        fields.fail(writer.field, "the layers that the teacher's states leave; this writer has no usual ones")
    lists = [fields.tokens(writer.field, None), nested.tokens(AUX_IDS, None)]
    found = {ids for ids in lists if ids}
    if len(found) == 2:
        fields.fail(writer.field, f"the same as in eagle_config, {nested.get(AUX_IDS)!r}, or only one of the two")
    return found.pop() if found else ()


def _entered(fields: Fields, writer: Writer, ids: tuple[int, ...], usual: tuple[int, ...]) -> tuple[int, ...]:
    left = tuple(layer - 1 for layer in usual)
    if writer is SPECFORGE and ids == usual:
        return usual
    if ids == (left if writer.ids == "entering" else usual):
        raise CheckpointError(
            f"{fields.path}: {writer.field} is {list(ids)}, which may mean states entering or leaving these layers;"
            f" expected {list(usual if writer.ids == 'entering' else left)} here; state the layers that the states"
            " enter as aux_layer_ids"
        )
    # Hooks capture by depth, in whatever order the list is.
    return ids if writer.ids == "entering" else tuple(sorted(layer + 1 for layer in ids))
