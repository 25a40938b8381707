"""The interpreter: whole steps against eager PyTorch, writes and their order, inputs, shapes without weights."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export.graph_signature import InputKind

from draftwood.compiler.drafters.common.steps import TreeStep
from draftwood.compiler.drafters.common.trees import BudgetTree
from draftwood.compiler.drafters.eagle3.network import Eagle3, Eagle3Config
from draftwood.compiler.drafters.medusa.network import MedusaHeads, medusa_step
from draftwood.compiler.ge.graph import Declared, Edge, Graph, Node
from draftwood.compiler.ge.interpreter import Interpreter, shapes
from draftwood.compiler.ge.lowering import lower_to_ge
from draftwood.compiler.ge.operators import BoundNode
from draftwood.compiler.ge.torchair_bridge import convert, ge_ir
from draftwood.compiler.ge.weights import plan_weights
from draftwood.compiler.steps.prefill import prefill_step
from draftwood.compiler.steps.step import Step, StepSizes
from draftwood.compiler.steps.tracing import shapes_only, trace
from draftwood.compiler.steps.verify import verify_step
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.compiler.teachers.registry import family_of
from draftwood.compiler.teachers.rope import rope_tables
from draftwood.errors import BundleError, LoweringError, RequestError

SLOTS, CHUNK, LAYERS, KV_HEADS, HEAD_DIM = 64, 8, 2, 2, 16
# Rows 1 (0,), 2 (1,), 3 (0, 0), 4 (0, 1): who sees whom, and the depth of each.
PARENTS = (-1, 0, 0, 1, 1)
DEPTHS = (0, 1, 1, 2, 2)


class Pair:
    """A tiny teacher in one type, its steps lowered and interpreted, and its eager modules."""

    def __init__(self, folder: Path, load_decoder: Callable[..., Decoder], dtype: torch.dtype) -> None:
        self.dtype = dtype
        decoder = load_decoder(folder, SLOTS).to(dtype)
        torch.manual_seed(3)
        heads = MedusaHeads(decoder.config.hidden, decoder.config.vocabulary, 3, 1, False).to(dtype)
        heads.requires_grad_(False)
        self.weights = dict(decoder.state_dict()) | dict(heads.state_dict())
        sizes = StepSizes(branch_rows=5, path_rows=4, dtype=str(dtype).removeprefix("torch."))

        def steps(form: Any) -> list[Step]:
            return [
                prefill_step(decoder, sizes, CHUNK, SLOTS, form),
                verify_step(decoder, sizes, len(PARENTS), SLOTS, form),
                verify_step(decoder, sizes, 2, SLOTS, form, decode=True),
                medusa_step(heads, decoder, 4, sizes.dtype),
            ]

        kinds = ("prefill", "verify", "decode", "draft")
        shapes_of = {name: tuple(value.shape) for name, value in self.weights.items()}
        parts = {name: part.concatenated for name, part in family_of(decoder.config).parts(decoder.config).items()}
        index = plan_weights(shapes_of, dtype, "weights.bin", parts, {})
        self.eager = dict(zip(kinds, steps("eager"), strict=True))
        self.graphs, self.interpreters = {}, {}
        for kind, step in zip(kinds, steps("fused"), strict=True):
            model = ge_ir().ModelDef.FromString(lower_to_ge(step, trace(step), index))
            self.graphs[kind] = Graph.of(model.graph[0])
            self.interpreters[kind] = Interpreter(self.graphs[kind], self.weights)

    def caches(self) -> list[Tensor]:
        return [torch.zeros(KV_HEADS * SLOTS, HEAD_DIM, dtype=self.dtype) for _ in range(2 * LAYERS)]

    def run(self, kind: str, values: list[Tensor], caches: list[Tensor]) -> list[Tensor]:
        """Interpreted outputs; the caches are written in place."""
        names = [spec.name for spec in self.eager[kind].signature.inputs]
        return self.interpreters[kind].run(dict(zip(names, [*values, *caches], strict=True)))

    def run_eager(self, kind: str, values: list[Tensor], caches: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """(outputs, written caches), the inputs left alone."""
        step = self.eager[kind]
        outputs = list(step.module(*values, *caches))
        plain = len(outputs) - len(step.signature.aliases)
        return outputs[:plain], outputs[plain:]


# In the usual run graphs in fp32 are held against transformers: test_families.
TYPES = [pytest.param(torch.float32, marks=pytest.mark.slow, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]


@pytest.fixture(scope="module", params=TYPES)
def pair(request: pytest.FixtureRequest, tiny_source: Path, load_decoder: Callable[..., Decoder]) -> Pair:
    return Pair(tiny_source, load_decoder, request.param)


def tree_inputs(tokens: Tensor, committed: int, accepted: int, path: Tensor, branch: Tensor) -> list[Tensor]:
    """The inputs of a verify or decode step before its caches."""
    rows = len(tokens)
    visible = torch.zeros(rows, rows, dtype=torch.bool)
    for row in range(rows):
        at = row
        while at >= 0:
            visible[row, at], at = True, PARENTS[at]
    return [
        tokens,
        torch.tensor(DEPTHS[:rows]),
        visible,
        torch.tensor([committed]),
        torch.tensor([accepted]),
        path,
        branch,
    ]


def test_whole_steps_equal_eager_ones(pair: Pair) -> None:
    """Prefill, then trees with commits of 1 to 3 rows, a decode step and a draft; caches are never reset.

    The two run the same kernels in the same order, so bf16 is equal bit for bit. In fp32 GE adds the bias of
    openPangu's linear layers by its own operator. PyTorch's matrix product may round that differently: 2^-24 of each
    sum, through two layers.
    """
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if pair.dtype is torch.float32 else {"rtol": 0.0, "atol": 0.0}
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randint(0, 101, shape, generator=generator)

    caches, wanted = pair.caches(), pair.caches()
    memory = [cache.data_ptr() for cache in caches]
    branch = torch.zeros(LAYERS, 2, 5, KV_HEADS, HEAD_DIM, dtype=pair.dtype)
    branches = branch, branch.clone()
    none = torch.zeros(4, dtype=torch.int64)
    hidden = torch.zeros(1, 64, dtype=pair.dtype)

    def compare(kind: str, values: list[Tensor], eager_values: list[Tensor]) -> list[list[Tensor]]:
        nonlocal wanted
        got = pair.run(kind, values, caches)
        want, wanted = pair.run_eager(kind, eager_values, wanted)
        for have, there in zip([*got, *caches], [*want, *wanted], strict=True):
            torch.testing.assert_close(have, there, **tolerance)
        assert torch.equal(got[1], want[1]), "token ids are equal, whatever the logits' last bits"
        return [got, want]

    chunk = [draw(CHUNK), torch.tensor([CHUNK - 1]), torch.tensor([0]), torch.tensor([0]), none]
    compare("prefill", [*chunk, branches[0]], [*chunk, branches[1]])
    committed = CHUNK
    for accepted, path in ((0, (0, 0, 0, 0)), (3, (0, 1, 3, 0)), (2, (0, 2, 0, 0)), (1, (0, 0, 0, 0))):
        committed += accepted
        tokens = draw(len(PARENTS))
        values = [tree_inputs(tokens, committed, accepted, torch.tensor(path), b) for b in branches]
        got, want = compare("verify", *values)
        branches, hidden = (got[3], want[3]), got[2][:1]
    tokens = draw(2)
    values = [tree_inputs(tokens, committed + 1, 1, none, b) for b in branches]
    compare("decode", *values)
    assert all(cache.abs().sum() > 0 for cache in caches)
    assert [cache.data_ptr() for cache in caches] == memory

    noise = torch.randn(pair.eager["draft"].signature.inputs[1].shape, generator=generator).to(hidden.dtype)
    tokens, scores = pair.interpreters["draft"].run({"features": hidden.clone(), "noise": noise.clone()})
    (tokens_eager, scores_eager), _ = pair.run_eager("draft", [hidden, noise], [])
    assert torch.equal(tokens, tokens_eager)
    # bf16: the converter rounds x - max and the logarithm on their own, 2^-9 of values below 8 each.
    torch.testing.assert_close(scores, scores_eager, rtol=1e-5, atol=1e-5 if pair.dtype is torch.float32 else 2**-4)


def test_a_budget_tree_equals_the_eager_one(tiny_source: Path) -> None:
    """EAGLE-3's attention over cache and branch, and its tree by topk, gather, compare and scatter: equal bits."""
    # A bias is rounded twice.
    block = replace(Checkpoint.open(tiny_source).config, layers=1, qkv_bias=False, o_bias=False)
    config = Eagle3Config(
        block=block,
        target_hidden=64,
        aux_layers=(0, 1, 1),
        draft_vocabulary=40,
        own_embedding=False,
        tied_head=False,
    )
    drafter, decoder = Eagle3(config, SLOTS).requires_grad_(False), Decoder(block, SLOTS).requires_grad_(False)
    torch.manual_seed(2)
    for parameter in (*drafter.parameters(), *decoder.parameters()):
        torch.nn.init.normal_(parameter, std=0.2)
    drafter.teacher_ids.copy_(torch.randperm(101)[:40].sort().values)
    for table, values in zip((drafter.draft_cos, drafter.draft_sin), rope_tables(block, SLOTS), strict=True):
        table.copy_(torch.from_numpy(values))
    eager, fused = (TreeStep(drafter, decoder, BudgetTree(7, 3, 3), form) for form in ("eager", "fused"))
    caches = [torch.zeros(2 * SLOTS, 16), torch.zeros(2 * SLOTS, 16)]
    numbers = torch.tensor([3]), torch.tensor([3])
    inputs = torch.tensor([5, 9, 17, 0]), torch.randn(4, 192), *numbers, torch.randn(3, 40), *caches
    program = torch.export.export(fused, inputs, strict=False)
    lowered = Graph.of(convert(program, {}, "tree"))
    held, given = {**program.state_dict, **program.constants}, iter(inputs)
    values = {
        spec.arg.name: next(given) if spec.kind is InputKind.USER_INPUT else held[spec.target]
        for spec in program.graph_signature.input_specs
    }
    used = {node.name for node in lowered.sources()}
    got = Interpreter(lowered, {}).run({name: value for name, value in values.items() if name in used})
    for have, want in zip(got, eager(*inputs), strict=True):
        assert have.dtype == want.dtype and torch.equal(have, want)


