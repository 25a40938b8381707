"""The ONNX files: standard, silent about the place of their build, and equal to the eager modules in onnxruntime."""

import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor

import draftwood
from draftwood.compiler.bundle import build as writer
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.bundle.sources import Sources
from draftwood.compiler.checkpoints.weight import WeightEntry
from draftwood.compiler.drafters.medusa.network import MedusaHeads, medusa_step
from draftwood.compiler.onnx.lowering import lower_to_onnx
from draftwood.compiler.onnx.weights import write_weights
from draftwood.compiler.steps.any_size import cpu_step
from draftwood.compiler.steps.prefill import prefill_step
from draftwood.compiler.steps.step import Step, StepSizes
from draftwood.compiler.steps.tracing import trace
from draftwood.compiler.steps.verify import verify_step
from draftwood.compiler.targets import onnx as target
from draftwood.trees import Topology, TreeBuffers, tensorize

# fp32 against fp32 in onnxruntime's order of additions and with its exp; logits up to 5. Measured: 4e-6 at most.
RUNTIME = 1e-4

PACKAGE = Path(draftwood.__file__).parent
SIZES = StepSizes(branch_rows=7, path_rows=4)
RAGGED = tensorize(Topology.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)]))
PLAIN = tensorize(Topology.plain())
STATIC = ("prefill-t32-kv128", "decode-kv128", "verify-t7-kv128")
ANY_SIZE = ("step", "grouped")


@pytest.fixture(scope="module")
def steps(built: Any) -> dict[str, Step]:
    decoder = built.decoder
    made = (
        verify_step(decoder, SIZES, 7, 128),
        verify_step(decoder, SIZES, 1, 128),
        prefill_step(decoder, SIZES, 32, 128),
        cpu_step(decoder),
        medusa_step(built.heads, decoder, 10),
    )
    return {step.signature.name: step for step in made}


@pytest.fixture(scope="module")
def session(built: Any) -> Callable[[str], onnxruntime.InferenceSession]:
    @cache
    def opened(name: str) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.use_per_session_threads, options.log_severity_level = False, 3  # the pool of tests/conftest.py
        path = built.folder / "onnx" / f"{name}.onnx"
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    return opened


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def static_inputs(tree: TreeBuffers | None, committed: int, path: tuple[int, ...]) -> dict[str, Tensor]:
    """Inputs of a verify step, or of a 32-row prefill where there is no tree."""
    rows = tree.rows if tree else 32
    tokens = torch.randint(0, 101, (rows,), generator=torch.Generator().manual_seed(1))
    shape = {"depths": tree.depths, "visible": tree.mask} if tree else {"last": [rows - 5]}
    warm = float(committed > 0)
    return {
        "tokens": tokens,
        **{name: torch.tensor(value) for name, value in shape.items()},
        "committed": torch.tensor([committed]),
        "accepted": torch.tensor([len(path)]),
        "path": torch.tensor((*path, 0, 0, 0, 0)[:4]),
        "branch": noise(2, 2, 7, 2, 16, seed=2) * warm,
        **{f"{side}_cache.{i}": noise(256, 16, seed=3 + i) * warm for i in range(2) for side in ("key", "value")},
    }


def symbolic_inputs(tree: TreeBuffers, committed: int, slots: int) -> dict[str, Tensor]:
    """A row that is alone stands in attention twice."""
    rows, count = tree.rows, max(tree.rows, 2)
    seen, order = committed + count, torch.arange(rows)
    bias = torch.zeros(1, 1, count, seen)
    bias[0, 0, :rows, committed : committed + rows][~torch.tensor(tree.mask)] = -1e38
    depths, idle = torch.tensor(tree.depths), torch.arange(rows, count)
    shape, warm = (1, 2, slots, 16), float(committed > 0)
    return {
        "rows": order[-3:],
        "tokens": torch.randint(0, 101, (rows,), generator=torch.Generator().manual_seed(1)),
        "queries": torch.cat((order, idle - 1))[None],
        "results": torch.stack((torch.zeros_like(order), order), 1),
        "positions": committed + torch.cat((depths, idle))[None],
        "bias": bias,
        "last": torch.tensor([seen - 1], dtype=torch.int32),
        "total": torch.tensor(seen, dtype=torch.int32),
        **{f"{side}_cache.{i}": noise(*shape, seed=3 + i) * warm for i in range(2) for side in ("key", "value")},
    }


