"""Prefill: a chunk of text in causal order."""

from __future__ import annotations

import torch

from draftwood.compiler.steps.step import Step, StepSizes, signed
from draftwood.compiler.steps.teacher import TeacherStep, commit_sizes, static_caches, teacher_sizes
from draftwood.compiler.teachers.block import Form
from draftwood.compiler.teachers.decoder import Decoder


class PrefillStep(TeacherStep):
    """A chunk of text in causal order; its rows are committed by length, so it returns no branch."""

    def forward(self, tokens, last, committed, accepted, path, branch, *caches):  # type: ignore[no-untyped-def]
        rows = tokens.shape[0]
        order = torch.arange(rows, device=tokens.device)
        causal = order[None] <= order[:, None]
        out = self.decoder.step(
            tokens,
            order,
            causal,
            committed,
            accepted,
            path,
            branch,
            list(caches),
            rows_R=last,
            form=self.form,
        )
        return self.outputs(out, branch=False)


def prefill_step(decoder: Decoder, sizes: StepSizes, rows: int, slots: int, form: Form = "fused") -> Step:
    """A prefill chunk of ``rows`` tokens; ``last`` [1] is the row whose logits are returned."""
    config = decoder.config
    signature = signed(
        f"prefill-t{rows}-kv{slots}",
        "prefill",
        {"T": rows, **teacher_sizes(decoder, 1, rows), **commit_sizes(config, sizes)},
        static_caches(config.buffers, slots, form),
        rows=rows,
        slots=slots,
        dtype=sizes.dtype,
    )
    return Step(PrefillStep(decoder, form, sizes.branch_rows), signature)