def test_a_step_is_repeatable_and_observed(pair: Pair) -> None:
    """Equal inputs give equal bits; observed are all nodes in order, with what ``shapes`` says of them."""
    graph = pair.graphs["verify"]
    values = tree_inputs(torch.arange(5), 8, 0, torch.zeros(4, dtype=torch.int64), torch.zeros(2, 2, 5, 2, 16))
    values[-1] = values[-1].to(pair.dtype)
    runs, seen = [], {}

    def note(node: Node, outputs: tuple[Tensor, ...]) -> None:
        seen[node.name] = tuple((t.dtype, tuple(t.shape)) for t in outputs)

    names = [node.name for node in graph.sources()]
    for _ in range(2):
        caches = pair.caches()
        out = pair.interpreters["verify"].run(dict(zip(names, [*values, *caches], strict=True)), note)
        runs.append([*out, *caches])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert list(seen) == [name for name in graph.nodes if graph.nodes[name].type != "NetOutput"]
    assert shapes(graph) == seen


def test_shapes_of_a_model_too_large_to_hold(tiny_source: Path) -> None:
    """A layer as wide as openPangu-7B's: 400 MB of weights that are never allocated."""
    config = replace(
        Checkpoint.open(tiny_source).config,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=12800,
        vocabulary=153376,
        layers=1,
    )
    with shapes_only(torch.bfloat16) as mode:
        decoder = Decoder(config, 4096).requires_grad_(False)
    index = plan_weights(
        {name: tuple(value.shape) for name, value in decoder.state_dict().items()}, torch.bfloat16, "w", {}, {}
    )
    step = verify_step(decoder, StepSizes(branch_rows=16, path_rows=8, dtype="bfloat16"), 16, 4096)
    with mode:
        program = trace(step)
    graph = Graph.of(ge_ir().ModelDef.FromString(lower_to_ge(step, program, index)).graph[0])
    found = shapes(graph)
    (attention,) = [name for name, node in graph.nodes.items() if node.type == "FusedInferAttentionScore"]
    assert found[attention][0] == (torch.bfloat16, (1, 32, 16, 128))
    mask = graph.nodes[attention].input("atten_mask")
    assert mask is not None and found[mask.node][mask.output] == (torch.bool, (1, 1, 16, 4096))
    logits = graph.output.operands[0]
    assert logits is not None and found[logits.node][logits.output] == (torch.bfloat16, (16, 153376))


