"""A four-bit checkpoint becomes a bundle of its exact product, of its packed layers or in W8A8: in each precision
speculative text is plain text."""

import json
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.checkpoints.int8 import rounded
from draftwood.compiler.ge.weights import bundle_npu_weights
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.conversion import in_precision
from draftwood.compiler.teachers.registry import make_decoder
from draftwood.errors import RequestError, TreeError
from draftwood.kernels.nbits import BLOCK
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding
from draftwood.runtime.engines.choice import default_engine, open_engine
from draftwood.runtime.engines.opening import Opening
from draftwood.runtime.engines.qnn import PROVIDER
from draftwood.runtime.options import Options
from draftwood.runtime.policy import FixedTree
from draftwood.runtime.rounding import QUANTISED_TOLERANCE
from draftwood.runtime.sharing import advance
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.tests import fixtures
from draftwood.tests.packed_checkpoints import save_packed
from draftwood.tools.comparison.check import check, sample_prompts
from draftwood.tools.comparison.compare import Pair, compare_gear
from draftwood.tools.reference.eager import EagerEngine
from draftwood.trees import Topology

RAGGED = Topology.from_paths(((0,), (1,), (0, 0), (0, 1), (1, 0)))
TREES = (("plain", Topology.plain()), ("ragged", RAGGED))
LAYOUTS = ("awq", "gptq", "gptq_v2", "auto_round", "compressed-tensors")


def bundled(teacher: Path, drafter: Path | None, folder: Path, trees: tuple = TREES, **fields: object) -> Bundle:
    asked = {"slots": (256,), "prefill_rows": (32,), **fields}
    build(BuildRequest(model=teacher, drafter=drafter, trees=trees, **asked), folder)
    return Bundle.open(folder)


def assert_texts_alike(bundle: Bundle, prompt: list[int], tokens: int, name: str | None = None) -> None:
    engine = open_engine(bundle, Opening(engine=name))
    for sampling in (Sampling(), Sampling(temperature=0.8, seed=3)):
        options = Options(max_new_tokens=tokens, ignore_eos=True, sampling=sampling)
        gears = (None, *(gear.name for gear in bundle.manifest.gears))
        texts = {Decoding(engine, prompt, options, FixedTree(bundle, gear)).run().token_ids for gear in gears}
        assert len(texts) == 1 and len(texts.pop()) == tokens


