"""The published layouts of EAGLE-3 drafters: the writer of a folder, and the spelling of its keys.

``architectures`` names the writer. Writers differ in the meaning of a layer id and in where a flag stands. The keys
themselves tell their spelling, since every reader accepts either spelling of the first block:

=============  ====================================  ====================================  ===================
writer         architectures                         layer ids of the teacher's states     first block's keys
=============  ====================================  ====================================  ===================
SafeAILab      LlamaForCausalLM                      entered, in eagle_config              midlayer.
SpecForge      LlamaForCausalLMEagle3                left, in eagle_config                 midlayer.
ModelOpt       LlamaForCausalLMEagle3                left, in eagle_config                 layers.0.
AngelSlim      Eagle3LlamaForCausalLM                left, in eagle_config if at all       midlayer.
Automodel      LlamaEagle3DraftModel                 left, in eagle_config if at all       model.layers.0.
DeepSpec       Qwen3Eagle3Model                      left, target_layer_ids at the top     layers.0.
speculators    Eagle3Speculator, Eagle3DraftModel    entered, at the top                   layers.0.
=============  ====================================  ====================================  ===================

No ids means the states entering layers 2, L // 2 and L - 3 everywhere. Writers that capture by hooks name the same
states 1, L // 2 - 1 and L - 4, the layers they *leave*. (SpecForge: ``resolve_eagle_capture_layers`` in
specforge/algorithms/model_providers.py at a6b6b02. ModelOpt, Automodel and DeepSpec read ``hidden_states[id + 1]``.)
Servers guess the spelling. A list that equals a usual one in the other spelling is refused, except under SpecForge's
name, which publishes both. Draftwood's field ``aux_layer_ids`` settles every case: it names the layers entered.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.drafters.common.config import check_aux_layers
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.errors import CheckpointError

Meaning = Literal["entering", "leaving"]
AUX_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class Writer:
    """A project whose folders are read."""

    name: str
    # Whether a layer id means the state that enters the layer or the one that leaves it.
    ids: Meaning
    # The field of the ids at the top of config.json.
    field: str = AUX_IDS


SAFEAILAB = Writer("SafeAILab", "entering")
SPECFORGE = Writer("SpecForge", "leaving")
SPECULATORS = Writer("speculators", "entering")
DEEPSPEC = Writer("DeepSpec", "leaving", "target_layer_ids")

WRITERS: Mapping[str, Writer] = {
    "LlamaForCausalLM": SAFEAILAB,
    "LlamaForCausalLMEagle3": SPECFORGE,
    "Eagle3LlamaForCausalLM": Writer("AngelSlim", "leaving"),
    "LlamaEagle3DraftModel": Writer("Automodel", "leaving"),
    "Qwen3Eagle3Model": DEEPSPEC,
    "Eagle3Speculator": SPECULATORS,
    "Eagle3DraftModel": SPECULATORS,
}
# Drafters whose network is another one, by the name that they are published under.
OTHERS = {
    "Eagle3DeepseekV2ForCausalLM": "a drafter with latent attention (MLA)",
    "Eagle3DeepseekV3ForCausalLM": "a drafter with latent attention (MLA)",
    "LlamaForCausalLMEagle3Deep": "ModelOpt's Megatron export of several layers, which no server reads",
    "LlamaForCausalLMEagle": "EAGLE-1",
    "Gemma4Eagle3Model": "a drafter of Gemma's layers",
}


def read_writer(fields: Fields, writers: Mapping[str, Writer] = WRITERS, kind: str = "eagle3") -> Writer:
    """The one of ``writers`` that wrote config.json; ``kind`` is speculators' name for such drafters.

    Raises:
        CheckpointError: the writer is unknown.
    """
    named = fields.get("architectures")
    name = str(named[0]) if isinstance(named, list) and len(named) == 1 else ""
    if name in OTHERS:
        fields.fail("architectures", f"one of {', '.join(writers)}; this is {OTHERS[name]}, which is not supported")
    if name not in writers:
        fields.fail("architectures", f"one of {', '.join(writers)}, the published layouts of EAGLE-3")
    writer = writers[name]
    expected = kind if writer is SPECULATORS else None
    if fields.get("speculators_model_type") != expected:
        fields.fail("speculators_model_type", f"{expected or 'no such field'} with {name}")
    return writer


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a file spells its keys."""

    # Prefix of all keys but the output matrix's and the vocabulary maps'.
    before: str
    # Prefix of the first block's keys.
    first: str
    # How many blocks there are.
    layers: int

    @classmethod
    def of(cls, keys: Collection[str]) -> Spelling:
        """The spelling of a file that holds these keys."""
        before = "model." if "model.fc.weight" in keys else ""
        old = any(key.startswith(f"{before}midlayer.") for key in keys)
        numbers = [key.removeprefix(f"{before}layers.").split(".")[0] for key in keys if f"{before}layers." in key]
        layers = len({int(number) for number in numbers if number.isdecimal()} | {0})
        return cls(before, f"{before}{'midlayer' if old else 'layers.0'}", layers)

    def at(self, layer: int) -> str:
        """The prefix of a block's keys."""
        return f"{self.before}layers.{layer}" if layer else self.first

    @property
    def embedding(self) -> str:
        """The key of a drafter's own embedding."""
        return f"{self.before}embed_tokens.weight"


def read_aux_layers(fields: Fields, nested: Fields, writer: Writer, teacher: TeacherConfig) -> tuple[int, ...]:
    """The layers entered, ascending, from the top of config.json or from its eagle_config, ``nested``.

    Raises:
        CheckpointError: the ids do not fit the teacher, contradict each other, or are ambiguous.
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
        layers = check_aux_layers(fields, f"{writer.field} left out", usual, teacher)
    else:
        layers = check_aux_layers(fields, writer.field, _entered(fields, writer, ids, usual), teacher)
    if fields.whole("num_aux_hidden_states", len(layers)) != len(layers):
        fields.fail("num_aux_hidden_states", f"{len(layers)}, as many as there are layer ids, or aux_layer_ids")
    return layers


def _stated(fields: Fields, nested: Fields, writer: Writer) -> tuple[int, ...]:
    """The ids in config.json; empty if it has none."""
    if writer.field != AUX_IDS and not fields.tokens(writer.field, None):
        fields.fail(writer.field, "the layers that the teacher's states leave; this writer has no usual ones")
    lists = [fields.tokens(writer.field, None), nested.tokens(AUX_IDS, None)]
    stated = {ids for ids in lists if ids}
    if len(stated) == 2:
        fields.fail(writer.field, f"the same as in eagle_config, {nested.get(AUX_IDS)!r}, or only one of the two")
    return stated.pop() if stated else ()


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
    # Hooks capture by depth, for any order of the list.
    return ids if writer.ids == "entering" else tuple(sorted(layer + 1 for layer in ids))
