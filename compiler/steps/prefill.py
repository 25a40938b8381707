"""Prefill: a chunk of text in causal order."""

from __future__ import annotations

import torch

from draftwood.compiler.steps.step import Step, StepSizes, cached, tensor
from draftwood.compiler.steps.teacher import TeacherStep, cache_shape, commit_inputs, teacher_outputs
from draftwood.compiler.teachers.block import Form
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.manifest import cache_names


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
    inputs = [tensor("tokens", "int64", rows), tensor("last", "int64", 1)]
    signature = cached(
        cache_names(config.layers),
        f"prefill-t{rows}-kv{slots}",
        "prefill",
        inputs + commit_inputs(config, sizes),
        teacher_outputs(decoder, 1, rows, sizes.dtype),
        cache_shape(config, slots, form),
        rows,
        slots,
        sizes.dtype,
    )
    return Step(PrefillStep(decoder, form, sizes.branch_rows), signature)
