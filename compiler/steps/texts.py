"""Verification and acceptance of B texts in one launch of an accelerator: each text with its own tree.

The texts' caches are one pool, [B*C, K*D]. So a layer writes and reads them by as many operators as one text's. Rows of
all texts follow each other, text by text. A place that no text has taken has ``accepted`` -1: its rows see themselves,
and are written to its spare slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor, nn

from draftwood.compiler.steps.accept import Draws, accept_parts, accept_sizes, among_all, draws_in, walked
from draftwood.compiler.steps.draw import DrawSettings, greedy, sampled
from draftwood.compiler.steps.step import Step, StepSizes, signed
from draftwood.compiler.steps.teacher import TeacherStep, commit_sizes, static_caches, teacher_sizes
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.manifest import StepSignature, text_name, texts_accept_name, texts_name

# B texts, T rows of each, X = B * T, P places of a path, V vocabulary, F features, L levels


class VerifyTextsStep(TeacherStep):
    """Tree rows of B texts in, logits of every row out, and a branch for each text."""

    def forward(self, tokens, depths, visible, committed, accepted, *tensors):  # type: ignore[no-untyped-def]
        texts = tokens.shape[0]
        paths, branches, caches = tensors[:texts], tensors[texts : 2 * texts], tensors[2 * texts :]
        out = self.decoder.step_texts(tokens, depths, visible, committed, accepted, paths, branches, list(caches))
        layers, two, _, rows, heads, dim = out.branch_L2TKD.shape
        missing = max(0, self.branch_rows - rows)
        padding = out.branch_L2TKD.new_zeros(layers, two, texts, missing, heads, dim)
        whole = torch.cat((out.branch_L2TKD, padding), 3) if missing else out.branch_L2TKD
        split = [branch.squeeze(2) for branch in whole.split(1, 2)]
        return (out.logits_RV, out.choice_R, out.features_RF, *split, *out.caches)


def verify_texts_step(decoder: Decoder, sizes: StepSizes, texts: int, rows: int, slots: int) -> Step:
    """Verification of a tree of ``rows`` rows for each of ``texts`` texts at KV length ``slots``, in the NPU's form."""
    config = decoder.config
    results = teacher_sizes(decoder, texts * rows, texts * rows)
    signature = signed(
        texts_name(texts, rows, slots),
        "texts",
        {"B": texts, "T": rows, **results, **commit_sizes(config, sizes)},
        static_caches(config.buffers, texts * slots, "npu"),
        rows=rows,
        slots=slots,
        dtype=sizes.dtype,
        batch=texts,
    )
    return Step(VerifyTextsStep(decoder, "npu", sizes.branch_rows), signature, read=2 * texts)


class AcceptTextsStep(nn.Module):
    """`draftwood.compiler.steps.accept.AcceptStep` of B texts: all rows are drawn at once, each text is walked."""

    def __init__(self, draws: Draws, texts: int, kept_rows: int) -> None:
        super().__init__()
        self.draws, self.texts, self.kept_rows = draws, texts, kept_rows

    def forward(self, logits, tokens, depths, parents, demands, start, paths, *more):  # type: ignore[no-untyped-def]
        features, settings = more[: bool(self.kept_rows)], more[bool(self.kept_rows) :]
        drawn_X, sure_X = self._drawn(logits, depths, settings) if settings else greedy(logits)
        drawn_BT = drawn_X.view(depths.shape)
        path_BP, length_B1 = walked(tokens, depths, parents, demands, start, paths, drawn_BT)
        read = (self._read(all_XF, path_BP, depths.shape[1]) for all_XF in features)
        return (drawn_BT, sure_X.view(depths.shape), path_BP, length_B1.squeeze(1), *chain.from_iterable(read))

    def _read(self, all_XF: Tensor, path_BP: Tensor, rows: int) -> Iterator[Tensor]:
        """The features of every text's path, or of its last row."""
        read_rows = among_all(path_BP if self.kept_rows > 1 else path_BP[:, -1:], rows).split(1)
        return (all_XF.index_select(0, of_text.squeeze(0)) for of_text in read_rows)

    def _drawn(self, logits_XV: Tensor, depths_BT: Tensor, settings: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Every row by its own text's settings; the levels of the texts' keys follow each other."""
        given = DrawSettings(*settings)
        texts_B1 = torch.arange(self.texts, device=depths_BT.device)[:, None]
        levels_BT = depths_BT + texts_B1 * (given.numbers.shape[2] // self.texts)
        return sampled(logits_XV, levels_BT.flatten(), given)


def accept_texts_step(
    draws: Draws, sizes: StepSizes, texts: int, rows: int, vocabulary: int, features: int = 0, kept_rows: int = 0
) -> Step:
    """Acceptance for trees of ``rows`` rows of ``texts`` texts; the rest as in `accept.accept_step`."""
    numbers = accept_sizes(rows, sizes, vocabulary, features, kept_rows)
    name, parts = texts_accept_name(draws, texts, rows), accept_parts(draws, features)
    numbers |= {"B": texts, "R": texts * rows, "X": texts * rows, "L": texts * sizes.path_rows}
    signature = signed(name, "accept-texts", numbers, {}, rows=rows, dtype=sizes.dtype, batch=texts, parts=parts)
    return Step(AcceptTextsStep(draws, texts, kept_rows), signature)


def rebuilt_texts(signature: StepSignature, decoder: Decoder) -> Step:
    """The step that a signature came from."""
    texts = signature.batch
    if signature.kind == "accept-texts":
        kept_rows = next((spec.shape[0] for spec in signature.outputs if spec.name == text_name(0, "features.out")), 0)
        return Step(AcceptTextsStep(draws_in(signature), texts, int(kept_rows)), signature)
    branch = next(spec for spec in signature.inputs if spec.name == text_name(0, "branch"))
    return Step(VerifyTextsStep(decoder, "npu", int(branch.shape[2])), signature, read=2 * texts)
