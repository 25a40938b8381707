"""GE graphs that are stamped from a few blocks are those of the whole trace, node by node and in its order."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.bundle.sources import Sources
from draftwood.compiler.ge.graph import Graph
from draftwood.compiler.ge.lowering import lower_to_ge
from draftwood.compiler.ge.torchair_bridge import ge_ir
from draftwood.compiler.ge.weights import plan_weights
from draftwood.compiler.ranks.collectives import group_of
from draftwood.compiler.steps.prefill import prefill_step
from draftwood.compiler.steps.short import ShortStep, Unlike, shortened
from draftwood.compiler.steps.step import Step, StepSizes
from draftwood.compiler.steps.texts import verify_texts_step
from draftwood.compiler.steps.tracing import trace
from draftwood.compiler.steps.verify import verify_step
from draftwood.compiler.targets.modules import make_modules
from draftwood.compiler.targets.steps import whole_steps
from draftwood.compiler.teachers.config import PackedLayer, TeacherConfig
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.compiler.teachers.linear import packed
from draftwood.tests.compiler.ge.test_families import FAMILIES
from draftwood.trees import Topology

LAYERS = 6  # the fewest of which not all are traced
LINEAR = tuple(f"layers.{i}.{part}" for i in range(LAYERS) for part in ("qkv", "o", "gate_up", "down"))
SIZES = StepSizes(branch_rows=7, path_rows=4)
STEPS: dict[str, Callable[[Decoder], Step]] = {
    "verify": lambda decoder: verify_step(decoder, SIZES, 7, 128, "npu"),
    "fewer rows than the branch": lambda decoder: verify_step(decoder, SIZES, 4, 128, "npu"),
    "prefill": lambda decoder: prefill_step(decoder, SIZES, 8, 128, "npu"),
    "texts": lambda decoder: verify_texts_step(decoder, SIZES, 2, 4, 128),
}


def nodes(step: Step, short: ShortStep | None) -> list[object]:
    """A graph's nodes in order, without what torchair notes for itself."""
    weights = {step.weight_name(name): value for name, value in step.module.state_dict().items()}
    types = {str(name): value.dtype for name, value in weights.items() if value.dtype != torch.float32}
    index = plan_weights({str(n): tuple(w.shape) for n, w in weights.items()}, torch.float32, "w", {}, {}, types)
    air = lower_to_ge(step, trace(short.step if short else step), index, short)
    found = Graph.of(ge_ir().ModelDef.FromString(air).graph[0]).nodes.values()
    return [
        (
            node.name,
            node.type,
            node.inputs,
            {k: str(v) for k, v in node.attributes.items() if not k.startswith("_")},
            [(d.name, d.dtype, d.shape, d.layout) for d in (*node.input_types, *node.output_types)],
        )
        for node in found
    ]


def check(decoder: Decoder, make: Callable[[Decoder], Step]) -> None:
    short = shortened(decoder)
    assert short is not None and len(short.blocks) < len(decoder.layers)
    whole, stamped = nodes(make(decoder), None), nodes(make(decoder), ShortStep(short, make(short.decoder)))
    for one, other in zip(whole, stamped, strict=False):
        assert one == other
    assert len(whole) == len(stamped)


SLOW = pytest.mark.slow
# A mixture, and biases; the CPU's graphs are compared for more of them.
QUICK = ("Qwen3Moe", "PanguEmbedded")


@pytest.mark.parametrize("family", [*QUICK, *(pytest.param(one, marks=SLOW) for one in FAMILIES if one not in QUICK)])
def test_families(
    family: str, tmp_path: Path, save_llama: Callable, save_pangu: Callable, load_decoder: Callable
) -> None:
    fields = FAMILIES[family] | {"num_hidden_layers": LAYERS}
    if family == "PanguEmbedded":
        save_pangu(tmp_path, num_hidden_layers=LAYERS)
    else:
        save_llama(tmp_path, family=family, **fields)
    check(load_decoder(tmp_path, 128), STEPS["fewer rows than the branch"])


# Whole numbers and four bits have a verify step, and a mixture one of fewer rows than the branch.
OTHERS = ("prefill", "texts")


@pytest.mark.parametrize("name", [*OTHERS, *(pytest.param(one, marks=SLOW) for one in STEPS if one not in OTHERS)])
def test_steps(name: str, tmp_path: Path, save_llama: Callable, load_decoder: Callable) -> None:
    save_llama(tmp_path, num_hidden_layers=LAYERS)
    check(load_decoder(tmp_path, 128), STEPS[name])


@pytest.fixture
def bf16() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def config(tiny_teacher: Path) -> TeacherConfig:
    request = BuildRequest(model=tiny_teacher, drafter=None, trees=(("plain", Topology.plain()),), slots=(128,))
    return replace(Sources.open(request).teacher.config, layers=LAYERS)


def test_whole_numbers(config: TeacherConfig, bf16: None) -> None:
    decoder, _ = make_modules(replace(config, quantised=LINEAR), None, 128)
    check(decoder, STEPS["verify"])


def test_four_bits(config: TeacherConfig) -> None:
    forms = tuple(PackedLayer(name=name, bits=4, group=32, zeros=True) for name in LINEAR)
    decoder, _ = make_modules(config, None, 128)
    packed(decoder, forms)
    check(decoder.requires_grad_(False), STEPS["verify"])


def test_ranks(config: TeacherConfig) -> None:
    decoder, _ = make_modules(config, None, 128, ranks=2)
    with group_of(2):
        check(decoder, STEPS["verify"])


@pytest.mark.parametrize("kind", ["eagle3", *(pytest.param(kind, marks=SLOW) for kind in ("medusa", "fasteagle"))])
def test_whole_steps_of_drafters(
    kind: str, tiny_teacher: Path, tiny_heads: Path, tiny_drafters: dict[str, Path]
) -> None:
    """The drafter's own blocks stand before the teacher's, and read states of some of these."""
    trees = (("plain", Topology.plain()), ("backbone", Topology.backbone(2, 2)))
    request = BuildRequest(
        model=tiny_teacher, drafter={"medusa": tiny_heads, **tiny_drafters}[kind], trees=trees, slots=(128,)
    )
    sources, shapes = Sources.open(request), request.shapes
    decoder, network = make_modules(replace(sources.teacher.config, layers=12), sources.draft_model, 128)

    def make(decoder: Decoder) -> Step:
        steps = whole_steps(shapes, shapes.sizes(least_rows=2), sources.draft_model, (decoder, network), 2)
        return next(step for step in steps if step.signature.rows > 2)

    check(decoder, make)


def test_what_nobody_knows_how_to_grow_is_noticed(
    tmp_path: Path, save_llama: Callable, load_decoder: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The branch turned around, say: then all blocks are traced."""
    save_llama(tmp_path, num_hidden_layers=LAYERS)
    decoder = load_decoder(tmp_path, 128)
    short = shortened(decoder)
    assert short is not None
    made = ShortStep(short, STEPS["verify"](short.decoder))
    monkeypatch.setattr(type(made.step.module), "_padded", lambda self, branch_L2TKD: branch_L2TKD * 2)
    with pytest.raises(Unlike, match="a Mul of values with a part for each block"):
        nodes(STEPS["verify"](decoder), made)