# From here on graphs are built by hand.

F4 = (torch.float32, (4, 2))


def source(name: str, kind: str = "Data", dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (4, 2)) -> Node:
    return Node(name, kind, (), {"index": 0}, (), (Declared("y", dtype, shape),))


def const(name: str, value: Any) -> Node:
    return Node(name, "Const", (), {"value": torch.tensor(value)}, (), (Declared("", None, None),))


def node(name: str, type_: str, operands: str, outputs: int = 1, after: str = "", **attributes: Any) -> Node:
    """``operands``: "x1=a x2=b:1"; ``after``: nodes that it only waits for."""
    edges, described = [Edge(name, -1) for name in after.split()], []
    for text in operands.split():
        operand, _, place = text.partition("=")
        origin, _, output = place.partition(":")
        edges.append(Edge(origin, int(output or 0)))
        described.append(Declared(operand, None, None))
    return Node(name, type_, tuple(edges), attributes, tuple(described), (Declared("y", None, None),) * outputs)


def output(*names: str, declared: tuple[torch.dtype, tuple[int, ...]] = F4, after: str = "") -> Node:
    described = tuple(Declared(f"input{i}", *declared) for i in range(len(names)))
    edges = (*(Edge(name, -1) for name in after.split()), *(Edge(name, 0) for name in names))
    return Node("end", "NetOutput", edges, {}, described, ())


