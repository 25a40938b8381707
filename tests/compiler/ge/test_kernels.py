"""How many kernels a step of openPangu-7B's shape is on a device, two of its layers standing for all."""

from collections import Counter
from dataclasses import fields, replace
from typing import get_args

import pytest
import torch

from draftwood.compiler.device.steps import layer_ops, step_ops
from draftwood.compiler.drafters.common.steps import NewRows, tree_step
from draftwood.compiler.drafters.common.trees import grown
from draftwood.compiler.drafters.eagle3.network import Eagle3, Eagle3Config
from draftwood.compiler.ge.constraints import check_constraints
from draftwood.compiler.ge.graph import Edge, Graph
from draftwood.compiler.ge.interpreter import shapes
from draftwood.compiler.ge.lowering import lower_to_ge
from draftwood.compiler.ge.proofs import prove_in_place
from draftwood.compiler.ge.texts import texts_step
from draftwood.compiler.ge.torchair_bridge import ge_ir
from draftwood.compiler.ge.weights import plan_weights
from draftwood.compiler.steps.accept import Draws, accept_step
from draftwood.compiler.steps.step import Step, StepSizes
from draftwood.compiler.steps.tracing import shapes_only, trace
from draftwood.compiler.steps.verify import verify_step
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.experts import MixtureConfig
from draftwood.compiler.teachers.registry import make_decoder, read_config
from draftwood.tools.demo import SHAPES
from draftwood.tools.show.npu_graphs import kernels
from draftwood.trees import Topology
from draftwood.trees.spec import Budget

CONFIG = replace(read_config(SHAPES["shape:openpangu-embedded-7b"]), layers=2)


@pytest.fixture(scope="module")
def verified_bytes() -> tuple[Step, bytes]:
    return lowered_bytes(CONFIG)


@pytest.fixture(scope="module")
def verified(verified_bytes: tuple[Step, bytes]) -> tuple[Step, Graph]:
    return read(*verified_bytes)


def lowered(config: TeacherConfig) -> tuple[Step, Graph]:
    """The verify step of 13 rows at 1024, and its graph."""
    return read(*lowered_bytes(config))


def read(step: Step, air: bytes) -> tuple[Step, Graph]:
    return step, Graph.of(ge_ir().ModelDef.FromString(air).graph[0])


def lowered_bytes(config: TeacherConfig) -> tuple[Step, bytes]:
    """The lowered step, and its ``.air`` file."""
    with shapes_only(torch.bfloat16) as mode:
        decoder = make_decoder(config, 1024).requires_grad_(False)
    held = {name: tuple(value.shape) for name, value in decoder.state_dict().items()}
    sizes = StepSizes(branch_rows=13, path_rows=4, dtype="bfloat16")
    step = verify_step(decoder, sizes, 13, 1024, "npu")
    with mode:
        program = trace(step)
    others = {name: value.dtype for name, value in decoder.state_dict().items() if value.dtype != torch.bfloat16}
    index = plan_weights(held, torch.bfloat16, "w", dict.fromkeys(held, ()), {}, others)
    return step, lower_to_ge(step, program, index)


def test_a_layer_is_12_kernels_and_turns_nothing_around(verified: tuple[Step, Graph]) -> None:
    counted = kernels(verified[1])
    assert counted["layers"] == 2 and counted["outside"] <= 23
    once = ("RotaryMul", "SplitV", "FusedInferAttentionScore", "SwiGlu")
    twice = ("AddRmsNorm", "ScatterNdUpdate")
    assert counted["layer"] == dict.fromkeys(once, 1) | dict.fromkeys(twice, 2) | {"MatMulV2": 4}
    assert "TensorMove" not in verified[1].counts() and verified[1].counts()["Transpose"] == 1  # of the moved rows


