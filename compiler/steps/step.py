"""A step: a module to be traced and its declared signature.

A signature lists names, dtypes and shapes in call order, and which output is written into which input.
The caches come last, key then value of every layer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from draftwood.contract import GIVES, TAKES, Sizes, tensors
from draftwood.manifest import GraphKind, StepSignature, TensorSignature

DTYPES = {
    "int64": torch.int64,
    "int32": torch.int32,
    "bool": torch.bool,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

# Steps that a whole step holds, by these names.
PARTS = ("draft", "verify")


@dataclass(frozen=True, slots=True)
class Step:
    """A module with its signature; ``dynamic`` maps every run-time size of the signature to an example.

    ``read`` are inputs before the caches that the module takes with them, as its variadic arguments.
    """

    module: nn.Module
    signature: StepSignature
    dynamic: dict[str, int] = field(default_factory=dict)
    read: int = 0

    @property
    def has_blocks(self) -> bool:
        """Whether it runs the teacher's blocks, whose caches it reads."""
        return any(name.startswith("key_cache.") for name in self.signature.caches)

    def examples(self, device: torch.device | None = None) -> tuple[Tensor, ...]:
        """Zero inputs of the declared shapes, run-time sizes at their example values."""
        return tuple(
            torch.zeros(
                [self.dynamic[s] if isinstance(s, str) else s for s in spec.shape],
                dtype=DTYPES[spec.dtype],
                device=device,
            )
            for spec in self.signature.inputs
        )

    def weight_name(self, parameter: str) -> str | None:
        """The bundle's name of a parameter or buffer of the module; None for a constant of the trace."""
        holder, _, name = parameter.partition(".")
        if holder in PARTS:
            holder, _, name = name.partition(".")
        return name if holder in ("decoder", "drafter", "teacher") and name else None


def tensor(name: str, dtype: str, *shape: int | str) -> TensorSignature:
    """An input or output."""
    return TensorSignature(name=name, dtype=dtype, shape=shape)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSizes:
    """Sizes that all static steps of a target share: the branch's rows, the path's slots, the element type."""

    branch_rows: int
    path_rows: int
    dtype: str = "float32"


def signed(
    name: str,
    kind: GraphKind,
    sizes: Sizes,
    caches: Mapping[str, tuple[int | str, ...]],
    *,
    rows: int = 0,
    slots: int = 0,
    dtype: str = "float32",
    batch: int = 1,
    parts: Collection[str] = (),
    read: Sequence[TensorSignature] = (),
) -> StepSignature:
    """The signature of a step by the contract of its kind, with these parts of it.

    The ``caches``, shapes by name, come last and are written in place; before them what else of a cache is ``read``.
    """
    return StepSignature(
        name=name,
        kind=kind,
        rows=rows,
        slots=slots,
        inputs=(
            *tensors(TAKES[kind], sizes, dtype, parts, batch),
            *read,
            *(tensor(cache, dtype, *shape) for cache, shape in caches.items()),
        ),
        outputs=(
            *tensors(GIVES[kind], sizes, dtype, parts, batch),
            *(tensor(f"{cache}.out", dtype, *shape) for cache, shape in caches.items()),
        ),
        aliases={f"{cache}.out": cache for cache in caches},
        batch=batch,
    )