@pytest.fixture(scope="module")
def one_layer(save_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a second layer would be traced for nothing."""
    return save_tiny(tmp_path_factory.mktemp("one"), num_hidden_layers=1)


def test_a_bundle_keeps_the_exact_product(one_layer: Path, tiny_heads: Path, tmp_path: Path) -> None:
    numbers = save_packed(one_layer, tmp_path / "packed", "awq")
    bundle = bundled(tmp_path / "packed", tiny_heads, tmp_path / "bundle", prefill_rows=())
    stored = load_file(bundle.folder / "onnx/weights.safetensors")
    sides = [numbers[f"model.layers.0.self_attn.{side}_proj"].exact for side in "qkv"]
    assert torch.equal(stored["layers.0.qkv.weight"].double(), torch.cat(sides)) and not bundle.manifest.quantised
    assert all(comparison["ok"] for comparison in check(bundle, [np.arange(3, 30)])["comparisons"])
    assert_texts_alike(bundle, [3, 5, 7], 30)


def test_weights_for_an_npu_are_those_that_other_programs_round(one_layer: Path, tmp_path: Path) -> None:
    numbers = save_packed(one_layer, tmp_path / "packed", "gptq")
    bundle = bundled(tmp_path / "packed", None, tmp_path / "bundle", TREES[:1], targets=("ge",), prefill_rows=())
    graphs = bundle.manifest.graph_set("ge")
    assert graphs is not None and graphs.precision.weights == "float16"
    found = bundle_npu_weights(bundle.folder, graphs)["layers.0.down.weight"]
    assert torch.equal(found, numbers["model.layers.0.mlp.down_proj"].exact.half())


TRAINED = [*((layout, "exact") for layout in LAYOUTS), ("awq", "nbits"), ("compressed-tensors", "w8a8")]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "precision"), TRAINED)
def test_a_trained_teacher_in_every_layout(layout: str, precision: str, tmp_path: Path) -> None:
    save_packed(fixtures.TEACHER, tmp_path / "packed", layout, group=64)
    trees = (("plain", Topology.plain()), ("full", Topology.full((3, 2, 1))))
    drafter = fixtures.EAGLE3
    bundle = bundled(tmp_path / "packed", drafter, tmp_path / "bundle", trees, precision=precision)
    report = check(bundle, [np.arange(3, 30)])
    assert all(c["ok"] for c in report["comparisons"]) and all(c["caught"] for c in report["controls"])
    assert_texts_alike(bundle, [3, 5, 7, 11], 96)


@pytest.fixture(scope="module")
def four_bits(tiny_teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With zeros, in groups of 32."""
    folder = tmp_path_factory.mktemp("four") / "teacher"
    save_packed(tiny_teacher, folder, "awq")
    return folder


# In W8A8 such a teacher is that of tests/runtime/engines/test_companions.py, and another that of test_quantised.
@pytest.fixture(scope="module", params=["nbits", pytest.param("w8a8", marks=pytest.mark.slow)])
def kept(
    request: pytest.FixtureRequest, four_bits: Path, tiny_heads: Path, tmp_path_factory: pytest.TempPathFactory
) -> Bundle:
    folder = tmp_path_factory.mktemp(request.param) / "bundle"
    return bundled(four_bits, tiny_heads, folder, precision=request.param)


def test_every_tree_gives_the_plain_text_of_its_precision(kept: Bundle) -> None:
    assert default_engine(kept) == "bitwise" and kept.manifest.quantised
    assert_texts_alike(kept, [3, 5, 7], 60)


def test_a_plain_step_has_the_bits_of_a_tree(kept: Bundle) -> None:
    """However a processor sums a row that is alone."""
    engine = open_engine(kept, Opening(engine="cpu"))
    rows = dict[str, list[np.ndarray]]()
    for gear in kept.manifest.gears:
        state = engine.begin(256)
        engine.prefill(state, np.arange(9))
        rows[gear.name] = []
        for token in range(20, 24):
            state.root = token
            drafts = engine.draft([state], [gear])
            (output,) = engine.verify([state], drafts)
            rows[gear.name].append(output.logits_RV[0].view(np.int32).copy())
            state.branched(drafts[0].tokens_T, output.features_RF)
            state.commit([0])
    plain, *others = rows.values()
    assert others and all(np.array_equal(plain, one) for one in others)


@pytest.fixture(scope="module")
def plain(tiny_teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Of a teacher that nobody has packed; its steps are all of one row."""
    folder = tmp_path_factory.mktemp("plain") / "bundle"
    return bundled(tiny_teacher, None, folder, TREES[:1], precision="nbits", texts=2)


def test_a_text_has_the_bits_alone_that_it_has_beside_another(plain: Bundle) -> None:
    engine = open_engine(plain)
    (gear,) = engine.bundle.manifest.gears
    states = [engine.begin(256) for _ in range(2)]
    for state in states:
        engine.prefill(state, np.arange(9))
        state.root = 20
    bits = [
        engine.verify(some, engine.draft(some, [gear] * len(some)))[0].logits_RV.view(np.int32).copy()
        for some in (states[:1], states)
    ]
    assert np.array_equal(*bits)


def test_graphs_of_several_texts_that_nothing_would_run_are_refused(
    four_bits: Path, tiny_heads: Path, tmp_path: Path
) -> None:
    with pytest.raises(TreeError, match=r"tree ragged: branches.*for 2 texts give chains"):
        bundled(four_bits, tiny_heads, tmp_path / "bundle", precision="nbits", texts=2)
    assert not (tmp_path / "bundle").exists()


def test_check_compares_every_graph_with_eager_pytorch(kept: Bundle) -> None:
    report = check(kept, [np.arange(3, 30)])
    assert all(c["ok"] for c in report["comparisons"]), [c for c in report["comparisons"] if not c["ok"]]
    # Of random heads a wrong token moves scores by less than the rounding of rows may.
    assert {c["fault"] for c in report["controls"] if not c["caught"]} <= {"token before the root in its place"}


def test_the_output_matrix_in_eight_bits(save_llama: Callable, tmp_path: Path) -> None:
    """One that was the embedding gets numbers of its own."""
    save_llama(tmp_path / "plain", tie_word_embeddings=True, num_hidden_layers=1)
    save_packed(tmp_path / "plain", tmp_path / "packed", "awq")
    exact = Checkpoint.open(tmp_path / "packed")
    found = in_precision(exact, "nbits-head")
    assert exact.config.tied and not found.config.tied and found.config.quantised == ("lm_head",)
    (whole_OH, scale_O1), got = rounded(exact.weight("embed.weight")), found.weight("lm_head.weight")
    assert torch.equal(got.t(), whole_OH) and torch.equal(found.weight("lm_head.weight_scale"), scale_O1.flatten())
    packed, trees = tmp_path / "packed", TREES[:1]
    bundle = bundled(packed, None, tmp_path / "bundle", trees, precision="nbits-head", prefill_rows=())
    assert all(c["ok"] for c in check(bundle, [np.arange(3, 30)])["comparisons"])
    assert_texts_alike(bundle, [3, 5, 7], 20)


def test_sums_of_blocks_are_made_once_for_several_texts(plain: Bundle) -> None:
    """Which minima are multiplied with: a third of a batch's nodes if each text had its own."""
    one, both = (operators(plain, graph)["ReduceSum"] for graph in ("step", "grouped-b2"))
    assert one == both > 7


@pytest.fixture(scope="module")
def eight_bits(one_layer: Path, save_quantised: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of W8A8, in one layer."""
    return save_quantised(one_layer, tmp_path_factory.mktemp("eight") / "teacher")


@pytest.fixture(scope="module")
def chains(
    four_bits: Path, eight_bits: Path, tiny_heads: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Bundle]:
    """Four bits, and eight of a W8A8 teacher, whose output matrix, which the heads rank with, is in eight bits, too.
    Not the fixture's parameters: pytest would build a bundle for every test."""
    trees, teachers = (*TREES[:1], ("chain", Topology.chain(2))), {"four bits": four_bits, "eight bits": eight_bits}

    @cache
    def of(teacher: str) -> Bundle:
        folder = tmp_path_factory.mktemp("chained") / "bundle"
        return bundled(teachers[teacher], tiny_heads, folder, trees, precision="nbits", texts=2)

    return of


# Of the eight bits the usual run has the numbers, below; the output matrix of four bits is in eight as well.
EIGHT = pytest.param("eight bits", marks=pytest.mark.slow)
OPENVINO, QNN = ("openvino", "openvino", 20), ("qnn", "onnxruntime_qnn", 8)


@pytest.mark.parametrize(("engine", "package", "tokens"), [QNN, OPENVINO])
@pytest.mark.parametrize("teacher", ["four bits", EIGHT])
def test_its_static_graphs_through_other_compilers(
    chains: Callable[[str], Bundle], teacher: str, engine: str, package: str, tokens: int
) -> None:
    """Which keep the weights as they are packed, and round no rows; an HTP's leaves no node to the CPU."""
    pytest.importorskip(package)
    chained = chains(teacher)
    assert_texts_alike(chained, [3, 5, 7], tokens, engine)
    pair = Pair(engine, EagerEngine(chained), open_engine(chained, Opening(engine=engine)), QUANTISED_TOLERANCE)
    found = list(compare_gear(pair, chained.gear("chain-kv256"), np.arange(3, 30)))
    assert [one for one in found if not one.ok] == []
    assert set(pair.engine.nodes) == ({PROVIDER} if engine == "qnn" else set())


@pytest.mark.parametrize("teacher", ["four bits", EIGHT])
def test_chains_in_batches_and_in_static_graphs(chains: Callable[[str], Bundle], teacher: str) -> None:
    bundle = chains(teacher)
    assert default_engine(bundle) == "cpu"
    assert_texts_alike(bundle, [3, 5, 7], 40)
    assert_texts_alike(bundle, [3, 5, 7], 20, "static")
    layers = bundle.manifest.teacher.config["layers"]
    assert products(bundle, "grouped-b2") == products(bundle, "step") > 4 * layers
    assert products(bundle, "draft-b2") == products(bundle, "draft")
    engine, options = open_engine(bundle), Options(max_new_tokens=40, ignore_eos=True)
    prompts, gear = ([3, 5, 7], [11, 13, 17, 19]), FixedTree(bundle, "chain-kv256")
    texts = [Decoding(engine, prompt, options, gear) for prompt in prompts]
    for text in texts:
        text.start()
    while going := [text for text in texts if not text.finished]:
        advance(engine, going)
    for text, prompt in zip(texts, prompts, strict=True):
        text.end()
        assert text.result.token_ids == Decoding(engine, prompt, options, FixedTree(bundle, None)).run().token_ids


def products(bundle: Bundle, graph: str) -> int:
    return operators(bundle, graph)["MatMulNBits"]


def operators(bundle: Bundle, graph: str) -> Counter[str]:
    nodes = onnx.load(bundle.folder / "onnx" / f"{graph}.onnx", load_external_data=False).graph.node
    return Counter(node.op_type for node in nodes)


FAMILIES = [
    ("Llama", {}, "awq", {"group": -1}),
    ("Llama", {}, "gptq", {"symmetric": True, "bits": 8}),
    ("Qwen2", {}, "gptq_v2", {}),
    ("Qwen3", {"head_dim": 16}, "awq", {}),
    ("Mistral", {}, "compressed-tensors", {"group": -1}),
    # Its queries and keys are reordered, and half of a head is rotated.
    ("Glm4", {"head_dim": 24, "pad_token_id": 0}, "auto_round", {}),
]


@pytest.mark.parametrize(("family", "fields", "layout", "asked"), FAMILIES)
def test_packed_layers_are_kept_number_by_number(
    save_llama: Callable, tmp_path: Path, family: str, fields: dict, layout: str, asked: dict
) -> None:
    """A group becomes blocks of the same scale; zeros are left out if they are the middle."""
    save_llama(tmp_path / "plain", family=family, **fields)
    save_packed(tmp_path / "plain", tmp_path / "packed", layout, **asked)
    exact = Checkpoint.open(tmp_path / "packed")
    found = in_precision(exact, "nbits")
    *layers, head = found.config.packed
    # The publishers leave the output matrix unpacked.
    assert len(layers) == 8 and (head.name, head.bits, head.minimum) == ("lm_head", 8, False)
    for layer in layers:
        assert (layer.bits, layer.zeros) == (asked.get("bits", 4), not asked.get("symmetric"))
        assert torch.equal(multiplied(found, layer.name), 127 * exact.weight(f"{layer.name}.weight"))


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_matrices_of_one_layer_may_have_other_groups_or_none(tiny_teacher: Path, tmp_path: Path, bits: int) -> None:
    """Of a layer with a matrix that is not packed, all stayed the exact product in fp32, eight times the bytes."""
    save_packed(tiny_teacher, tmp_path / "packed", "gptq_v2", group=-1)
    save_packed(tiny_teacher, tmp_path / "other", "gptq_v2", bits=min(bits, 8), group=32)
    tensors, name = load_file(tmp_path / "packed/model.safetensors"), "model.layers.0.self_attn.v_proj"
    for kind in ("qweight", "qzeros", "scales", "g_idx"):
        del tensors[f"{name}.{kind}"]
    source = tiny_teacher if bits == 16 else tmp_path / "other"
    tensors |= {
        k: v.half() if v.dtype == torch.float32 else v
        for k, v in load_file(source / "model.safetensors").items()
        if name in k
    }
    save_file(tensors, tmp_path / "packed/model.safetensors")
    config = json.loads((tmp_path / "packed/config.json").read_text())
    config["quantization_config"]["dynamic"] = {f".*{name}": {"bits": bits, "group_size": 32}}
    (tmp_path / "packed/config.json").write_text(json.dumps(config))
    exact = Checkpoint.open(tmp_path / "packed")
    found = in_precision(exact, "nbits")
    assert {layer.name: layer.bits for layer in found.config.packed}["layers.0.qkv"] == (4 if bits == 4 else 8)
    got, want = multiplied(found, "layers.0.qkv"), 127 * exact.weight("layers.0.qkv.weight")
    assert torch.equal(got[:96], want[:96]) and (got - want).abs().max() <= (127 * 0.01 if bits == 16 else 0)


def multiplied(teacher: Checkpoint, layer: str) -> Tensor:
    """A layer's matrix times 127, from rows that rounding changes nothing of."""
    network = make_decoder(teacher.config, 4).get_submodule(layer)
    network.load_state_dict({name: teacher.weight(f"{layer}.{name}") for name in network.state_dict()})
    network.bias = None
    return network(127 * torch.eye(network.weight.shape[1] * BLOCK)).t()


def test_eight_bits_of_a_w8a8_teacher_are_kept_number_by_number(quantised_teacher: Path) -> None:
    exact = Checkpoint.open(quantised_teacher)
    found = in_precision(exact, "nbits")
    assert not found.config.quantised and "lm_head" in exact.config.quantised
    assert [(one.name, one.bits, one.zeros) for one in found.config.packed] == [
        (name, 8, False) for name in exact.config.quantised
    ]
    for name in exact.config.quantised:
        assert torch.equal(multiplied(found, name), 127 * exact.matrix(f"{name}.weight"))


def test_a_w8a8_teacher_of_odd_width_is_not_kept_in_blocks(
    save_tiny: Callable, save_quantised: Callable, tmp_path: Path
) -> None:
    (tmp_path / "odd").mkdir()
    odd = save_tiny(tmp_path / "odd", intermediate_size=100)
    with pytest.raises(RequestError, match=r"layers\.0\.down has 100 inputs; expected a multiple of 32"):
        in_precision(Checkpoint.open(save_quantised(odd, tmp_path / "teacher")), "nbits")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"precision": "nbits", "targets": ("onnx", "ge")},
            "packs weights for one target; expected --target onnx or ge",
        ),
        ({"precision": "w8a8", "targets": ("ge",), "weights": "none"}, "makes weights that no checkpoint holds"),
        ({"precision": "q4"}, "--precision q4: expected one of exact, nbits, nbits8, nbits-head, w8a8"),
    ],
)
def test_what_cannot_be_kept_so_is_refused(four_bits: Path, tmp_path: Path, fields: dict, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        bundled(four_bits, None, tmp_path / "bundle", TREES[:1], **fields)


def test_a_plain_teacher_is_rounded_and_decodes(plain: Bundle) -> None:
    assert {one["bits"] for one in plain.manifest.teacher.config["packed"]} == {4, 8}
    assert check(plain, list(sample_prompts(plain, None, 1)))["ok"]