def graph(*nodes: Node) -> Graph:
    return Graph("g", {n.name: n for n in nodes})


CACHE = (source("cache", "RefData"), const("row", [[1]]), const("new", [[7.0, 7.0]]))
WRITE = node("write", "ScatterNdUpdate", "var=cache indices=row updates=new")
ZEROS = [[0.0, 0.0]] * 4
WRITTEN = [[0.0, 0.0], [7.0, 7.0], [0.0, 0.0], [0.0, 0.0]]


def run(*nodes: Node) -> tuple[list[list], list]:
    """(outputs, cache afterwards) from a cache of zeros."""
    cache = torch.zeros(4, 2)
    found = graph(*nodes)
    given = {n.name: cache if n.type == "RefData" else torch.zeros(4, 2) for n in found.sources()}
    return [t.tolist() for t in Interpreter(found, {}).run(given)], cache.tolist()


def test_a_write_goes_into_the_callers_cache() -> None:
    read = node("read", "Neg", "x=write")
    assert run(*CACHE, WRITE, read, output("read")) == ([[[-x for x in row] for row in WRITTEN]], WRITTEN)


def test_a_write_that_nobody_reads_is_done() -> None:
    assert run(*CACHE, WRITE, output("new", declared=(torch.float32, (1, 2)))) == ([[[7.0, 7.0]]], WRITTEN)


def test_an_output_is_no_view_of_the_cache() -> None:
    found = graph(*CACHE, WRITE, output("write"))
    cache = torch.zeros(4, 2)
    (got,) = Interpreter(found, {}).run({"cache": cache})
    cache += 1
    assert got.tolist() == WRITTEN


def test_what_was_read_before_a_write_keeps_its_value() -> None:
    # Transpose gives a view in PyTorch; the write must not reach through it.
    old = node("old", "Transpose", "x=cache perm=turn")
    at = node("at", "ReduceMax", "x=old axes=both", keep_dims=False)  # the write waits for it by its indices
    index = [node("place", "Cast", "x=at", dst_type=9), node("two", "Reshape", "x=place shape=ones")]
    write = node("write", "ScatterNdUpdate", "var=cache indices=two updates=new")
    constants = (const("turn", [1, 0]), const("both", [0, 1]), const("ones", [1, 1]))
    late = node("late", "Transpose", "x=old perm=turn")
    got, cache = run(*CACHE, *constants, old, at, *index, write, late, output("late", "write"))
    assert got == [ZEROS, [[7.0, 7.0], *ZEROS[1:]]] and cache == got[1]


def test_a_reader_of_the_cache_behind_the_write_sees_it() -> None:
    read = node("read", "Neg", "x=cache", after="write")
    (got,), _ = run(*CACHE, WRITE, read, output("read"))
    assert got[1] == [-7.0, -7.0]


