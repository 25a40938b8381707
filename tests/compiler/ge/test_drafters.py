"""The NPU graphs of EAGLE-3 and FastEagle: lowered, proved, and equal to eager PyTorch, caches and trees included."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.ge.graph import Graph
from draftwood.compiler.ge.interpreter import shapes
from draftwood.compiler.ge.operator_rules import engines
from draftwood.compiler.ge.proofs import prove_in_place
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding
from draftwood.runtime.options import Options
from draftwood.runtime.policy import FixedTree
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.trees import Topology

DRAFTS = {"budget": "draft-budget-kv128", "backbone": "draft-backbone-kv128"}
KINDS = ("eagle3", "fasteagle")
# The usual run has EAGLE-3's graph of a tree that it grows, and a fixed tree of FastEagle's one graph for all trees.
FIXED = "eagle3 fixed"


@pytest.fixture(scope="module", params=[*KINDS, pytest.param(FIXED, marks=pytest.mark.slow)])
def bundle(
    request: pytest.FixtureRequest,
    tiny_teacher: Path,
    tiny_drafters: dict[str, Path],
    eagle3_bundle: Path,
    kept: Callable[..., Path],
) -> Bundle:
    if request.param == "eagle3":
        return Bundle.open(eagle3_bundle)
    kind = request.param.partition(" ")[0]
    asked = BuildRequest(
        model=tiny_teacher,
        drafter=tiny_drafters[kind],
        trees=(("plain", Topology.plain()), ("backbone", Topology.backbone(2, 2))),
        slots=(128,),
        prefill_rows=(8,),
        targets=("ge",),
    )
    return Bundle.open(kept(f"ge-{kind}-fixed", partial(build, asked)))


def test_draft_and_extend_graphs_copy_no_cache_and_run_on_the_ai_core(bundle: Bundle) -> None:
    assert bundle.manifest.graph_set("ge") is not None and bundle.manifest.drafter is not None
    found = [graph for graph in bundle.manifest.graph_set("ge").graphs if graph.kind in ("extend", "draft")]
    tree = DRAFTS[bundle.manifest.gears[-1].tree]
    draft = tree if bundle.manifest.drafter.kind == "eagle3" else "draft-kv128"
    assert [graph.name for graph in found] == ["extend-t8-kv128", draft]
    for signature in found:
        graph = Graph.load(bundle.folder / signature.file)
        assert engines(graph, shapes(graph)).keys() == {"AI Core"}
        proof = prove_in_place(graph, signature)
        assert len(proof) == len(bundle.manifest.drafter.buffers) == len(signature.caches)
        assert all(one.readers for one in proof)


ENGINES = [("eagle3", "ge"), ("fasteagle", "ge"), ("fasteagle", "npu")]
SLOW = [pytest.param(*one, marks=pytest.mark.slow) for one in (("eagle3", "npu"), (FIXED, "ge"), (FIXED, "npu"))]


@pytest.mark.parametrize(("bundle", "name"), [*ENGINES, *SLOW], indirect=["bundle"])
def test_every_engine_equals_eager_pytorch(bundle: Bundle, name: str) -> None:
    """The graphs interpreted; and the steps compiled as for the device, then run on the CPU."""
    from draftwood.compiler.targets.online import TorchairExecutor
    from draftwood.runtime.engines.npu import NpuEngine
    from draftwood.tools.comparison.compare import Pair, compare_gear
    from draftwood.tools.reference.eager import EagerEngine
    from draftwood.tools.reference.ge import GeEngine

    engine = (
        GeEngine(bundle)
        if name == "ge"
        else NpuEngine(bundle, executor=TorchairExecutor(bundle.folder, bundle.manifest, device="cpu", eagerly=True))
    )
    pair = Pair(name, EagerEngine(bundle, npu=True), engine, 3e-2)  # bf16, as `check` allows
    # A plain step on the route of a device is test_beside_torch_npu's.
    for gear in bundle.manifest.gears if name == "ge" else bundle.manifest.gears[1:]:
        found = list(compare_gear(pair, gear, np.arange(40, dtype=np.int64)))
        assert [one for one in found if not one.ok] == []
        drafted = {one.quantity for one in found} & {"draft scores", "draft tokens", "draft cache"}
        assert len(drafted) == (3 if gear.draft else 0)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8}, {"temperature": 0.9, "top_p": 0.7}], ids=str)
def test_speculation_changes_no_token(bundle: Bundle, sampling: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted in graphs; the plain text by the host's own draws. Some rows' nucleus is larger than a graph sees."""
    from draftwood.tools.reference.ge import GeEngine

    engine = GeEngine(bundle)
    options = Options(max_new_tokens=12, sampling=Sampling(seed=3, **sampling), ignore_eos=True)
    prompt = list(range(5, 25))
    with monkeypatch.context() as patched:
        patched.setattr(GeEngine, "parts", property(lambda engine: engine))
        plain = Decoding(engine, prompt, options, FixedTree(bundle)).run()
    assert engine.on_device.host_draws == 0
    for gear in bundle.manifest.gears:
        assert Decoding(engine, prompt, options, FixedTree(bundle, gear.name)).run().token_ids == plain.token_ids
    assert (engine.on_device.host_draws > 0) == ("top_p" in sampling)
