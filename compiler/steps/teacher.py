"""The teacher's steps of a bundle: their declared signatures and the modules that are traced.

A signature lists names, dtypes and shapes in call order, and which output is written into which input.
The caches come last, key then value of every layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from draftwood.compiler.teachers.block import Form
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.decoder import Decoder, StepOutput
from draftwood.manifest import GraphKind, GraphSignature, TensorSignature, cache_names

# T rows, P path slots, B branch rows, R rows with logits, K key/value heads, D head dimension, C slots,
# S seen slots, W = P + T

DTYPES = {
    "int64": torch.int64,
    "int32": torch.int32,
    "bool": torch.bool,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class Step:
    """A module with its signature; ``dynamic`` maps every run-time size of the signature to an example."""

    module: nn.Module
    signature: GraphSignature
    dynamic: dict[str, int] = field(default_factory=dict)

    def examples(self) -> tuple[Tensor, ...]:
        """Zero inputs of the declared shapes, run-time sizes at their example values."""
        return tuple(
            torch.zeros([self.dynamic[s] if isinstance(s, str) else s for s in spec.shape], dtype=DTYPES[spec.dtype])
            for spec in self.signature.inputs
        )

    def weight_name(self, parameter: str) -> str | None:
        """The bundle's name of a parameter or buffer of the module; None for a constant of the trace."""
        name = parameter.removeprefix("decoder.").removeprefix("drafter.")
        if parameter == "embed":
            return "embed.weight"
        if parameter == "lm_head":
            return "embed.weight" if getattr(self.module, "tied_to_embedding", False) else "lm_head.weight"
        return name if name != parameter else None


def tensor(name: str, dtype: str, *shape: int | str) -> TensorSignature:
    """An input or output."""
    return TensorSignature(name=name, dtype=dtype, shape=shape)  # type: ignore[arg-type]


class _TeacherStep(nn.Module):
    def __init__(self, decoder: Decoder, form: Form, branch_rows: int) -> None:
        super().__init__()
        self.decoder, self.form, self.branch_rows = decoder, form, branch_rows

    def outputs(self, out: StepOutput, branch: bool) -> tuple[Tensor, ...]:
        tail = (self._padded(out.branch_L2TKD),) if branch else ()
        return (out.logits_RV, out.choice_R, out.features_RF, *tail, *out.caches)

    def _padded(self, branch_L2TKD: Tensor) -> Tensor:
        missing = self.branch_rows - branch_L2TKD.shape[2]
        if missing <= 0:
            return branch_L2TKD
        layers, two, _, heads, dim = branch_L2TKD.shape
        return torch.cat((branch_L2TKD, branch_L2TKD.new_zeros(layers, two, missing, heads, dim)), 2)


class VerifyStep(_TeacherStep):
    """Tree rows in, logits of every row out; the decode step is the same with one row."""

    def forward(self, tokens, depths, visible, committed, accepted, path, branch, *caches):  # type: ignore[no-untyped-def]
        out = self.decoder.step(
            tokens, depths, visible, committed, accepted, path, branch, list(caches), form=self.form
        )
        return self.outputs(out, branch=True)


class PrefillStep(_TeacherStep):
    """A chunk of text in causal order; its rows are committed by length, so it returns no branch."""

    def forward(self, tokens, last, committed, accepted, path, branch, *caches):  # type: ignore[no-untyped-def]
        rows = tokens.shape[0]
        order = torch.arange(rows)
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


class CpuStep(_TeacherStep):
    """Prefill, decode and verify of any size in one graph with run-time shapes, for onnxruntime."""

    def forward(self, tokens, positions, rows, bias, last, total, path, branch, *caches):  # type: ignore[no-untyped-def]
        out = self.decoder.step_cpu(tokens, positions, rows, bias, last, total, path, branch, list(caches))
        return (out.logits_RV, out.choice_R, out.features_RF, out.branch_L2TKD, *out.caches)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSizes:
    """What all static steps of a target share: the branch's rows, the path's slots, the element type."""

    branch_rows: int
    path_rows: int
    dtype: str = "float32"


def cached(
    caches: list[str],
    name: str,
    kind: GraphKind,
    inputs: list[TensorSignature],
    outputs: list[TensorSignature],
    cache_shape: tuple[int | str, ...],
    rows: int,
    slots: int,
    dtype: str = "float32",
) -> GraphSignature:
    """The signature of a step whose ``caches`` come last and are written in place."""
    given = [tensor(n, dtype, *cache_shape) for n in caches]
    written = [tensor(f"{name}.out", dtype, *cache_shape) for name in caches]
    return GraphSignature(
        name=name,
        kind=kind,
        file=f"onnx/{name}.onnx",
        rows=rows,
        slots=slots,
        inputs=(*inputs, *given),
        outputs=(*outputs, *written),
        aliases={f"{name}.out": name for name in caches},
    )