def test_two_writes_in_order() -> None:
    second = node("second", "ScatterNdUpdate", "var=write indices=row2 updates=new")
    _, cache = run(*CACHE, const("row2", [[3]]), WRITE, second, output("second"))
    assert cache == [ZEROS[0], WRITTEN[1], ZEROS[0], WRITTEN[1]]


@pytest.mark.parametrize("copy", ["TensorMove", "Identity"])
def test_a_write_into_a_value_of_the_graph_leaves_all_others_alone(copy: str) -> None:
    moved = node("moved", copy, "x=cache")
    early = node("early", "Neg", "x=moved")
    write = node("write", "ScatterNdUpdate", "var=moved indices=row updates=new", after="early")
    got, cache = run(*CACHE, moved, early, write, output("write"))
    assert got == [WRITTEN] and cache == ZEROS


@pytest.mark.parametrize(
    "nodes",
    [
        (node("read", "Neg", "x=cache"), WRITE),
        (WRITE, node("read", "Neg", "x=cache")),
        (WRITE, node("read", "ScatterNdUpdate", "var=cache indices=row updates=new")),
        # A reshaped value may be a copy on a device: its contents after the write are not defined.
        (
            node("flat", "Reshape", "x=cache shape=size"),
            node("write", "ScatterNdUpdate", "var=cache indices=row updates=new", after="flat"),
            node("read", "Neg", "x=flat", after="write"),
        ),
        (node("flat", "Reshape", "x=cache shape=size"), WRITE, node("read", "Neg", "x=flat")),
        (WRITE, node("flat", "Reshape", "x=cache shape=size"), node("read", "Neg", "x=flat")),
        (const("all", [[0], [1], [2], [3]]), node("write", "ScatterNdUpdate", "var=cache indices=all updates=cache")),
    ],
    ids=["read first", "read last", "two writes", "view read behind", "view", "view last", "write of itself"],
)
def test_undefined_order_is_refused(nodes: tuple[Node, ...]) -> None:
    with pytest.raises(LoweringError, match=r"graph g: whether \w+ \w+ reads cache before or after ScatterNdUpdate"):
        Interpreter(graph(*CACHE, const("size", [8]), *nodes, output("write")), {})


def test_an_output_taken_straight_from_a_written_cache_is_refused() -> None:
    with pytest.raises(LoweringError, match="whether NetOutput end reads cache before or after"):
        Interpreter(graph(*CACHE, WRITE, output("cache")), {})
    assert run(*CACHE, WRITE, output("cache", after="write")) == ([WRITTEN], WRITTEN)


def test_writes_into_what_is_not_the_graphs_are_refused() -> None:
    nodes = source("data"), *CACHE[1:], node("write", "ScatterNdUpdate", "var=data indices=row updates=new")
    with pytest.raises(LoweringError, match="graph g: ScatterNdUpdate write writes into Data data"):
        Interpreter(graph(*nodes, output("write")), {})


def test_unknown_operators_are_refused_even_if_nobody_reads_them() -> None:
    odd = node("odd", "Roll", "x=cache")
    for make in (lambda g: Interpreter(g, {}), shapes):
        with pytest.raises(LoweringError, match="node odd: operator Roll is not known"):
            make(graph(*CACHE, WRITE, odd, output("write")))


def test_nodes_must_stand_in_order() -> None:
    with pytest.raises(LoweringError, match="graph g: node write reads row:0, which no node before it gives"):
        Interpreter(graph(CACHE[0], CACHE[2], WRITE, CACHE[1], output("write")), {})
    with pytest.raises(LoweringError, match="node read reads write:1, which no node before it gives"):
        Interpreter(graph(*CACHE, WRITE, node("read", "Neg", "x=write:1"), output("read")), {})
    with pytest.raises(LoweringError, match="graph g: 0 NetOutput nodes, expected 1"):
        Interpreter(graph(*CACHE, WRITE), {})


