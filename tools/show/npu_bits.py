"""What CANN's documents promise of a row's bits, for the operators of an NPU graph; nothing of it was run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from draftwood.manifest import GraphSignature


@dataclass(frozen=True, slots=True)
class Level:
    """A value of ATC's ``--deterministic_level`` beside ``--deterministic=1``; ``row`` where it fixes a row's bits
    whatever stands in the other rows, which is what equal texts want."""

    level: int
    promise: str
    since: str
    row: bool
    source: str


_ATC = "https://www.hiascend.com/document/detail/en/canncommercial/850/devaids/atctool/atlasatcparam_16_0100.html"
LEVELS = (
    Level(1, "the same run again gives the same bits", "CANN 8.5", False, _ATC),
    Level(2, "equal rows of one run have equal bits, wherever they stand", "CANN 8.5.1, for debugging", False, _ATC),
    Level(
        3,
        "a token's bits depend on neither its place, the batch's size nor the other tokens; for part of the operators",
        "CANN 9.2",
        True,
        "https://gitcode.com/cann/ge/pull/4233 and docs/en/context/batch_consistency.md of cann/ops-transformer",
    ),
)
# Operators whose sums may be ordered anew from run to run, and which level 1 orders: the operator list of CANN 8.0.
ORDERED = {"MatMul", "MatMulV2", "BatchMatMul", "BatchMatMulV2", "ReduceMean", "ReduceSum", "ScatterElements"}
ORDERED_SOURCE = (
    "https://hiascend.com/document/detail/zh/CANNCommunityEdition/800alpha003/apiref/aolapi/operatorlist_00093.html"
)
ATTENTION = "FusedInferAttentionScore"
# It takes another kernel for one row of queries than for more.
ATTENTION_SOURCE = "https://www.hiascend.com/document/detail/zh/canncommercial/83RC1/API/aolapi/context/aclnnFusedInferAttentionScoreV3.md"


def bits_figures(graphs: Mapping[str, tuple[GraphSignature, Mapping[str, int]]]) -> dict[str, Any]:
    """The levels, and of every graph what they concern: operators by name, and the attention's kernel by its rows."""
    return {
        "levels": [asdict(level) for level in LEVELS],
        "sources": {"ordered": ORDERED_SOURCE, "attention": ATTENTION_SOURCE},
        "graphs": [
            {
                "name": name,
                "ordered": {kind: count for kind, count in counts.items() if kind in ORDERED},
                "attention": _kernel(signature) if ATTENTION in counts else None,
            }
            for name, (signature, counts) in graphs.items()
        ],
    }


def _kernel(signature: GraphSignature) -> str:
    return "IncreFlashAttention" if signature.rows == 1 else "PromptFlashAttention"


def bits_text(found: dict[str, Any]) -> list[str]:
    """`bits_figures` for people."""
    lines = ["bits of a row, by CANN's documents; nothing of it was run"]
    for level in found["levels"]:
        lines.append(f"  --deterministic=1 --deterministic_level={level['level']}  {level['promise']}")
        lines.append(f"    {level['since']}; {level['source']}")
    kernels = {graph["attention"] for graph in found["graphs"]} - {None}
    if kernels:
        same = "for plain and tree rows alike" if len(kernels) == 1 else "by the number of rows"
        lines.append(f"  attention   {', '.join(sorted(kernels))} {same}; {found['sources']['attention']}")
    ordered = sorted({kind for graph in found["graphs"] for kind in graph["ordered"]})
    lines.append(f"  ordered     by level 1: {', '.join(ordered) or 'none'}; {found['sources']['ordered']}")
    return lines
