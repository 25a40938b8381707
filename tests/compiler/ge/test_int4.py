"""Four bits on an NPU: the kernels' arithmetic, the graphs of a packed teacher, its texts, and the cost of a step."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from draftwood.compiler.bundle.binding import bind
from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.device.devices import device
from draftwood.compiler.device.steps import step_s
from draftwood.compiler.ge.graph import Declared, Edge, Graph, Node
from draftwood.compiler.ge.operator_rules import RULES, Use
from draftwood.compiler.ge.operators import OPERATORS
from draftwood.compiler.ge.weights import bundle_npu_weights
from draftwood.compiler.steps.step import DTYPES
from draftwood.compiler.targets.online import TorchairExecutor
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.conversion import Precision, in_precision
from draftwood.errors import CheckpointError, RequestError
from draftwood.kernels.int4 import matrix, packed_words, whole_numbers
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding
from draftwood.runtime.engines.choice import open_engine
from draftwood.runtime.engines.opening import Opening
from draftwood.runtime.options import Options
from draftwood.runtime.policy import FixedTree
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.tests import fixtures
from draftwood.tests.compiler.conftest import medusa_tensors
from draftwood.tests.packed_checkpoints import save_packed
from draftwood.tools.comparison.check import check
from draftwood.tools.demo import resolve
from draftwood.trees import Topology

# T rows, H inputs, O outputs, G groups
H, O = 512, 128  # noqa: E741
KINDS = pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
# Largest share of a group's largest number that three digits leave out: half a last digit.
LEFT = 0.5 / (7.49 * 14.98 * 14.98)
PRODUCT = OPERATORS["WeightQuantBatchMatmulV2"].function


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(kind: torch.dtype, group: int) -> dict[str, Tensor]:
    """Operands after the rows, by name."""
    whole = torch.randint(0, 16, (O, H), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    zeros = torch.randint(0, 16, (H // group, O), generator=torch.Generator().manual_seed(2))
    scale = (noise(H // group, O, seed=3).abs() * 0.01).to(kind)
    wide = torch.float32 if kind is torch.bfloat16 else kind
    bias = noise(O, seed=4).to(kind).to(wide)
    offset = (8 - zeros).to(kind)
    return {"weight": packed_words(whole), "antiquant_scale": scale, "antiquant_offset": offset, "bias": bias}


def test_words_are_those_of_the_documents() -> None:
    """The first output of eight lies in the lowest bits, in two's complement; the middle is zero."""
    whole = torch.arange(8, 16).repeat(2).to(torch.uint8)[:, None]
    assert [hex(int(word) & 0xFFFFFFFF) for word in packed_words(whole)[0]] == ["0x76543210"] * 2
    assert packed_words(torch.zeros(8, 1, dtype=torch.uint8)).tolist() == [[-2004318072]]  # 0x88888888
    given = torch.randint(0, 16, (O, H), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    assert torch.equal(whole_numbers(packed_words(given)), given.t().float() - 8)


@KINDS
@pytest.mark.parametrize("group", [64, 128])
def test_rows_in_digits_are_near_the_exact_product(kind: torch.dtype, group: int) -> None:
    held, x = layer(kind, group), noise(group // 8, H, seed=5).to(kind)
    x[1], x[2, :group] = 0, 0
    got = PRODUCT(x, **held, antiquant_group_size=group)
    whole = matrix(held["weight"], held["antiquant_scale"], held["antiquant_offset"])
    exact = x.double() @ whole.double() + held["bias"].double()
    # What a group's digits leave out, through its weights without their zeros; then one rounding.
    largest = x.float().unflatten(1, (-1, group)).abs().amax(-1)
    bare = matrix(held["weight"], held["antiquant_scale"], None).abs().unflatten(0, (-1, group)).sum(1)
    bound = LEFT * (largest @ bare) * 1.01 + torch.finfo(kind).eps * exact.abs() + 1e-4
    assert got.dtype == kind and bool(((got.double() - exact).abs() <= bound).all())
    assert torch.equal(got[1], held["bias"].to(kind)), "a row of zeros gives the bias"
    reference = torch.ops.npu.npu_weight_quant_batchmatmul(x, **held, antiquant_group_size=group)
    assert 0 < (got.float() - reference.float()).abs().max() <= float(bound.max()) * 2


@KINDS
def test_a_row_in_digits_has_the_same_bits_whatever_stands_beside_it(kind: torch.dtype) -> None:
    held, x = layer(kind, 128), noise(16, H, seed=6).to(kind)
    alone = torch.cat([PRODUCT(row[None], **held, antiquant_group_size=128) for row in x])
    for first, last in ((0, 16), (1, 4), (3, 16), (0, 2)):
        assert torch.equal(PRODUCT(x[first:last], **held, antiquant_group_size=128), alone[first:last])


@KINDS
def test_more_rows_are_multiplied_with_rounded_weights(kind: torch.dtype) -> None:
    held, x = layer(kind, 64), noise(9, H, seed=7).to(kind)
    rounded = matrix(held["weight"], held["antiquant_scale"], held["antiquant_offset"]).to(kind)
    want = OPERATORS["MatMul"].function(x, rounded, held["bias"])
    assert torch.equal(PRODUCT(x, **held, antiquant_group_size=64), want)
    assert not torch.equal(PRODUCT(x[:8], **held, antiquant_group_size=64), want[:8]), "eight rows are cut in digits"


def broken(group: int = 64, **changed: tuple[torch.dtype, tuple[int, ...]]) -> list[str]:
    half = torch.float16
    given = {"x": (half, (7, 128)), "weight": (torch.int32, (128, 16)), "antiquant_scale": (half, (2, 128))}
    given |= {"antiquant_offset": (half, (2, 128)), "bias": (half, (128,))} | changed
    declared, edges = tuple(Declared(name, None, None) for name in given), tuple(Edge(name, 0) for name in given)
    attributes = {"antiquant_group_size": group}
    node = Node("n", "WeightQuantBatchMatmulV2", edges, attributes, declared, (Declared("y", None, None),))
    found = RULES[node.type].find(Use(Graph("g", {"n": node}), node, given, ((half, (7, 128)),)))
    return [f"{level}: {message}" for level, message in found]


def test_what_breaks_a_rule_of_the_product_is_found() -> None:
    half = torch.float16
    assert broken() == []
    assert any("groups of 128 of 128" in text for text in broken(group=128)), "smaller than all inputs"
    assert any("groups of 32" in text for text in broken(group=32))
    assert any("expected matrices" in text for text in broken(x=(half, (1, 7, 128))))
    assert any("scales are [1, 128]" in text for text in broken(antiquant_scale=(half, (1, 128))))
    assert any("scales are" in text for text in broken(antiquant_offset=(torch.bfloat16, (2, 128))))
    assert any("bias is" in text for text in broken(bias=(torch.float32, (128,))))


RAGGED = Topology.from_paths(((0,), (1,), (0, 0), (0, 1), (1, 0)))
TREES = (("plain", Topology.plain()), ("ragged", RAGGED))
Packed = Callable[..., Path]


@pytest.fixture(scope="module")
def packed(save_llama: Callable, tmp_path_factory: pytest.TempPathFactory) -> Packed:
    """Writes a packed teacher with layers for the kernel, and Medusa heads next to it, and gives its folder."""

    def save(layout: str = "awq", **asked: object) -> Path:
        folder = tmp_path_factory.mktemp("int4")
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 2}
        save_llama(folder / "plain", family="Qwen2", **sizes)
        save_packed(folder / "plain", folder / "teacher", layout, **{"group": 64, **asked})
        (folder / "heads").mkdir()
        save_file(medusa_tensors(3, 1, tied=False, hidden=128), folder / "heads/medusa_lm_head.safetensors")
        return folder

    return save


def asked(folder: Path, **fields: object) -> BuildRequest:
    return BuildRequest(
        **{
            "model": folder / "teacher",
            "drafter": folder / "heads",
            "trees": TREES,
            "slots": (128,),
            "prefill_rows": (32,),
            "targets": ("ge",),
            "precision": "nbits",
            **fields,
        }
    )


@pytest.fixture(scope="module")
def bundle(packed: Packed) -> Bundle:
    folder = packed()
    build(asked(folder), folder / "bundle")
    return Bundle.open(folder / "bundle")


def test_graphs_keep_four_bits(bundle: Bundle) -> None:
    graphs = bundle.npu_graphs()
    assert graphs.precision.name == "nbits-fp16" and bundle.manifest.quantised
    for name in ("prefill-t32-kv128", "decode-kv128", "verify-t6-kv128"):
        counts = Graph.load(bundle.folder / f"npu/{name}.air").counts()
        assert counts["WeightQuantBatchMatmulV2"] == 8, name
        assert counts.get("Transpose", 0) <= 1 and "TransposeD" not in counts
    held = bundle_npu_weights(bundle.folder, graphs)
    assert held["layers.1.gate_up.weight"].dtype == torch.int32 and held["layers.1.gate_up.weight"].shape == (128, 64)
    assert held["layers.0.qkv.weight_scale"].shape == held["layers.0.qkv.weight_offset"].shape == (2, 256)


@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        ("awq", {}),
        ("gptq", {"symmetric": True}),
        ("compressed-tensors", {"dtype": torch.bfloat16}),
        ("compressed-tensors", {"group": -1}),
        ("auto_round", {"group": 128}),
    ],
)
def test_weights_are_the_checkpoints_number_by_number(packed: Packed, layout: str, fields: dict) -> None:
    folder = packed(layout, **fields)
    exact = Checkpoint.open(folder / "teacher")
    found = in_precision(exact, "nbits", npu=True)
    # If all inputs of a row would be one group of 128, it is two of 64.
    per_row = fields.get("group", 64) in (-1, 128)
    assert {one.group for one in found.config.packed} == ({64, 128} if per_row else {64})
    for one in found.config.packed:
        weights = {kind: found.weight(f"{one.name}.{kind}") for kind in ("weight", "weight_scale")}
        offset = found.weight(f"{one.name}.weight_offset") if one.zeros else None
        assert one.zeros != fields.get("symmetric", False)
        got = matrix(weights["weight"], weights["weight_scale"], offset)
        assert torch.equal(got.t(), exact.weight(f"{one.name}.weight")), one.name


