"""The precisions that a teacher can be built in for a CPU, and the weights that each keeps and rounds."""

from __future__ import annotations

from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.conversion import Precision, in_precision
from draftwood.errors import RequestError


def precisions(checkpoint: Checkpoint) -> tuple[Precision, ...]:
    """The precisions that differ on a CPU, the most rounded first."""
    if checkpoint.config.quantised:
        names: tuple[Precision, ...] = ("nbits", "exact")
    elif checkpoint.packed:
        names = ("nbits", "w8a8", "exact")
    else:
        names = ("nbits", "w8a8", "nbits8", "exact")
    return tuple(name for name in names if name == "exact" or _possible(checkpoint, name))


def _possible(checkpoint: Checkpoint, precision: Precision) -> bool:
    try:
        in_precision(checkpoint, precision)
    except RequestError:
        return False
    return True


def matrices_in(checkpoint: Checkpoint, precision: Precision) -> dict[str, int]:
    """The number of linear layers' matrices that a CPU's bundle keeps in the files' form, and in each other form.

    Raises:
        RequestError: no matrix can be kept so.
    """
    converted = in_precision(checkpoint, precision)
    bits = {layer_form.name: layer_form.bits for layer_form in converted.config.packed}
    count = dict.fromkeys(("kept", "four_bits", "eight_bits", "w8a8"), 0)
    for layer in (*bits, *converted.config.quantised):
        part = checkpoint.parts.get(f"{layer}.weight", checkpoint.parts["embed.weight"])
        for name, _ in part.tensors:
            whole = checkpoint.packed.get(name)
            same = layer in checkpoint.config.quantised or (whole is not None and not whole.rounds)
            form = (
                "w8a8" if layer not in bits else "kept" if same else "four_bits" if bits[layer] == 4 else "eight_bits"
            )
            count[form] += 1
    return count
