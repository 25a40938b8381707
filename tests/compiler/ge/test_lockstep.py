"""Collectives in lowered graphs: executed with all ranks together, refused if ranks would wait for ever."""

import pytest
import torch

from draftwood.compiler.ge.constraints import check_constraints
from draftwood.compiler.ge.graph import Graph
from draftwood.compiler.ge.interpreter import Interpreter, shapes
from draftwood.compiler.ge.lockstep import run_ranks
from draftwood.compiler.ge.lowering import lower_to_ge
from draftwood.compiler.ge.sameness import fingerprints
from draftwood.compiler.ge.torchair_bridge import ge_ir
from draftwood.compiler.ge.weights import WeightIndex
from draftwood.compiler.ranks.collectives import gathered, group_of, summed
from draftwood.compiler.steps.step import Step, tensor
from draftwood.compiler.steps.tracing import trace
from draftwood.errors import LoweringError
from draftwood.manifest import StepSignature

EMPTY = WeightIndex(dtype="bfloat16", bytes=0, constants={})


class Joining(torch.nn.Module):
    def __init__(self, ranks: int, bare: bool = False) -> None:
        super().__init__()
        self.ranks, self.bare = ranks, bare

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x if self.bare else x + x
        return -summed(x), -gathered(x, self.ranks, 5)


def lowered(ranks: int, bare: bool = False) -> Graph:
    signature = StepSignature(
        name="joining", kind="draft", rows=1, slots=0, aliases={},
        inputs=(tensor("x", "bfloat16", 2, 3),),
        outputs=(tensor("total", "bfloat16", 2, 3), tensor("side", "bfloat16", 2, 5)),
    )  # fmt: skip
    step = Step(Joining(ranks, bare), signature)
    with group_of(ranks):
        air = lower_to_ge(step, trace(step), EMPTY)
    return Graph.of(ge_ir().ModelDef.FromString(air).graph[0])


def test_ranks_together_add_up_and_stand_side_by_side() -> None:
    graph = lowered(2)
    assert {"HcomAllReduce": 1, "HcomAllGather": 1}.items() <= graph.counts().items()
    given = [torch.full((2, 3), float(rank + 1), dtype=torch.bfloat16) for rank in range(2)]
    found = run_ranks([Interpreter(graph, {})] * 2, [{"x": x} for x in given])
    for total, side in found:
        assert torch.equal(total, torch.full((2, 3), -6.0, dtype=torch.bfloat16))
        assert side.tolist() == [[-2, -2, -2, -4, -4]] * 2
    assert torch.is_grad_enabled()


def test_one_rank_alone_is_refused() -> None:
    graph, x = lowered(2), torch.zeros(2, 3, dtype=torch.bfloat16)
    with pytest.raises(LoweringError, match="joins several ranks; run all of them together"):
        Interpreter(graph, {}).run({"x": x})
    with pytest.raises(LoweringError, match="is not of 3 ranks"):
        run_ranks([Interpreter(graph, {})] * 3, [{"x": x}] * 3)


def test_ranks_that_would_wait_for_ever_are_refused() -> None:
    ours, theirs = lowered(2), lowered(2)
    hcom = next(node for node in theirs.nodes.values() if node.type == "HcomAllReduce")
    hcom.attributes["fusion"] = 1
    x = torch.zeros(2, 3, dtype=torch.bfloat16)
    with pytest.raises(LoweringError, match="ranks would wait for each other for ever"):
        run_ranks([Interpreter(ours, {}), Interpreter(theirs, {})], [{"x": x}] * 2)


def test_a_group_has_another_name_on_every_device() -> None:
    ours, theirs = lowered(2), lowered(2)
    for node in theirs.nodes.values():
        if "group" in node.attributes:
            node.attributes["group"] = "hcom_world_group"
    assert [*fingerprints(ours).values()] == [*fingerprints(theirs).values()]


def test_rules_of_collectives() -> None:
    found = check_constraints(graph := lowered(2), shapes(graph))
    assert [(one.level, one.rule) for one in found] == [("warning", "HcomAllReduce")]  # bf16 is not in its definition
    bare = lowered(2, bare=True)
    errors = [one for one in check_constraints(bare, shapes(bare)) if one.level == "error"]
    assert {one.rule for one in errors} == {"HcomAllReduce", "HcomAllGather"}
    assert all("sends Data x, whose address a static graph cannot refresh" in one.message for one in errors)
