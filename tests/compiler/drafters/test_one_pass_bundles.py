"""P-EAGLE, DFlash and DSpark, from folder to tokens: built, checked, equal to plain decoding."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.ge.graph import Graph
from draftwood.compiler.ge.proofs import prove_in_place
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.engines.opening import Opening
from draftwood.runtime.engines.openvino import OpenVinoEngine
from draftwood.runtime.options import Options
from draftwood.runtime.policy import FixedTree
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.tools.cli import main
from draftwood.tools.comparison.compare import Pair, compare_gear
from draftwood.tools.reference.eager import EagerEngine
from draftwood.tools.reference.ge import GeEngine
from draftwood.trees import Topology

TREES = (("plain", Topology.plain()), ("backbone", Topology.backbone(3, 2)))


def built(folder: Path, save: Callable, tiny_teacher: Path, target: str) -> Bundle:
    save(folder / "drafter")
    asked = BuildRequest(
        model=tiny_teacher,
        drafter=folder / "drafter",
        trees=TREES,
        slots=(128,),
        prefill_rows=(8,),
        targets=(target,),
    )
    build(asked, folder / "bundle")
    return Bundle.open(folder / "bundle")


# P-EAGLE has the graphs of EAGLE-3 and one more pass, DSpark those of DFlash and its trees: a bundle takes a while.
BUILT = [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("peagle", "dspark")), "dflash"]


@pytest.fixture(scope="module", params=BUILT)
def bundle(
    request: pytest.FixtureRequest,
    tiny_teacher: Path,
    save_one_pass: dict[str, Callable[[Path], None]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Bundle:
    return built(tmp_path_factory.mktemp("one-pass"), save_one_pass[request.param], tiny_teacher, "onnx")


@pytest.mark.parametrize("opened", [CpuEngine, OpenVinoEngine], ids=["onnxruntime", "OpenVINO"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=3)], ids=["greedy", "sampled"])
def test_speculation_changes_no_token(bundle: Bundle, sampling: Sampling, opened: Callable) -> None:
    if opened is OpenVinoEngine:
        pytest.importorskip("openvino")
    engine, options = opened(bundle, Opening(threads=1)), Options(max_new_tokens=60, ignore_eos=True, sampling=sampling)
    gears = [FixedTree(bundle, gear) for gear in ("plain-kv128", "backbone-kv128")]
    plain, tree = (Decoding(engine, [5, 9, 200], options, policy).run() for policy in gears)
    assert tree.token_ids == plain.token_ids
    assert tree.steps < plain.steps or sampling.temperature  # drafts hit, else the equality shows little


def test_checked_against_eager_with_faults(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(bundle.folder)]) == 0, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["peagle", "dflash", "dspark"])
def test_npu_graphs_write_in_place_and_equal_eager(
    kind: str, save_one_pass: dict[str, Callable[[Path], None]], tiny_teacher: Path, tmp_path: Path
) -> None:
    bundle = built(tmp_path, save_one_pass[kind], tiny_teacher, "ge")
    npu, drafter = bundle.manifest.graph_set("ge"), bundle.manifest.drafter
    assert npu is not None and drafter is not None and drafter.levels == 3
    for signature in npu.graphs:
        if signature.kind in ("extend", "draft"):
            proof = prove_in_place(Graph.load(bundle.folder / signature.file), signature)
            assert len(proof) == len(drafter.buffers) == len(signature.caches) and all(one.readers for one in proof)
    pair = Pair("ge", EagerEngine(bundle, npu=True), GeEngine(bundle), 3e-2)  # bf16, as `check` allows
    for gear in bundle.manifest.gears:
        found = list(compare_gear(pair, gear, np.arange(40, dtype=np.int64)))
        assert [one for one in found if not one.ok] == []


def test_the_folder_is_what_was_built(bundle: Bundle, tiny_teacher: Path) -> None:
    from draftwood.compiler.drafters.registry import drafter_of, open_drafter

    opened = open_drafter(bundle.folder.parent / "drafter", Checkpoint.open(tiny_teacher))
    assert bundle.manifest.drafter is not None
    assert drafter_of(bundle.manifest.drafter) == opened.model
    assert bundle.manifest.drafter.digest == opened.digest()
