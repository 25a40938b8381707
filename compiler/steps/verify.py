"""Verification of a draft tree, and plain decoding, which is a tree of one row."""

from __future__ import annotations

from draftwood.compiler.steps.step import Step, StepSizes, signed
from draftwood.compiler.steps.teacher import TeacherStep, commit_sizes, static_caches, teacher_sizes
from draftwood.compiler.teachers.block import Form
from draftwood.compiler.teachers.decoder import Decoder


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
    signature = signed(
        name,
        "decode" if decode else "verify",
        {"T": rows, **teacher_sizes(decoder, rows, rows), **commit_sizes(config, sizes)},
        static_caches(config.buffers, slots, form),
        rows=rows,
        slots=slots,
        dtype=sizes.dtype,
    )
    return Step(VerifyStep(decoder, form, sizes.branch_rows), signature)
