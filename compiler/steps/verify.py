"""Verification of a draft tree, and plain decoding, which is a tree of one row."""

from __future__ import annotations

from draftwood.compiler.steps.step import Step, StepSizes, cached, tensor
from draftwood.compiler.steps.teacher import TeacherStep, cache_shape, commit_inputs, teacher_outputs
from draftwood.compiler.teachers.block import Form
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.manifest import cache_names


class VerifyStep(TeacherStep):
    """Tree rows in, logits of every row out; the decode step is the same with one row."""

    def forward(self, tokens, depths, visible, committed, accepted, path, branch, *caches):  # type: ignore[no-untyped-def]
        out = self.decoder.step(
            tokens, depths, visible, committed, accepted, path, branch, list(caches), form=self.form
        )
        return self.outputs(out, branch=True)


def verify_step(
    decoder: Decoder, sizes: StepSizes, rows: int, slots: int, form: Form = "fused", decode: bool | None = None
) -> Step:
    """Verification of a tree of ``rows`` rows at KV length ``slots``.

    ``decode`` makes it the decode step, by default that of one row; a target whose attention needs more rows pads it.
    """
    config = decoder.config
    decode = rows == 1 if decode is None else decode
    name = f"decode-kv{slots}" if decode else f"verify-t{rows}-kv{slots}"
    inputs = [
        tensor("tokens", "int64", rows),
        tensor("depths", "int64", rows),
        tensor("visible", "bool", rows, rows),
    ]
    branch = tensor(
        "branch.out",
        sizes.dtype,
        config.layers,
        2,
        max(rows, sizes.branch_rows),
        config.kv_heads,
        config.head_dim,
    )
    signature = cached(
        cache_names(config.layers),
        name,
        "decode" if decode else "verify",
        inputs + commit_inputs(config, sizes),
        [*teacher_outputs(decoder, rows, rows, sizes.dtype), branch],
        cache_shape(config, slots, form),
        rows,
        slots,
        sizes.dtype,
    )
    return Step(VerifyStep(decoder, form, sizes.branch_rows), signature)
