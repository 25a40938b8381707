"""The operator contracts of a decoder and tree step; importing the package registers them.

Every operator is registered before torchair can be imported, because torchair silently skips the converters
of operators that it does not find.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draftwood.kernels.attention import APPEND_ATTENTION, FUSED_INFER_ATTENTION_SCORE, eager_attention
from draftwood.kernels.block_attention import BLOCK_ATTENTION
from draftwood.kernels.border import BORDER
from draftwood.kernels.contract import Contract, register
from draftwood.kernels.experts import EXPERTS, FINALIZE_ROUTING, GATING, GROUPED_LINEAR, INIT_ROUTING
from draftwood.kernels.int4 import WEIGHT_QUANT_BATCHMATMUL
from draftwood.kernels.linear import BATCHED_LINEAR, LINEAR
from draftwood.kernels.mlp import SWIGLU
from draftwood.kernels.nbits import NBITS_LINEAR
from draftwood.kernels.norm import ADD_RMS_NORM, RMS_NORM
from draftwood.kernels.quantised import QUANTISED_LINEAR
from draftwood.kernels.ranking import BEST, PICKED
from draftwood.kernels.rotary import ROTARY_MUL, ROTARY_PAIR, ROTARY_ROWS
from draftwood.kernels.rounded import ADD_RMS_NORM_DYNAMIC_QUANT, DEQUANT_SWIGLU_QUANT, ROUNDED_LINEAR
from draftwood.kernels.rows_attention import ROWS_ATTENTION
from draftwood.kernels.scatter import JOIN_ROWS, SCATTER_ND_UPDATE, SCATTER_ND_UPDATE_
from draftwood.kernels.whole import ADD_SCALED, MULTIPLY_ADD

NPU_CONTRACTS = (
    RMS_NORM,
    ADD_RMS_NORM,
    ROTARY_MUL,
    SWIGLU,
    FUSED_INFER_ATTENTION_SCORE,
    SCATTER_ND_UPDATE,
    SCATTER_ND_UPDATE_,
    GATING,
    INIT_ROUTING,
    FINALIZE_ROUTING,
    ADD_RMS_NORM_DYNAMIC_QUANT,
    DEQUANT_SWIGLU_QUANT,
    WEIGHT_QUANT_BATCHMATMUL,
)
CPU_CONTRACTS = (ROTARY_ROWS, APPEND_ATTENTION, ROWS_ATTENTION, BLOCK_ATTENTION, NBITS_LINEAR)
# Our own, put to the NPU by converters of ours.
GE_CONTRACTS = (
    ROTARY_PAIR,
    LINEAR,
    BATCHED_LINEAR,
    QUANTISED_LINEAR,
    ROUNDED_LINEAR,
    GROUPED_LINEAR,
    JOIN_ROWS,
    BEST,
    PICKED,
    MULTIPLY_ADD,
    ADD_SCALED,
)
# Our own, of standard operators in ONNX and of several operators of the NPU.
COMPOSED_CONTRACTS = (EXPERTS,)
# In traces that are cut; no graph keeps it.
MARKS = (BORDER,)

register(NPU_CONTRACTS + CPU_CONTRACTS + GE_CONTRACTS + COMPOSED_CONTRACTS + MARKS)


def onnx_forms(cpu: bool) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Operator -> function that builds its ONNX form.

    ``cpu`` adds the forms that only onnxruntime runs; without it every form but that of packed weights is standard
    opset 18.
    """
    forms: dict[Callable[..., Any], Callable[..., Any]] = {}
    for contract in NPU_CONTRACTS + CPU_CONTRACTS + GE_CONTRACTS + COMPOSED_CONTRACTS + MARKS:
        form = (contract.onnx_cpu if cpu else None) or contract.onnx
        if form is not None:
            forms[contract.operator] = form
    return forms


__all__ = [
    "COMPOSED_CONTRACTS",
    "CPU_CONTRACTS",
    "GE_CONTRACTS",
    "NPU_CONTRACTS",
    "Contract",
    "eager_attention",
    "onnx_forms",
    "register",
]
