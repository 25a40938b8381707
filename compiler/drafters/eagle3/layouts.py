"""The layouts in which EAGLE-3 drafters are published: who wrote a folder, and how its keys are spelled.

``architectures`` names the writer. What the writers spell differently is what a layer id means and where a flag
stands; the keys are told apart by looking at them, for every reader accepts either spelling of the first block:

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
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from draftwood.compiler.checkpoints.fields import Fields

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
    """Who of ``writers`` wrote config.json; ``kind`` is what speculators calls such drafters.

    Raises:
        CheckpointError: nobody known did.
    """
    named = fields.get("architectures")
    name = str(named[0]) if isinstance(named, list) and len(named) == 1 else ""
    if name in OTHERS:
        fields.fail("architectures", f"one of {', '.join(writers)}; this is {OTHERS[name]}, which is not supported")
    if name not in writers:
        fields.fail("architectures", f"one of {', '.join(writers)}, the published layouts of EAGLE-3")
    writer = writers[name]
    wanted = kind if writer is SPECULATORS else None
    if fields.get("speculators_model_type") != wanted:
        fields.fail("speculators_model_type", f"{wanted or 'no such field'} beside {name}")
    return writer


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a file spells its keys."""

    # What stands before the keys of everything but the output matrix and the vocabulary maps.
    before: str
    # Where the first block's keys begin.
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
        """Where a block's keys begin."""
        return f"{self.before}layers.{layer}" if layer else self.first

    @property
    def embedding(self) -> str:
        """The key of a drafter's own embedding."""
        return f"{self.before}embed_tokens.weight"
