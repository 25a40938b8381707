"""The precisions that a teacher can be built in for a CPU, and what each keeps and rounds."""

from __future__ import annotations

from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.kept import Precision, in_precision
from draftwood.errors import RequestError


def precisions(checkpoint: Checkpoint) -> tuple[Precision, ...]:
    """Those that differ for a CPU, what rounds most first."""
    if checkpoint.config.quantised:
        found: tuple[Precision, ...] = ("nbits", "exact")
    elif checkpoint.packed:
        found = ("nbits", "w8a8", "exact")
    else:
        found = ("nbits", "w8a8", "nbits8", "exact")
    return tuple(name for name in found if name == "exact" or _possible(checkpoint, name))


def _possible(checkpoint: Checkpoint, precision: Precision) -> bool:
    try:
        in_precision(checkpoint, precision)
    except RequestError:
        return False
    return True


def matrices_in(checkpoint: Checkpoint, precision: Precision) -> dict[str, int]:
    """How many matrices of the linear layers a CPU's bundle keeps as the files have them, and how many in other forms.

    Raises:
        RequestError: none can be kept so.
    """
    found = in_precision(checkpoint, precision)
    bits = {one.name: one.bits for one in found.config.packed}
    count = dict.fromkeys(("kept", "four_bits", "eight_bits", "w8a8"), 0)
    for layer in (*bits, *found.config.quantised):
        part = checkpoint.parts.get(f"{layer}.weight", checkpoint.parts["embed.weight"])
        for name, _ in part.tensors:
            whole = checkpoint.packed.get(name)
            same = layer in checkpoint.config.quantised or (whole is not None and not whole.rounds)
            form = (
                "w8a8" if layer not in bits else "kept" if same else "four_bits" if bits[layer] == 4 else "eight_bits"
            )
            count[form] += 1
    return count
