"""Executes the graphs of all ranks together. Every rank runs up to a collective, which is computed of all parts.

A device would wait for ever if ranks come to different collectives, or one comes to none; here that is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from draftwood.compiler.ge.interpreter import Interpreter, Meeting, Run
from draftwood.compiler.ge.operators.collective import joined, ranks_of
from draftwood.errors import LoweringError

# What the ranks of this process bring to a collective -> what all ranks bring.
Gathered = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def run_ranks(
    ranks: Sequence[Interpreter],
    inputs: Sequence[Mapping[str, Tensor]],
    gathered: Gathered = lambda values: values,
) -> list[list[Tensor]]:
    """The outputs of every rank; RefData inputs are written in place.

    ``gathered`` fetches the others' parts if these are not all ranks.

    Raises:
        RequestError, LoweringError: as ``Interpreter.run``, or the ranks do not come to the same collective.
    """
    with torch.no_grad():
        return _run([rank.started(values) for rank, values in zip(ranks, inputs, strict=True)], gathered)


def _run(runs: Sequence[Run], gathered: Gathered) -> list[list[Tensor]]:
    sent: list[Tensor | None] = [None] * len(runs)
    while True:
        results = [_advanced(run, value) for run, value in zip(runs, sent, strict=True)]
        met = [result for result in results if isinstance(result, Meeting)]
        if not met:
            return [result for result in results if not isinstance(result, Meeting)]
        _check(met, len(runs))
        brought = gathered([meeting.value for meeting in met])
        if ranks_of(met[0].node.attributes) != len(brought):
            node = met[0].node
            raise LoweringError(
                f"node {node.name} ({node.type}): its group {node.attributes.get('group')!r} is not of {len(brought)}"
                " ranks"
            )
        result = joined(met[0].node.type, brought)
        sent = [result.clone() for _ in runs]


def _advanced(run: Run, value: Tensor | None) -> Meeting | list[Tensor]:
    try:
        return next(run) if value is None else run.send(value)
    except StopIteration as end:
        outputs: list[Tensor] = end.value
        return outputs


def _check(met: Sequence[Meeting], ranks: int) -> None:
    node, value = met[0]
    if len(met) < ranks:
        raise LoweringError(f"node {node.name} ({node.type}): {len(met)} of {ranks} ranks come to it, the others end")
    for rank, (other, theirs) in enumerate(met):
        same = (other.type, other.attributes, theirs.shape, theirs.dtype)
        if same != (node.type, node.attributes, value.shape, value.dtype):
            raise LoweringError(
                f"rank 0 comes to {node.type} {node.name} of {list(value.shape)}, rank {rank} to {other.type}"
                f" {other.name} of {list(theirs.shape)}; ranks would wait for each other for ever"
            )