def test_check_holds_the_graphs_against_eager_and_catches_every_fault(bundle: Bundle) -> None:
    report = check(bundle, [np.arange(3, 30)])
    assert report["ok"], [c for c in report["comparisons"] if not c["ok"]] + report["controls"]


def texts(bundle: Bundle, prompt: list[int], tokens: int) -> list[set[tuple[int, ...]]]:
    """Greedy and sampled, of plain decoding and every tree."""
    engine, found = open_engine(bundle, Opening(engine="ge")), []
    for sampling in (Sampling(), Sampling(temperature=0.8, seed=3)):
        options = Options(max_new_tokens=tokens, ignore_eos=True, sampling=sampling)
        gears = (None, *(gear.name for gear in bundle.manifest.gears if gear.draft))
        runs = (Decoding(engine, prompt, options, FixedTree(bundle, gear)).run() for gear in gears)
        found.append({tuple(run.token_ids) for run in runs})
    return found


def test_every_tree_gives_the_plain_text(bundle: Bundle) -> None:
    assert [len(found) for found in texts(bundle, [3, 5, 7], 24)] == [1, 1]


def test_the_graph_of_a_device_is_the_one_that_was_proved(bundle: Bundle) -> None:
    """Compiled as for a device with deterministic sums, and compared with the file."""
    before = torch.are_deterministic_algorithms_enabled()
    try:
        executor = TorchairExecutor(bundle.folder, bundle.manifest, device="cpu", eagerly=True)
        assert torch.are_deterministic_algorithms_enabled()
        graph = next(graph for graph in bundle.manifest.graphs_of("ge") if graph.kind == "verify")
        inputs = [torch.zeros(spec.shape, dtype=DTYPES[spec.dtype]) for spec in graph.inputs]
        executor.compiled(graph).compiled(*inputs)
    finally:
        torch.use_deterministic_algorithms(before)
    lines = [line for line in (bundle.folder / "npu/atc.sh").read_text().splitlines() if line.startswith("atc ")]
    assert lines and all("--deterministic=1" in line for line in lines)


