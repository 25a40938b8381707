"""Static ONNX graphs through Qualcomm's compiler, run by its emulator: taken whole, and held against eager PyTorch."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.qnn import PROVIDER, HtpEngine
from draftwood.runtime.rounding import HALF_TOLERANCE
from draftwood.tools.comparison.compare import Pair, compare_chunk, compare_gear
from draftwood.tools.reference.eager import EagerEngine

GEARS = [("eagle3", "planned"), ("eagle3", "budget"), ("fasteagle", "planned"), ("medusa", "ragged")]


@pytest.mark.parametrize(("kind", "tree"), GEARS)
def test_every_graph_equals_eager_pytorch(
    pairs: dict[str, Pair],
    kind: str,
    tree: str,
    short_prompt: NDArray[np.int64],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """No node is left to the CPU; and reports keep standard output to themselves."""
    pair = pairs[kind]
    found = list(compare_gear(pair, pair.engine.bundle.gear(f"{tree}-kv128"), short_prompt))
    assert [one for one in found if not one.ok] == []
    # Two orders of magnitude above fp32's rounding: it is the HTP's arithmetic, not the CPU's.
    assert max(one.difference for one in found if one.quantity == "logits") > 1e-4
    assert set(pair.engine.nodes) == {PROVIDER} and pair.engine.nodes[PROVIDER] > 100
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("kind", ["eagle3", "fasteagle"])
def test_prompts_are_read_and_written_as_by_eager_pytorch(
    pairs: dict[str, Pair], kind: str, short_prompt: NDArray[np.int64]
) -> None:
    pair = pairs[kind]
    chunks = [graph for graph in (*pair.engine.graphs, *pair.engine.drafting.extends) if graph.slots == 128]
    found = [
        one
        for graph in chunks
        if graph.kind in ("prefill", "extend")
        for one in compare_chunk(pair, graph, short_prompt)
    ]
    assert {one.quantity for one in found} == {"logits", "features", "choice", "draft cache"}
    assert [one for one in found if not one.ok] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["peagle", "dflash", "dspark"])
def test_every_other_kind_of_drafter(
    kind: str,
    save_one_pass: dict[str, Callable[[Path], None]],
    tiny_teacher: Path,
    short_prompt: NDArray[np.int64],
    tmp_path: Path,
) -> None:
    from draftwood.compiler.bundle.build import build
    from draftwood.compiler.bundle.request import BuildRequest
    from draftwood.trees import Topology

    save_one_pass[kind](tmp_path / "drafter")
    trees = (("plain", Topology.plain()), ("backbone", Topology.backbone(3, 2)))
    asked = BuildRequest(model=tiny_teacher, drafter=tmp_path / "drafter", trees=trees, slots=(128,), prefill_rows=(8,))
    build(asked, tmp_path / "bundle")
    bundle = Bundle.open(tmp_path / "bundle")
    pair = Pair("qnn", EagerEngine(bundle), HtpEngine(bundle), HALF_TOLERANCE)
    assert [one for one in compare_gear(pair, bundle.gear("backbone-kv128"), short_prompt) if not one.ok] == []
