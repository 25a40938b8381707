"""The least releases of CANN that an NPU's graphs need, feature by feature, each with where it was read.

A release counts where public sources of it were read; an older one may do. torch_npu has to be the release whose
converters wrote the graphs, or newer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple


class Need(NamedTuple):
    """A feature, by the operator of a graph where it is one, and the first release known to have it."""

    feature: str
    cann: str
    source: str


LEAST = (
    Need(
        "FusedInferAttentionScore",
        "8.5.0",
        "ops-transformer 8.5.0: the attributes pse_type and out_dtype, which torchair writes, are not in 8.1.RC1's"
        " op_proto/inc/nn_other.h",
    ),
    Need(
        "ApplyRotaryPosEmb",
        "8.5.0",
        "ops-transformer 8.5.0, posembedding/apply_rotary_pos_emb; 8.1.RC1's definition takes a head dimension of 128"
        " alone and has no rotary_mode",
    ),
    Need("RotaryMul", "8.1.RC1", "op_proto/inc/nn_other.h of 8.1.RC1"),
    Need("ScatterNdUpdate", "8.1.RC1", "operator information of the 910B in 8.1.RC1"),
    Need(
        "QuantBatchMatmulV3",
        "8.5.0",
        "ops-nn 8.5.0, matmul/quant_batch_matmul_v3: int8 with a float32 scale and a scale of every row",
    ),
    Need(
        "AddRmsNormDynamicQuant",
        "8.5.0",
        "ops-nn, norm/add_rms_norm_dynamic_quant: the attributes output_mask and dst_type, which torchair writes",
    ),
    Need(
        "DequantSwigluQuant",
        "8.5.0",
        "ops-nn, quant/dequant_swiglu_quant: the attributes swiglu_mode to glu_bias, which torchair writes",
    ),
    Need("RefData", "8.5.0", "GE 8.5.0, api/atc/main_impl.cc, CreateInputsForInference: ATC takes it for an input"),
    Need("weights shared by all .om files", "8.5.0", "aclmdlSetExternalWeightAddress, in GE since 8.5.0"),
)


def least_cann(features: Iterable[str]) -> str:
    """The release that has all of these; those that are not in the table need none."""
    found = [need.cann for need in LEAST if need.feature in set(features)]
    return max(found, key=release, default="")


def release(version: str) -> tuple[int, ...]:
    """For comparison: 8.1.RC1 is before 8.1.0, and 8.5.0.alpha002 before 8.5.0."""
    numbers = [int(part) for part in re.findall(r"^\d+|(?<=\.)\d+(?=\.|$)", version)]
    numbers += [0] * (3 - len(numbers))
    return (*numbers[:3], 0 if re.search("[A-Za-z]", version) else 1)
