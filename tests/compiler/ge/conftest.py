"""A tiny openPangu teacher with Medusa heads, lowered to GE graphs without its weights."""

from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch

from draftwood.environment import torch_npu_installed
from draftwood.manifest import StepSignature

if TYPE_CHECKING:
    from draftwood.compiler.bundle.request import BuildRequest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch_npu_installed():
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs the torch_npu package, which holds torchair's converters"))


@dataclass(frozen=True)
class Lowered:
    """Steps by name, their ``.air`` bytes and graphs, and the weight index they point into."""

    signatures: dict[str, StepSignature]
    airs: dict[str, bytes]
    graphs: dict
    index: object


def lower_tiny(source: Path, kinds: Container[str] = ("prefill", "decode", "verify", "accept", "draft")) -> Lowered:
    """Steps of those kinds, of a tiny teacher at KV length 640, in bf16."""
    from draftwood.compiler.bundle.request import BuildRequest
    from draftwood.compiler.bundle.sources import Sources
    from draftwood.compiler.ge.graph import Graph
    from draftwood.compiler.ge.lowering import lower_to_ge
    from draftwood.compiler.ge.torchair_bridge import ge_ir
    from draftwood.compiler.ge.weights import plan_weights
    from draftwood.compiler.steps.step import StepSizes
    from draftwood.compiler.steps.tracing import shapes_only, trace
    from draftwood.compiler.targets.steps import draft_steps, static_steps
    from draftwood.trees import Topology

    tree = Topology.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)])
    trees = (("plain", Topology.plain()), ("ragged", tree))
    request = BuildRequest(
        model=source, drafter=source / "heads", trees=trees, slots=(640,), prefill_rows=(8,), targets=("ge",)
    )
    sources = Sources.open(request)
    entries = sources.weights(640)
    index = plan_weights(
        {e.name: e.shape for e in entries}, torch.bfloat16, "weights.bin", {e.name: e.parts for e in entries}, {}
    )
    with shapes_only(torch.bfloat16) as mode:
        modules = sources.modules(640)
    sizes = StepSizes(branch_rows=7, path_rows=4, dtype="bfloat16")
    airs, signatures = {}, {}
    steps = static_steps(request.shapes, sizes, modules[0], decode_rows=2, form="npu")
    for step in [*steps, *draft_steps(request.shapes, sizes, sources.draft_model, modules, static=True)]:
        if step.signature.kind not in kinds:
            continue
        with mode:
            program = trace(step)
        name = step.signature.name
        airs[name], signatures[name] = lower_to_ge(step, program, index), step.signature
    graphs = {name: Graph.of(ge_ir().ModelDef.FromString(air).graph[0]) for name, air in airs.items()}
    return Lowered(signatures, airs, graphs, index)


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory: pytest.TempPathFactory, save_pangu: Callable, save_medusa: Callable) -> Path:
    """A bf16 openPangu folder with its heads inside."""
    source = tmp_path_factory.mktemp("ge-source")
    save_pangu(source, torch.bfloat16)
    (source / "heads").mkdir()
    save_medusa(source / "heads")
    return source


@pytest.fixture(scope="session")
def lowered(tiny_source: Path) -> Lowered:
    return lower_tiny(tiny_source)


# A tree with branches, as small as may be.
RAGGED = ((0,), (1,), (0, 0), (1, 0))
# Texts of one launch: graphs of two and of four.
PLACES = 4


@pytest.fixture(scope="session")
def pangu_request(tiny_source: Path) -> "BuildRequest":
    """Plain decoding and a ragged tree at one KV length, for an NPU alone, of several texts as well."""
    from draftwood.compiler.bundle.request import BuildRequest
    from draftwood.trees import Topology

    trees = (("plain", Topology.plain()), ("ragged", Topology.from_paths(RAGGED)))
    return BuildRequest(
        model=tiny_source,
        drafter=tiny_source / "heads",
        trees=trees,
        slots=(128,),
        prefill_rows=(8,),
        targets=("ge",),
        texts=PLACES,
    )


@pytest.fixture(scope="session")
def pangu_bundle(pangu_request: "BuildRequest", kept: Callable[..., Path]) -> Path:
    """The bundle of that request. Read only."""
    from draftwood.compiler.bundle.build import build

    return kept("pangu", partial(build, pangu_request))


@pytest.fixture(scope="session")
def eagle3_bundle(tiny_teacher: Path, tiny_drafters: dict[str, Path], kept: Callable[..., Path]) -> Path:
    """Plain decoding and a tree that EAGLE-3 grows, for an NPU alone, of one text and of three. Read only."""
    from draftwood.compiler.bundle.build import build
    from draftwood.compiler.bundle.request import BuildRequest
    from draftwood.planned import named_gears
    from draftwood.trees import Topology
    from draftwood.trees.spec import Budget

    trees = (("plain", Topology.plain()), ("budget", Budget(4, 2, 2)))
    gears = named_gears((name, 128) for name, _ in trees)
    request = BuildRequest(
        model=tiny_teacher,
        drafter=tiny_drafters["eagle3"],
        trees=trees,
        slots=(128,),
        prefill_rows=(8,),
        targets=("ge",),
        # Twice as many graphs follow from ``texts=3``: those of two texts, which the bundle of openPangu has.
        gears=tuple(msgspec.structs.replace(gear, texts=(1, 3)) for gear in gears),
    )
    return kept("ge-eagle3", partial(build, request))