def both(step: Step, session: onnxruntime.InferenceSession, inputs: dict[str, Tensor]) -> dict[str, tuple]:
    """Output name -> (onnxruntime's, the eager module's)."""
    ours = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    theirs = step.module(*inputs.values())
    names = [spec.name for spec in step.signature.outputs]
    return {name: (a, b.numpy()) for name, a, b in zip(names, ours, theirs, strict=True)}


def assert_equal(pairs: dict[str, tuple], seen: int | None = None) -> None:
    for name, (ours, theirs) in pairs.items():
        if "_cache" in name and seen is not None:  # later slots are undefined unless the buffer is shared
            ours, theirs = ours[:, :, :seen], theirs[:, :, :seen]
        if ours.dtype == np.int64:
            assert np.array_equal(ours, theirs), name
        else:
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=RUNTIME, err_msg=name)


STATES = pytest.mark.parametrize(
    ("committed", "path"), [(0, ()), (20, ()), (20, (2, 5)), (20, (1, 2, 4, 6))], ids=["cold", "P=0", "P=2", "P=4"]
)


@STATES
@pytest.mark.parametrize("tree", [None, PLAIN, RAGGED], ids=["prefill", "decode", "verify"])
def test_static_graph(
    steps: dict[str, Step], session: Callable, tree: TreeBuffers | None, committed: int, path: tuple[int, ...]
) -> None:
    name = {None: STATIC[0], 1: STATIC[1], 7: STATIC[2]}[tree and tree.rows]
    assert_equal(both(steps[name], session(name), static_inputs(tree, committed, path)))


@pytest.mark.parametrize("slots", [128, 256])
@pytest.mark.parametrize(
    ("tree", "committed"),
    [(PLAIN, 0), (PLAIN, 20), (tensorize(Topology.chain(4)), 0), (RAGGED, 1), (RAGGED, 20)],
    ids=["T=1 cold", "T=1", "chain cold", "T=7 behind one token", "T=7"],
)
def test_symbolic_graph(
    steps: dict[str, Step], session: Callable, tree: TreeBuffers, committed: int, slots: int
) -> None:
    inputs = symbolic_inputs(tree, committed, slots)
    assert_equal(both(steps["step"], session("step"), inputs), seen=committed + tree.rows)


def test_the_static_and_the_symbolic_graph_agree(session: Callable) -> None:
    static, symbolic = static_inputs(RAGGED, 20, ()), symbolic_inputs(RAGGED, 20, 128)
    symbolic["rows"] = torch.arange(7)
    for name in ("key_cache.0", "value_cache.0", "key_cache.1", "value_cache.1"):
        symbolic[name] = static[name].view(1, 2, 128, 16)
    outputs = [
        session(name).run(["logits"], {key: tensor.numpy() for key, tensor in inputs.items()})[0]
        for name, inputs in ((STATIC[2], static), ("step", symbolic))
    ]
    np.testing.assert_allclose(outputs[0], outputs[1], rtol=0, atol=RUNTIME)


def test_a_wrong_mask_shows(steps: dict[str, Step], session: Callable) -> None:
    inputs = static_inputs(RAGGED, 20, (2, 5))
    right = steps[STATIC[2]].module(*inputs.values())[0]
    inputs["visible"] = torch.ones(7, 7, dtype=torch.bool).tril()
    wrong = session(STATIC[2]).run(["logits"], {name: tensor.numpy() for name, tensor in inputs.items()})[0]
    assert np.abs(wrong - right.numpy()).max() > 1000 * RUNTIME


