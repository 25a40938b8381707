"""A P-EAGLE drafter as speculators writes it, which vLLM serves; SGLang reads none."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from draftwood.compiler.drafters.common.checkpoint import CachedCheckpoint
from draftwood.compiler.drafters.common.export import (
    check_agreed,
    drafted_tokens,
    embedding,
    layout_named,
    proposals,
    refuse,
)
from draftwood.compiler.drafters.eagle3.export import speculators_fields, tensors_of
from draftwood.compiler.drafters.kind import Folder
from draftwood.compiler.drafters.peagle.config import PEagleConfig

Opened = CachedCheckpoint[PEagleConfig]


def exported(opened: Opened, layout: str, tokens: int | None, verifier: str) -> Folder:
    """The drafter in a layout, to draft so many ``tokens`` a pass for the teacher of this name.

    Raises:
        RequestError: the layout is not known, or has no form of what the drafter has.
    """
    write = layout_named(LAYOUTS, layout, "P-EAGLE")
    check_agreed(layout, opened.config)
    return write(opened, drafted_tokens(tokens, opened.config.levels), verifier)


def _speculators(opened: Opened, tokens: int, verifier: str) -> Folder:
    # vLLM builds P-EAGLE without these two.
    refuse("speculators", {"norms of the teacher's states": opened.config.feature_norm != "none",
                           "norm_output": opened.config.norm_output})  # fmt: skip
    fields = {
        "architectures": ["PEagleSpeculator"],
        "speculators_model_type": "peagle",
        "mask_token_id": opened.config.mask_token,
        # Its trainer always trains the embedding: it is the drafter's, wherever it was taken from.
        "embed_requires_grad": True,
        "speculators_config": proposals("peagle", verifier, opened, tokens),
    }
    own = {"mask_hidden": opened.weight("mask_hidden"), "embed_tokens.weight": embedding(opened)}
    tensors = tensors_of(opened, "layers.0", opened.config.mapped) | own
    return Folder(fields | speculators_fields(opened), tensors)


LAYOUTS: Mapping[str, Callable[[Opened, int, str], Folder]] = {"speculators": _speculators}