@pytest.mark.slow
def test_a_trained_teacher_in_four_bits(tmp_path: Path) -> None:
    save_packed(fixtures.TEACHER, tmp_path / "teacher", "awq", group=64)
    request = asked(tmp_path, drafter=fixtures.EAGLE3, slots=(256,))
    build(request, tmp_path / "bundle")
    bundle = Bundle.open(tmp_path / "bundle")
    report = check(bundle, [np.arange(3, 30)])
    assert report["ok"], [c for c in report["comparisons"] if not c["ok"]] + report["controls"]
    assert [len(found) for found in texts(bundle, [3, 5, 7, 11], 64)] == [1, 1]


def test_graphs_without_weights_are_bound_to_a_checkpoint_later(packed: Packed, bundle: Bundle) -> None:
    folder = packed()
    build(asked(folder, weights="none", drafter=None, trees=TREES[:1], prefill_rows=()), folder / "bundle")
    with pytest.raises(CheckpointError, match="packed is"):
        bind(folder / "bundle", packed(layout="gptq", symmetric=True) / "teacher", None)
    bind(folder / "bundle", folder / "teacher", None)
    opened = Bundle.open(folder / "bundle")
    got, want = (bundle_npu_weights(one.folder, one.npu_graphs()) for one in (opened, bundle))
    assert all(torch.equal(value, want[name]) for name, value in got.items())