@pytest.mark.parametrize("name", [*STATIC, "step"])
def test_shared_buffers_give_the_same(session: Callable, name: str) -> None:
    tree = {STATIC[0]: None, STATIC[1]: PLAIN}.get(name, RAGGED)
    inputs = symbolic_inputs(RAGGED, 20, 128) if name == "step" else static_inputs(tree, 20, (2, 5))
    apart = session(name).run(None, {key: tensor.numpy() for key, tensor in inputs.items()})
    outputs = [node.name for node in session(name).get_outputs()]
    values = {key: onnxruntime.OrtValue.ortvalue_from_numpy(tensor.numpy().copy()) for key, tensor in inputs.items()}
    binding = session(name).io_binding()
    for key, value in values.items():
        binding.bind_ortvalue_input(key, value)
    for output in outputs:
        shared = values.get(output.removesuffix(".out")) if "_cache" in output else None
        binding.bind_output(output) if shared is None else binding.bind_ortvalue_output(output, shared)
    session(name).run_with_iobinding(binding)
    for output, wanted, got in zip(outputs, apart, binding.copy_outputs_to_cpu(), strict=True):
        seen = 27 if name == "step" and "_cache" in output else None
        assert np.array_equal(got[:, :, :seen] if seen else got, wanted[:, :, :seen] if seen else wanted), output
        if "_cache" in output:
            assert np.array_equal(values[output.removesuffix(".out")].numpy(), got)
            assert not np.array_equal(got, inputs[output.removesuffix(".out")])


def test_draft_graph(steps: dict[str, Step], session: Callable) -> None:
    levels = steps["draft"].signature.inputs[1].shape
    inputs = {"features": noise(1, 64, seed=7), "noise": noise(*levels, seed=9)}
    assert_equal(both(steps["draft"], session("draft"), inputs))


@pytest.mark.parametrize("name", [*STATIC, *ANY_SIZE, "draft"])
def test_the_file_is_valid_opset_18(built: Any, name: str) -> None:
    path = built.folder / "onnx" / f"{name}.onnx"
    onnx.checker.check_model(str(path), full_check=name not in ANY_SIZE)  # onnx infers no shapes of contrib operators
    model = onnx.load(path, load_external_data=False)
    domains = {entry.domain: entry.version for entry in model.opset_import}
    assert domains == ({"": 18, "com.microsoft": 1} if name in ANY_SIZE else {"": 18})
    assert not model.functions
    contrib = {node.op_type for node in model.graph.node if node.domain}
    own = {"GroupQueryAttention", "SkipSimplifiedLayerNormalization", "QuickGelu"}
    assert contrib == (own if name in ANY_SIZE else set())


@pytest.mark.parametrize("name", [*STATIC, *ANY_SIZE, "draft"])
def test_names_and_shapes_are_the_signature(built: Any, name: str) -> None:
    model = onnx.load(built.folder / "onnx" / f"{name}.onnx", load_external_data=False)
    signature = next(graph for graph in built.manifest.graphs_of("onnx") if graph.name == name)
    kinds = {"int64": 7, "int32": 6, "bool": 9, "float32": 1}
    for values, specs in ((model.graph.input, signature.inputs), (model.graph.output, signature.outputs)):
        described = []
        for value in values:
            tensor = value.type.tensor_type
            sizes = tuple(size.dim_param or size.dim_value for size in tensor.shape.dim)
            described.append((value.name, tensor.elem_type, sizes))
        assert described == [(spec.name, kinds[spec.dtype], spec.shape) for spec in specs]


@pytest.mark.parametrize("name", STATIC)
def test_a_cache_is_written_once_and_read_through_the_write(built: Any, name: str) -> None:
    graph = onnx.load(built.folder / "onnx" / f"{name}.onnx", load_external_data=False).graph
    writes = [node for node in graph.node if node.op_type == "ScatterND"]
    assert len(writes) == 4
    for output in graph.output[-4:]:
        given = output.name.removesuffix(".out")
        users = [node for node in graph.node if given in node.input]
        assert [node.op_type for node in users] == ["ScatterND"] and users[0].input[0] == given
        assert list(users[0].output) == [output.name]


