"""FastEagle (Huang et al., 2025, arXiv 2509.20416): a cascade of blocks, one pass, a level a block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from draftwood.compiler.drafters.common.options import AUX_LAYERS, DRAFT_VOCABULARY, NEGATIVES, SHARED_NOISE
from draftwood.compiler.drafters.kind import Kind, Option
from draftwood.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaForCausalLM

    from draftwood.compiler.drafters.fasteagle.cost import FastEagleCost
    from draftwood.compiler.drafters.fasteagle.training import FastEagleStudent
    from draftwood.compiler.drafters.model import DraftModel, OpenedDrafter
    from draftwood.compiler.teachers.checkpoint import Checkpoint
    from draftwood.compiler.teachers.config import TeacherConfig


class FastEagleKind(Kind):
    """FastEagle as a kind."""

    name = "fasteagle"
    title = "a FastEagle drafter"
    layout = "one with the config.json and the tensors of a FastEagle drafter"
    options: ClassVar[Mapping[str, Option]] = {
        "levels": Option(help="layers (4)", default=4, least=1),
        "aux_layers": AUX_LAYERS,
        "draft_vocab": DRAFT_VOCABULARY,
        "token_weight": Option(help="weight of the cross-entropy (1)", default=1.0, read=float, least=0),
        "feature_weight": Option(help="weight of the smooth-L1 distance (1)", default=1.0, read=float, least=0),
        "last_only": Option(help="supervise the last layer alone", default=False, read=None),
        "cell": Option(help="tell levels their parent's token by a cell of N units (no cell)", value="N", least=1),
        "shortlist": Option(help="tokens of each level that the cell ranks (128)", default=128, value="N", least=1),
        "negatives": NEGATIVES,
        "shared_noise": SHARED_NOISE,
        "heads": Option(help="query heads of a layer (the teacher's)", value="N"),
        "kv_heads": Option(help="key/value heads of a layer (the teacher's)", value="N"),
        "intermediate": Option(help="MLP width of a layer (the teacher's)", value="N"),
    }
    follows_nodes = "a FastEagle drafter with a cell"
    cost_sizes = ":LAYERS[:VOCABULARY[:HEADS:KV_HEADS:MLP]]"

    def recognises(self, path: Path, fields: Mapping[str, Any]) -> bool:
        return fields.get("architectures") == ["FastEagleDrafter"]

    def open(self, path: Path, teacher: Checkpoint) -> OpenedDrafter:
        from draftwood.compiler.drafters.fasteagle.checkpoint import open_fasteagle
        from draftwood.compiler.drafters.fasteagle.model import model_of
        from draftwood.compiler.drafters.model import OpenedDrafter

        opened = open_fasteagle(path, teacher)
        return OpenedDrafter(model_of(opened.config), opened)

    def model(self, config: Mapping[str, Any]) -> DraftModel:
        from draftwood.compiler.drafters.fasteagle.config import FastEagleConfig
        from draftwood.compiler.drafters.fasteagle.model import model_of

        return model_of(msgspec.convert(config, FastEagleConfig))

    def complete(self, options: Mapping[str, Any]) -> dict[str, Any]:
        chosen = super().complete(options)
        if not chosen["token_weight"] and not chosen["feature_weight"]:
            raise RequestError("token_weight and feature_weight are 0; expected one above it, or nothing is learnt")
        if options.get("shortlist") is not None and chosen["cell"] is None:
            raise RequestError("shortlist is of a cell; expected no such option, or cell beside it")
        if chosen["negatives"] is not None and chosen["draft_vocab"] is not None:
            raise RequestError("negatives and draft_vocab both leave out ids; expected one of them")
        return chosen

    def student(self, teacher: LlamaForCausalLM, options: Mapping[str, Any], ids_V: Tensor | None) -> FastEagleStudent:
        from draftwood.compiler.drafters.fasteagle.students import begin

        return begin(teacher, options, ids_V)

    def trained(
        self, folder: Path, teacher: LlamaForCausalLM, levels: int | None
    ) -> tuple[FastEagleStudent, dict[str, Tensor]]:
        from draftwood.compiler.drafters.fasteagle.students import read_back

        return read_back(folder, teacher)

    def cost(self, sizes: Sequence[str], teacher: TeacherConfig) -> FastEagleCost | None:
        from draftwood.compiler.drafters.fasteagle.cost import FastEagleCost

        found = [int(size) for size in sizes if size.isdecimal() and int(size)]
        if len(found) != len(sizes):
            return None
        match found:
            case [layers] | [layers, _]:
                return FastEagleCost(layers=layers, vocabulary=(*found[1:], teacher.vocabulary)[0])
            case [layers, vocabulary, heads, kv_heads, intermediate]:
                return FastEagleCost(
                    layers=layers, vocabulary=vocabulary, heads=heads, kv_heads=kv_heads, intermediate=intermediate
                )
        return None


FASTEAGLE = FastEagleKind()
