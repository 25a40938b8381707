"""The least releases of CANN that an NPU's graphs need, feature by feature, each with where it was read.

A release counts if public sources of it were read; an older one may do. The engine ``acl`` needs CANN alone; ``npu``
needs a torch_npu that is published for the CANN at hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple


class Need(NamedTuple):
    """A feature, by the operator of a graph if it is one, and the first release known to have it."""

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
        "WeightQuantBatchMatmulV2",
        "8.5.0",
        "ops-nn 8.5.0, matmul/weight_quant_batch_matmul_v2: int32 words of eight weights, the attribute inner_precise",
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


# torch_npu -> the CANN that it is published for, whose repairs (8.5.1) it runs with as well.
PAIRS = {
    "2.12.0": "9.1.0",
    "2.11.0": "9.1.0",
    "2.10.0.post4": "9.1.0",
    "2.9.0.post6": "9.1.0",
    "2.7.1.post8": "9.1.0",
    "2.10.0.post2": "9.0.0",
    "2.10.0": "9.0.0",
    "2.9.0.post2": "9.0.0",
    "2.8.0.post4": "9.0.0",
    "2.7.1.post4": "9.0.0",
    "2.9.0.post1": "8.5.0",
    "2.9.0": "8.5.0",
    "2.8.0.post2": "8.5.0",
    "2.8.0.post1": "8.5.0",
    "2.7.1.post2": "8.5.0",
    "2.6.0.post5": "8.5.0",
    "2.8.0": "8.3.RC1",
    "2.7.1": "8.3.RC1",
    "2.6.0.post3": "8.3.RC1",
    "2.6.0": "8.2.RC1",
}
PAIRS_SOURCE = (
    "Ascend/pytorch, COMPATIBILITY.en.md at 9e73e708, and vllm-ascend, versioning_policy.md at 182b75ea, of August 2026"
)
# Chips whose names are so, and why no graph runs there. Ascend910B is of the first generation, as the 910A is.
UNSUPPORTED = {
    r"Ascend310P.*": "it has no FusedInferAttentionScore and nothing in bf16",
    r"Ascend310B.*": "it has no FusedInferAttentionScore, RmsNorm or SwiGlu, and nothing in bf16",
    r"Ascend910(A|B|Pro.|Premium.)": "it has no FusedInferAttentionScore or AddRmsNorm, and nothing in bf16",
}
UNSUPPORTED_SOURCE = (
    "operator stores of CANN 8.1.RC1; ops-transformer 9.1.0, attention/fused_infer_attention_score/README; ops-nn"
    " 9.1.0, norm/add_rms_norm/README; IsBF16Supported of torch_npu"
)


def unsupported(chip: str) -> str:
    """Why the graphs do not run on a chip, in one line; "" if nothing is known against it."""
    why = next((why for names, why in UNSUPPORTED.items() if re.fullmatch(names, chip)), "")
    return f"{chip} is not supported: {why} ({UNSUPPORTED_SOURCE})" if why else ""


def acl_problem(cann: str | None) -> str:
    """Why ``--engine acl`` cannot run with this CANN; "" if it can, or its release is not known."""
    least = least_cann(need.feature for need in LEAST)
    return f"CANN {cann} is older than {least}" if cann and release(cann) < release(least) else ""


def npu_problem(torch_npu: str | None, cann: str | None) -> str:
    """Why ``--engine npu`` is not to be expected to run with these two; "" if nothing speaks against it."""
    if not torch_npu or not cann:
        return ""
    fits = [name for name, release_ in PAIRS.items() if release_ == re.sub(r"^(\d+\.\d+)\.\d+$", r"\1.0", cann)]
    torch_npu = torch_npu.partition("+")[0]  # a build's commit may follow
    if torch_npu in fits:
        return acl_problem(cann)
    known = f"torch_npu {torch_npu} is published for {f'CANN {PAIRS[torch_npu]}' if torch_npu in PAIRS else 'no CANN'}"
    instead = f"with CANN {cann} goes torch_npu {' or '.join(fits)}" if fits else f"CANN {cann} is in no row"
    return f"{known}; {instead} ({PAIRS_SOURCE})"


def least_cann(features: Iterable[str]) -> str:
    """The release that has all of these; those that are not in the table need none."""
    least = [need.cann for need in LEAST if need.feature in set(features)]
    return max(least, key=release, default="")


def release(version: str) -> tuple[int, ...]:
    """For comparison: 8.1.RC1 is before 8.1.0, 8.5.0.alpha002 before 8.5.0, and 9.2.0-beta.2 before 9.2.0."""
    numbers = [int(part) for part in re.findall(r"(?:^|\.)(\d+)(?![^.-])", version)[:3]]
    numbers += [0] * (3 - len(numbers))
    return (*numbers, 0 if re.search("[A-Za-z]", version) else 1)