def test_the_symbolic_graph_writes_in_its_attention(built: Any) -> None:
    graph = onnx.load(built.folder / "onnx" / "step.onnx", load_external_data=False).graph
    attention = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    caches = [output.name for output in graph.output[-4:]]
    assert [name for node in attention for name in node.output[1:]] == caches
    assert [name for node in attention for name in node.input[3:5]] == [c.removesuffix(".out") for c in caches]
    assert sum(set(node.input) & {c.removesuffix(".out") for c in caches} != set() for node in graph.node) == 2


@pytest.mark.parametrize("name", [*STATIC, *ANY_SIZE, "draft"])
def test_weights_are_referred_to_not_stored(built: Any, name: str) -> None:
    graph = onnx.load(built.folder / "onnx" / f"{name}.onnx", load_external_data=False).graph
    outside = [tensor for tensor in graph.initializer if tensor.external_data]
    inside = [tensor for tensor in graph.initializer if not tensor.external_data]
    inside += [attribute.t for node in graph.node for attribute in node.attribute if attribute.HasField("t")]
    halves = [[128, 8]] * 2 if name in ANY_SIZE else []  # of tables that are small, as here, the half that is read
    assert [list(t.dims) for t in inside if t.data_type == onnx.TensorProto.FLOAT and np.prod(t.dims) > 1] == halves
    content = (built.folder / "onnx" / "weights.safetensors").read_bytes()
    weights = built.decoder.state_dict() | built.heads.state_dict()
    for tensor in outside:
        where = {entry.key: entry.value for entry in tensor.external_data}
        assert where["location"] == "weights.safetensors"
        at, length = int(where["offset"]), int(where["length"])
        ours = tensor.name.removeprefix("decoder.").removeprefix("drafter.")
        values = np.frombuffer(content[at : at + length], np.float32).reshape(tuple(tensor.dims))
        assert np.array_equal(values, weights[ours])
    assert len(outside) == (9 if name == "draft" else len(built.decoder.state_dict()) - len(halves))


@pytest.mark.parametrize("name", [*STATIC, *ANY_SIZE, "draft"])
def test_no_trace_of_the_builder(built: Any, name: str) -> None:
    content = (built.folder / "onnx" / f"{name}.onnx").read_bytes()
    # Lines of this package, below its own folder, are no such trace.
    for word in (b"site-packages", b"File ", b"/home", b"/work", b"/tmp", b"pkg.torch", str(Path.cwd()).encode()):
        assert word not in content, word


@pytest.mark.parametrize("name", [*STATIC, *ANY_SIZE, "draft"])
def test_nodes_are_named_by_their_lines(built: Any, name: str) -> None:
    """A refusal of a node then names its source."""
    graph = onnx.load(built.folder / "onnx" / f"{name}.onnx", load_external_data=False).graph
    places = [re.search(r"@([a-z0-9_/]+\.py):(\d+)$", node.name) for node in graph.node]
    found = [(PACKAGE / place[1], int(place[2])) for place in places if place]
    assert len(found) > len(places) / 2
    assert all(0 < line <= len(file.read_text().splitlines()) for file, line in found)