@pytest.mark.slow
def test_the_output_matrix_in_eight_bits(packed: Packed) -> None:
    """Besides layers of four bits; rounded when the weights are bound, too, and trees give the plain text."""
    folder = packed()
    build(asked(folder, precision="nbits-head"), folder / "bundle")
    bundle = Bundle.open(folder / "bundle")
    for name in ("decode-kv128", "verify-t6-kv128"):
        counts = Graph.load(bundle.folder / f"npu/{name}.air").counts()
        assert counts["WeightQuantBatchMatmulV2"] == 8 and counts["QuantBatchMatmulV3"] == 1, name
    assert [len(found) for found in texts(bundle, [3, 5, 7], 24)] == [1, 1]
    report = check(bundle, [np.arange(3, 30)])
    assert report["ok"], [c for c in report["comparisons"] if not c["ok"]] + report["controls"]
    fields = {"weights": "none", "drafter": None, "trees": TREES[:1], "prefill_rows": ()}
    build(asked(folder, precision="nbits-head", **fields), folder / "later")
    bind(folder / "later", folder / "teacher", None)
    later = Bundle.open(folder / "later")
    held, bound = (bundle_npu_weights(one.folder, one.npu_graphs()) for one in (bundle, later))
    assert held["lm_head.weight"].dtype == torch.int8 and torch.equal(held["lm_head.weight"], bound["lm_head.weight"])


def test_trees_that_another_kernel_would_take_are_refused(packed: Packed, tmp_path: Path) -> None:
    wide = (("plain", Topology.plain()), ("wide", Topology.full((8,))))
    folder = packed()
    with pytest.raises(RequestError, match="tree wide: 9 rows a launch; expected at most 8 with --precision nbits"):
        build(asked(folder, trees=wide), tmp_path / "bundle")
    with pytest.raises(RequestError, match="packed in four bits with groups of a multiple of 64 inputs"):
        build(asked(packed(group=32)), tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("name", "precision", "step_ms"),
    [
        ("openpangu-embedded-7b-w4", "nbits", 6.18),
        ("openpangu-embedded-7b-w4", "nbits-head", 5.59),
        ("qwen3-8b-awq", "nbits", 6.67),
        ("qwen3-8b-awq", "nbits-head", 6.08),
    ],
)
def test_a_teacher_of_7b_is_four_bits_as_a_description(name: str, precision: Precision, step_ms: float) -> None:
    config = in_precision(Checkpoint.describe(resolve(f"shape:{name}")), precision, npu=True).config
    assert len(config.packed) == 4 * config.layers and {one.group for one in config.packed} == {128}
    assert 1e3 * step_s(device("ascend-910b3"), config, 13, 1024) == pytest.approx(step_ms, abs=0.01)