def test_new_rows_join_moved_ones_without_a_kernel(verified: tuple[Step, Graph]) -> None:
    """They need one if GE cannot place both next to each other."""
    graph = verified[1]
    joins = {node.name for node in graph.nodes.values() if node.type == "ConcatD"}
    assert len(joins) == 4 and graph.laid_out() == joins
    first, key = graph.nodes["ConcatD_0"], graph.nodes["ConcatD_0"].inputs[1]
    for inputs in ((key, key), (key, Edge("committed", 0)), (key, Edge("ScatterNdUpdate_1", 0))):
        changed = Graph(graph.name, graph.nodes | {first.name: replace(first, inputs=inputs)})
        assert changed.laid_out() == joins - {first.name}
    across = replace(first, attributes=first.attributes | {"concat_dim": 1})
    assert Graph(graph.name, graph.nodes | {first.name: across}).laid_out() == joins - {first.name}


def test_keys_that_are_normed_are_joined_by_a_kernel() -> None:
    """ApplyRotaryPosEmb writes over its inputs, so GE does not choose where its results lie."""
    counted = kernels(lowered(replace(CONFIG, qk_norm=True, qkv_bias=False))[1])["layer"]
    assert counted["ConcatD"] == counted["ApplyRotaryPosEmb"] == 1 and sum(counted.values()) == 15
    config = replace(CONFIG, qk_norm=True)
    assert sum(op.count for op in layer_ops(config, 13, 1024)) == 15


def test_torchairs_own_protobuf_counts_the_same(verified_bytes: tuple[Step, bytes]) -> None:
    """Read apart from our reader of graphs: of one layer and of two, so the difference is a layer."""
    free = {"Data", "RefData", "Const", "FileConstant", "NetOutput"}  # inputs, constants
    free |= {"Reshape", "Squeeze", "Unsqueeze", "Identity"}  # views
    counts = []
    for _, air in (lowered_bytes(replace(CONFIG, layers=1)), verified_bytes):
        (graph,) = ge_ir().ModelDef.FromString(air).graph
        counts.append(Counter(op.type for op in graph.op if op.type not in free))
    layer = counts[1] - counts[0]
    assert layer.pop("ConcatD") == 2  # GE makes no task of them
    assert layer.total() == 12 and layer["MatMulV2"] == 4 and not layer["Transpose"] + layer["GatherV2"]
    assert counts[1].total() - 2 * (layer.total() + 2) == 23


def test_the_latency_model_lists_what_the_graph_lists(verified: tuple[Step, Graph]) -> None:
    counted = kernels(verified[1])
    assert sum(op.count for op in layer_ops(CONFIG, 13, 1024)) == sum(counted["layer"].values())
    assert sum(op.count for op in step_ops(CONFIG, 13, 1024)) == counted["all"]


@pytest.mark.parametrize(("intermediate", "layer"), [(12800, 14), (4864, 13)])
def test_a_quantised_layer_rounds_rows_where_they_are_made(intermediate: int, layer: int) -> None:
    """16 kernels where every product rounds its own; a wide activation's document leaves it alone."""
    names = tuple(f"layers.{i}.{name}" for i in range(3) for name in ("qkv", "o", "gate_up", "down"))
    config = replace(CONFIG, layers=3, intermediate=intermediate, quantised=names)
    step, graph = lowered(config)
    counted = kernels(graph)
    assert sum(counted["layer"].values()) == layer and counted["layer"]["AddRmsNormDynamicQuant"] == 2
    assert sum(op.count for op in layer_ops(config, 13, 1024)) == layer
    assert sum(op.count for op in step_ops(config, 13, 1024)) == counted["all"]
    assert [f for f in check_constraints(graph, shapes(graph)) if f.level == "error"] == []
    assert len(prove_in_place(graph, step.signature)) == 6