@pytest.mark.parametrize("teacher_tied", [True, False], ids=["embedding", "lm_head"])
def test_tied_heads_use_the_output_matrix_of_the_teacher(
    tmp_path: Path, save_llama: Callable, load_decoder: Callable, teacher_tied: bool
) -> None:
    save_llama(tmp_path, tie_word_embeddings=teacher_tied)
    decoder = load_decoder(tmp_path, 8)
    step = medusa_step(MedusaHeads(64, 101, 2, 1, tied=True).requires_grad_(False), decoder, 5)
    tensors = {**decoder.state_dict(), **step.module.drafter.state_dict()}
    entries = [WeightEntry(n, tuple(t.shape), lambda t=t: t) for n, t in tensors.items()]
    spans = write_weights(tmp_path / "w", entries)
    lower_to_onnx(step, trace(step), spans, "w", tmp_path / "draft.onnx")
    hidden = noise(1, 64, seed=7)
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = False  # the pool of tests/conftest.py
    session, levels = onnxruntime.InferenceSession(tmp_path / "draft.onnx", options), noise(2, 101, seed=9)
    got = session.run(None, {"features": hidden.numpy(), "noise": levels.numpy()})
    tokens, scores = step.module(hidden, levels)
    assert np.array_equal(got[0], tokens)
    np.testing.assert_allclose(got[1], scores, rtol=0, atol=RUNTIME)
    model = onnx.load(tmp_path / "draft.onnx", load_external_data=False)
    offsets = [int(e.value) for t in model.graph.initializer for e in t.external_data if e.key == "offset"]
    assert spans["embed.weight" if teacher_tied else "lm_head.weight"].offset in offsets


def test_int8_drafts_open_where_onnxruntime_makes_uint8_of_their_weights(
    tiny_teacher: Path, tiny_eagle3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on processors without VNNI: the levels of a draft read one output matrix."""
    trees = (("plain", Topology.plain()), ("chain-3", Topology.chain(3)))
    request = BuildRequest(
        model=tiny_teacher, drafter=tiny_eagle3, trees=trees, slots=(128,), prefill_rows=(32,), int8_drafter=True
    )
    drafts = target.draft_steps
    monkeypatch.setattr(target, "static_steps", lambda *_: ())  # nothing but drafts of any size is looked at
    monkeypatch.setattr(target, "draft_steps", lambda *given: () if given[-1] else drafts(*given))
    writer._lower("onnx", tmp_path, request, Sources.open(request), lambda _: None)
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads, options.log_severity_level = False, 3
    options.add_session_config_entry("session.x64quantprecision", "1")
    path = tmp_path / "onnx" / "draft-chain-3.onnx"
    levels = [
        node for node in onnx.load(path, load_external_data=False).graph.node if node.op_type == "MatMulIntegerToFloat"
    ]
    assert len(levels) > 3 and len({node.input[1] for node in levels}) == len(levels)
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "fasteagle"])
def test_graphs_of_several_texts_multiply_with_a_weight_once(kind: str, tiny_bundles: dict[str, Path]) -> None:
    folder = tiny_bundles[kind] / "onnx"
    several = [folder / "grouped-b4.onnx", *sorted(folder.glob("draft*-b4.onnx"))]
    assert len(several) > 1
    for path in several:
        alone, four = (products(each) for each in (path.with_stem(path.stem.removesuffix("-b4")), path))
        assert alone == four and alone >= 3


def test_a_step_of_several_texts_has_an_attention_of_each_and_orders_rows_once(tiny_bundles: dict[str, Path]) -> None:
    folder = tiny_bundles["medusa"] / "onnx"
    alone, four = (
        Counter(node.op_type for node in onnx.load(folder / name, load_external_data=False).graph.node)
        for name in ("grouped.onnx", "grouped-b4.onnx")
    )
    layers = alone["GroupQueryAttention"]
    assert layers > 1 and alone["GatherND"] == 2 * layers and alone["Gather"] == 3  # tokens, and logits' rows twice
    assert four["GroupQueryAttention"] == 4 * layers and four["Gather"] == 4 + 2
    assert four["GatherND"] == (4 + 1) * layers  # the results of all attentions are put in order at once


def products(path: Path) -> int:
    """Products with a weight."""
    graph = onnx.load(path, load_external_data=False).graph
    weights = {one.name for one in graph.initializer}
    return sum(node.op_type in ("MatMul", "Gemm") and node.input[1] in weights for node in graph.node)