def _commit_inputs(config: TeacherConfig, sizes: StepSizes) -> list[TensorSignature]:
    branch = (config.layers, 2, sizes.branch_rows, config.kv_heads, config.head_dim)
    return [
        tensor("committed", "int64", 1),
        tensor("accepted", "int64", 1),
        tensor("path", "int64", sizes.path_rows),
        tensor("branch", sizes.dtype, *branch),
    ]


def _teacher_outputs(
    decoder: Decoder, rows: int | str, all_rows: int | str, dtype: str = "float32"
) -> list[TensorSignature]:
    return [
        tensor("logits", dtype, rows, decoder.config.vocabulary),
        tensor("choice", "int64", rows),
        tensor("features", dtype, all_rows if decoder.aux_layers else rows, decoder.feature_width),
    ]


def verify_step(
    decoder: Decoder, sizes: StepSizes, rows: int, slots: int, form: Form = "fused", decode: bool | None = None
) -> Step:
    """Verification of a tree of ``rows`` rows at KV length ``slots``.

    ``decode`` makes it the decode step, by default that of one row; a target whose attention needs more rows pads it.
    """
    config = decoder.config
    decode = rows == 1 if decode is None else decode
    name = f"decode-kv{slots}" if decode else f"verify-t{rows}-kv{slots}"
    inputs = [
        tensor("tokens", "int64", rows),
        tensor("depths", "int64", rows),
        tensor("visible", "bool", rows, rows),
    ]
    branch = tensor(
        "branch.out",
        sizes.dtype,
        config.layers,
        2,
        max(rows, sizes.branch_rows),
        config.kv_heads,
        config.head_dim,
    )
    signature = cached(
        cache_names(config.layers),
        name,
        "decode" if decode else "verify",
        inputs + _commit_inputs(config, sizes),
        [*_teacher_outputs(decoder, rows, rows, sizes.dtype), branch],
        (config.kv_heads * slots, config.head_dim),
        rows,
        slots,
        sizes.dtype,
    )
    return Step(VerifyStep(decoder, form, sizes.branch_rows), signature)


def prefill_step(decoder: Decoder, sizes: StepSizes, rows: int, slots: int, form: Form = "fused") -> Step:
    """A prefill chunk of ``rows`` tokens; ``last`` [1] is the row whose logits are returned."""
    config = decoder.config
    inputs = [tensor("tokens", "int64", rows), tensor("last", "int64", 1)]
    signature = cached(
        cache_names(config.layers),
        f"prefill-t{rows}-kv{slots}",
        "prefill",
        inputs + _commit_inputs(config, sizes),
        _teacher_outputs(decoder, 1, rows, sizes.dtype),
        (config.kv_heads * slots, config.head_dim),
        rows,
        slots,
        sizes.dtype,
    )
    return Step(PrefillStep(decoder, form, sizes.branch_rows), signature)


def cpu_step(decoder: Decoder) -> Step:
    """The one graph with run-time sizes that onnxruntime serves every gear with."""
    config = decoder.config
    shape = (config.layers, 2, "B", config.kv_heads, config.head_dim)
    inputs = [
        tensor("tokens", "int64", "T"),
        tensor("positions", "int64", "T"),
        tensor("rows", "int64", "R"),
        tensor("bias", "float32", 1, 1, "W", "S"),
        tensor("last", "int32", 1),
        tensor("total", "int32"),
        tensor("path", "int64", "P"),
        tensor("branch", "float32", *shape),
    ]
    outputs = [*_teacher_outputs(decoder, "R", "T"), tensor("branch.out", "float32", *shape[:2], "T", *shape[3:])]
    signature = cached(
        cache_names(config.layers), "step", "step", inputs, outputs, (1, config.kv_heads, "C", config.head_dim), 0, 0
    )
    # Examples are distinct and above 1, so that torch.export ties no two sizes and specialises none.
    dynamic = {"T": 5, "R": 4, "P": 3, "B": 6, "W": 8, "S": 40, "C": 128}
    return Step(CpuStep(decoder, "cpu", 0), signature, dynamic)


def rebuild(signature: GraphSignature, decoder: Decoder) -> Step:
    """The teacher's step that a signature came from, for a decoder that holds a bundle's weights."""
    shapes = {spec.name: spec.shape for spec in signature.inputs}
    dtype = next(spec.dtype for spec in signature.inputs if spec.name == "branch")
    sizes = StepSizes(branch_rows=int(shapes["branch"][2]), path_rows=int(shapes["path"][0]), dtype=dtype)
    if signature.kind == "prefill":
        return prefill_step(decoder, sizes, signature.rows, signature.slots)
    return verify_step(decoder, sizes, signature.rows, signature.slots, decode=signature.kind == "decode")
