"""Acceptance: the teacher's draw at every row of a verified tree, and the walk down the tree, inside a graph.

It reads the results of a verify step on the device. The host gets a token a row, whether it is sure, and the path. If a
row of the path is not sure the host walks itself, and draws that row from its logits.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from draftwood.compiler.steps.draw import DrawSettings, greedy, sampled
from draftwood.compiler.steps.step import Step, StepSizes, signed
from draftwood.manifest import StepSignature

# T rows, V vocabulary, F features, L levels = P places of a path, D depth

Draws = Literal["greedy", "sampled"]


class AcceptStep(nn.Module):
    """Outputs ``drawn`` int64 [T], ``sure`` bool [T], ``path`` int64 [P], its last row repeated, and ``length`` int64
    [1], the number of its rows. With a drafter also ``features.out``, of the path's rows or of its last alone."""

    def __init__(self, draws: Draws, places: int, kept_rows: int) -> None:
        super().__init__()
        self.draws, self.places, self.kept_rows = draws, places, kept_rows

    def forward(self, logits, tokens, parents, depths, visible, *more):  # type: ignore[no-untyped-def]
        features, settings = more[: bool(self.kept_rows)], more[bool(self.kept_rows) :]
        drawn, sure = sampled(logits, depths, DrawSettings(*settings)) if settings else greedy(logits)
        path, length = walked(tokens, parents, depths, visible, drawn, self.places)
        kept_rows = path if self.kept_rows > 1 else path[-1:]
        return (drawn, sure, path, length, *(rows.index_select(0, kept_rows) for rows in features))


def walked(
    tokens_T: Tensor, parents_T: Tensor, depths_T: Tensor, visible_TT: Tensor, drawn_T: Tensor, places: int
) -> tuple[Tensor, Tensor]:
    """The accepted path int64 [P], its last row repeated, and how many rows it has, the root counted, int64 [1].

    `draftwood.trees.acceptance.walk` in a graph's operators. A padded row is its own and has depth 0.
    """
    order_T = torch.arange(tokens_T.shape[0], device=tokens_T.device)
    differs_T = tokens_T != drawn_T.index_select(0, parents_T)
    # If several siblings carry the token only the first counts; the root is no sibling of its children.
    older_TT = (order_T < order_T[:, None]) & (order_T > 0)
    taken_T = ((parents_T[:, None] == parents_T) & older_TT & ~differs_T).any(1)
    barred_T = (differs_T | taken_T) & (order_T > 0)
    unreached_T = (visible_TT & barred_T).any(1)
    last_1 = torch.where(unreached_T, -1, depths_T).float().argmax(0)[None]
    depth_1 = depths_T.index_select(0, last_1)
    place_P = torch.arange(places, device=tokens_T.device).minimum(depth_1)
    on_path_PT = visible_TT.index_select(0, last_1) & (depths_T == place_P[:, None])
    return on_path_PT.float().argmax(1), depth_1 + 1


def accept_step(
    draws: Draws, rows: int, sizes: StepSizes, vocabulary: int, features: int = 0, kept_rows: int = 0
) -> Step:
    """Acceptance for trees of ``rows`` rows; of ``features`` columns, 0 without a drafter, it keeps so many rows."""
    numbers, parts = accept_sizes(rows, sizes, vocabulary, features, kept_rows), accept_parts(draws, features)
    signature = signed(accept_name(draws, rows), "accept", numbers, {}, rows=rows, dtype=sizes.dtype, parts=parts)
    return Step(AcceptStep(draws, sizes.path_rows, kept_rows), signature)


def rebuilt_accept(signature: StepSignature) -> Step:
    """The step that a signature came from."""
    places = next(spec.shape[0] for spec in signature.outputs if spec.name == "path")
    rows = next((spec.shape[0] for spec in signature.outputs if spec.name == "features.out"), 0)
    return Step(AcceptStep(draws_in(signature), int(places), int(rows)), signature)


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