def test_the_latency_model_lists_the_kernels_of_a_mixture() -> None:
    plain = {field.name: getattr(CONFIG, field.name) for field in fields(CONFIG)}
    sizes = {"experts": 8, "experts_per_token": 2, "expert_intermediate": 512, "shares_normalised": True}
    config = MixtureConfig(**plain | sizes | {"family": "qwen3-moe", "dense_layers": (), "qkv_bias": False})
    graph = lowered(config)[1]
    counted = kernels(graph)
    assert sum(op.count for op in step_ops(config, 13, 1024)) == counted["all"]
    assert [counted["layer"][name] for name in ("GroupedMatmul", "MoeInitRoutingV3", "SwiGlu")] == [2, 1, 1]
    assert [f for f in check_constraints(graph, shapes(graph)) if f.level == "error"] == []


def test_every_cache_is_written_once_by_whole_rows(verified: tuple[Step, Graph]) -> None:
    step, graph = verified
    known = shapes(graph)
    assert [f for f in check_constraints(graph, known) if f.level == "error"] == []
    proof = prove_in_place(graph, step.signature)
    assert len(proof) == 4
    rows = Counter(known[one.cache][0][1] for one in proof)
    assert rows == {(1024, CONFIG.kv_heads * CONFIG.head_dim): 4}


def test_an_acceptance_is_16_kernels_and_with_noise_148() -> None:
    """30 and 190 while they walked by the tree's mask and ranked all pairs of tokens."""
    sizes = StepSizes(branch_rows=16, path_rows=5, dtype="bfloat16")
    counts = {}
    for draws in get_args(Draws):
        with shapes_only(torch.bfloat16):
            step = accept_step(draws, 16, sizes, 151936, 3 * 4096, 5)
            program = trace(step)
        air = lower_to_ge(step, program, plan_weights({}, torch.bfloat16, "w", {}, {}, {}))
        graph = Graph.of(ge_ir().ModelDef.FromString(air).graph[0])
        assert list(check_constraints(graph, shapes(graph))) == []
        counts[draws] = len(graph.kernels)
        # Nothing casts a value to the type that it has, and nothing places that an operator takes as they are.
        assert graph.counts()["Cast"] <= 12
    assert counts == {"greedy": 16, "sampled": 148}


@pytest.mark.parametrize(
    ("tree", "most", "several"),
    [(Topology.backbone(3, 1), 113, 119), pytest.param(Budget(16, 5, 4), 275, 290, marks=pytest.mark.slow)],
    ids=str,
)
def test_a_draft_of_eagle3_runs_nothing_for_its_own_tables(tree: Topology | Budget, most: int, several: int) -> None:
    """118 and 278 while every level read the rotary tables, and two rows were copied next to each other.

    Eight texts take a few more than one, where a launch of each took eight times as many.
    """
    block = replace(
        CONFIG,
        layers=1,
        hidden=256,
        intermediate=512,
        heads=4,
        kv_heads=2,
        head_dim=128,
        vocabulary=1024,
        bos=None,
        eos=(),
    )
    config = Eagle3Config(
        block=block, target_hidden=256, aux_layers=(1, 2, 3), draft_vocabulary=512, own_embedding=False, tied_head=False
    )
    with shapes_only(torch.bfloat16) as mode:
        decoder, drafter = make_decoder(block, 128).requires_grad_(False), Eagle3(config, 128).requires_grad_(False)
    step = tree_step(drafter, decoder, "draft", grown(tree), NewRows(5, 128, "bfloat16"))
    held = {name: value for module in (decoder, drafter) for name, value in module.state_dict().items()}
    others = {name: value.dtype for name, value in held.items() if value.dtype != torch.bfloat16}
    sizes = {name: tuple(value.shape) for name, value in held.items()}
    index = plan_weights(sizes, torch.bfloat16, "w", dict.fromkeys(held, ()), {}, others)
    with mode:
        program = trace(step)
    for made, count in ((step, most), (texts_step(step, program, 8), several)):
        with mode:
            traced = trace(made)
        graph = Graph.of(ge_ir().ModelDef.FromString(lower_to_ge(made, traced, index)).graph[0])
        assert [f for f in check_constraints(graph, shapes(graph)) if f.level == "error"] == []
        assert len(graph.kernels) == count and len(prove_in_place(graph, made.signature)) == 2
