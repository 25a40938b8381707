"""The teacher's step that a bundle's signature came from."""

from __future__ import annotations

from draftwood.compiler.steps.accept import rebuilt_accept
from draftwood.compiler.steps.prefill import prefill_step
from draftwood.compiler.steps.step import Step, StepSizes
from draftwood.compiler.steps.texts import rebuilt_texts
from draftwood.compiler.steps.verify import verify_step
from draftwood.compiler.teachers.block import Form
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.manifest import StepSignature


def rebuild(signature: StepSignature, decoder: Decoder) -> Step:
    """The teacher's step that a signature came from, rebuilt with a decoder that holds a bundle's weights."""
    if signature.kind == "accept":
        return rebuilt_accept(signature)
    if signature.batch > 1:
        return rebuilt_texts(signature, decoder)
    shapes = {spec.name: spec.shape for spec in signature.inputs}
    dtype = next(spec.dtype for spec in signature.inputs if spec.name == "branch")
    sizes = StepSizes(branch_rows=int(shapes["branch"][2]), path_rows=int(shapes["path"][0]), dtype=dtype)
    form: Form = "npu" if shapes[signature.caches[0]][0] == signature.slots else "fused"
    if signature.kind == "prefill":
        return prefill_step(decoder, sizes, signature.rows, signature.slots, form)
    return verify_step(decoder, sizes, signature.rows, signature.slots, form, decode=signature.kind == "decode")