def test_outputs_are_held_to_what_they_declare() -> None:
    for declared, wrong in (((torch.float32, (2, 4)), r"\[2, 4\]"), ((torch.float16, (4, 2)), r"float16\[4, 2\]")):
        found = graph(*CACHE, WRITE, output("write", declared=declared))
        match = rf"output 0, of ScatterNdUpdate write, is float32\[4, 2\]; declared is .*{wrong}"
        for go in (lambda g: Interpreter(g, {}).run({"cache": torch.zeros(4, 2)}), shapes):
            with pytest.raises(LoweringError, match=match):
                go(found)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({}, "input cache is missing; expected cache"),
        ({"cache": torch.zeros(4, 2), "more": torch.zeros(1)}, "input more is unknown; expected cache"),
        ({"cache": torch.zeros(4, 3)}, r"input cache is float32\[4, 3\]; expected float32\[4, 2\], contiguous"),
        ({"cache": torch.zeros(4, 2).half()}, r"input cache is float16\[4, 2\]; expected float32\[4, 2\]"),
        ({"cache": torch.zeros(2, 4).t()}, r"input cache is float32\[4, 2\], not contiguous; expected"),
    ],
)
def test_inputs_are_checked(given: dict[str, Tensor], match: str) -> None:
    with pytest.raises(RequestError, match=rf"^graph g: {match}"):
        Interpreter(graph(*CACHE, WRITE, output("write")), {}).run(given)


def test_weights_are_checked() -> None:
    weight = Node("w", "FileConstant", (), {"dtype": 0, "shape": [4, 2]}, (), (Declared("y", *F4),))
    found = graph(weight, output("w"))
    with pytest.raises(BundleError, match="graph g: weight w is missing; bind the weights again"):
        Interpreter(found, {})
    with pytest.raises(BundleError, match=r"weight w is float32\[2, 4\]; expected float32\[4, 2\]"):
        Interpreter(found, {"w": torch.zeros(2, 4)})
    (got,) = Interpreter(found, {"w": torch.ones(4, 2), "unused": torch.ones(1)}).run({})
    assert got.tolist() == [[1.0, 1.0]] * 4
    # GE reads the attribute, not the description: number 1 is its float16.
    weight.attributes["dtype"] = 1
    with pytest.raises(LoweringError, match=r"FileConstant w is float16\[4, 2\] by its attributes .* float32\[4, 2\]"):
        shapes(found)


def test_values_are_freed_after_their_last_reader() -> None:
    first, second = node("first", "Neg", "x=write"), node("second", "Neg", "x=first")
    third = node("third", "Neg", "x=second")
    found, held = graph(*CACHE, WRITE, first, second, third, output("third")), {}

    def note(at: Node, outputs: tuple[Tensor, ...]) -> None:
        held[at.name] = weakref.ref(outputs[0])
        if at.name == "third":
            assert held["first"]() is None and held["second"]() is not None

    Interpreter(found, {}).run({"cache": torch.zeros(4, 2)}, note)
    assert held.keys() >= {"first", "third"}


def test_shapes_of_nodes_that_compute_the_same_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of the nodes of a graph's blocks; the numbers of a constant and the attributes tell them apart."""
    asked, call = list[str](), BoundNode.__call__

    def noted(bound: BoundNode, operands: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        asked.append(bound.node.name)
        return call(bound, operands)

    monkeypatch.setattr(BoundNode, "__call__", noted)
    wide, wide_too, high = (const(name, sizes) for name, sizes in (("a", [2, 4]), ("b", [2, 4]), ("c", [8, 1])))
    reshaped = [node(f"of {size}", "Reshape", f"x=cache shape={size}") for size in "abc"]
    ends = [node(f"type {dtype}", "Cast", "x=cache", dst_type=dtype) for dtype in (0, 1)]
    found = shapes(graph(*CACHE, wide, wide_too, high, *reshaped, *ends, output("cache")))
    assert asked == ["of a", "of c", "type 0", "type 1"]
    kinds = {name: found[name][0] for name in ("of a", "of b", "of c", "type 0", "type 1")}
    assert [shape for _, shape in kinds.values()] == [(2, 4), (2, 4), (8, 1), (4, 2), (4, 2)]
    assert [dtype for dtype, _ in kinds.values()][-2:] == [torch.float32, torch.float16]


def test_a_shape_that_depends_on_an_input_is_refused_without_values() -> None:
    size = source("size", dtype=torch.int64, shape=(1,))
    found = graph(
        *CACHE, size, node("flat", "Reshape", "x=cache shape=size"), output("flat", declared=(torch.float32, (8,)))
    )
    with pytest.raises(LoweringError, match=r"node flat \(Reshape\): operand shape is read on the host"):
        shapes(found)
    (got,) = Interpreter(found, {}).run({"cache": torch.zeros(4, 2), "size": torch.tensor([8])})
    assert got.shape == (8,)
