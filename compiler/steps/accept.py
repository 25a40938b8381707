"""Acceptance: the teacher's draw at every row of a verified tree, and the walk down the tree, inside a graph.

It reads the results of a verify step on the device. The host gets a token a row, whether it is sure, and the path. If a
row of the path is not sure the host walks itself, and draws that row from its logits.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from draftwood.compiler.steps.draw import DrawSettings, greedy, sampled, sums
from draftwood.compiler.steps.step import Step, StepSizes, signed
from draftwood.manifest import StepSignature

# B texts, T rows, V vocabulary, F features, L levels = P places of a path, D depth

Draws = Literal["greedy", "sampled"]


class AcceptStep(nn.Module):
    """Outputs ``drawn`` int64 [T], ``sure`` bool [T], ``path`` int64 [P], its last row repeated, and ``length`` int64
    [1], the number of its rows. With a drafter also ``features.out``, of the path's rows or of its last alone."""

    def __init__(self, draws: Draws, kept_rows: int) -> None:
        super().__init__()
        self.draws, self.kept_rows = draws, kept_rows

    def forward(self, logits, tokens, depths, parents, demands, start, paths, *more):  # type: ignore[no-untyped-def]
        features, settings = more[: bool(self.kept_rows)], more[bool(self.kept_rows) :]
        drawn, sure = sampled(logits, depths, DrawSettings(*settings)) if settings else greedy(logits)
        tables = [table[None] for table in (tokens, depths, parents, demands, start, paths, drawn)]
        path, length = (t.squeeze(0) for t in walked(*tables))
        kept_rows = path if self.kept_rows > 1 else path[-1:]
        return (drawn, sure, path, length, *(rows.index_select(0, kept_rows) for rows in features))


def walked(
    tokens_BT: Tensor,
    depths_BT: Tensor,
    parents_BT: Tensor,
    demands_BTT: Tensor,
    start_BT: Tensor,
    paths_BTP: Tensor,
    drawn_BT: Tensor,
) -> tuple[Tensor, Tensor]:
    """The accepted path of every text int64 [B, P], its last row repeated, and how many rows it has, the root counted,
    int64 [B, 1].

    `draftwood.trees.acceptance.walk` in a graph's operators, by the tables of `walk_tables`.
    """
    drawn_parents_BT = drawn_BT.flatten().index_select(0, among_all(parents_BT).flatten()).view(tokens_BT.shape)
    reached_BT = sums((tokens_BT == drawn_parents_BT).float(), demands_BTT, start_BT)
    last_B = among_all(reached_BT.argmax(-1)[:, None], tokens_BT.shape[1]).flatten()
    length_B1 = depths_BT.flatten().index_select(0, last_B)[:, None] + 1
    return paths_BTP.flatten(0, 1).index_select(0, last_B), length_B1


def among_all(rows_BR: Tensor, each: int = 0) -> Tensor:
    """Numbers of rows of every text, among the rows of all; a text has ``each``, by default R."""
    texts, count = rows_BR.shape
    each = each or count
    return rows_BR if texts == 1 else rows_BR + torch.arange(0, texts * each, each, device=rows_BR.device)[:, None]


def accept_step(
    draws: Draws, rows: int, sizes: StepSizes, vocabulary: int, features: int = 0, kept_rows: int = 0
) -> Step:
    """Acceptance for trees of ``rows`` rows; of ``features`` columns, 0 without a drafter, it keeps so many rows."""
    numbers, parts = accept_sizes(rows, sizes, vocabulary, features, kept_rows), accept_parts(draws, features)
    signature = signed(accept_name(draws, rows), "accept", numbers, {}, rows=rows, dtype=sizes.dtype, parts=parts)
    return Step(AcceptStep(draws, kept_rows), signature)


def rebuilt_accept(signature: StepSignature) -> Step:
    """The step that a signature came from."""
    rows = next((spec.shape[0] for spec in signature.outputs if spec.name == "features.out"), 0)
    return Step(AcceptStep(draws_in(signature), int(rows)), signature)


def draws_in(signature: StepSignature) -> Draws:
    """How an acceptance graph draws."""
    return "sampled" if any(spec.name == "keys" for spec in signature.inputs) else "greedy"


def accept_name(draws: Draws, rows: int) -> str:
    """Name of the graph."""
    return f"accept-{draws}-t{rows}"


def accept_sizes(rows: int, sizes: StepSizes, vocabulary: int, features: int, kept_rows: int) -> dict[str, int]:
    """The sizes of an acceptance of ``rows`` rows."""
    of_rows, of_path = dict.fromkeys("TRX", rows), dict.fromkeys("PL", sizes.path_rows)
    return {**of_rows, **of_path, "V": vocabulary, "W": features, "G": kept_rows}


def accept_parts(draws: Draws, features: int) -> set[str]:
    """The parts of an acceptance: whether it draws with noise, and whether it keeps features."""
    there = {"draws": draws == "sampled", "features": features > 0}
    return {part for part, has in there.items() if has}
