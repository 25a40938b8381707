"""Faults in a draft's inputs are told from correct inputs, which are never taken for faults."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace as replace_fields
from numpy.typing import NDArray

from draftwood.errors import BundleError
from draftwood.manifest import MANIFEST_FILE, encode, list_file, read_manifest
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.bundle.weights import read_header
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.engines.opening import Opening
from draftwood.runtime.engines.static import OnnxStaticEngine
from draftwood.runtime.rounding import TOLERANCE
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import TeacherOutput
from draftwood.tools.comparison.batches import DRAFT_FAULT, FAULT, compare_texts
from draftwood.tools.comparison.compare import Comparison, Pair, compare_drafts, compare_far, compare_gear
from draftwood.tools.comparison.faults import Control, ReferenceSteps, controls, draft_controls, drafted
from draftwood.tools.reference.eager import EagerEngine

PROMPT = np.random.default_rng(3).integers(2, 300, 40)
CACHED = {"token before the root in its place", "drafter's caches forgotten"}


@pytest.mark.parametrize("opened", [CpuEngine, OnnxStaticEngine], ids=["cpu", "static"])
@pytest.mark.parametrize("kind", ["medusa", "eagle3", "fasteagle"])
def test_faults_of_a_draft_are_caught(kind: str, opened: type[Engine], tiny_bundles: dict[str, Path]) -> None:
    bundle = Bundle.open(tiny_bundles[kind])
    pair = Pair("cpu", EagerEngine(bundle), opened(bundle), TOLERANCE)
    for gear in bundle.manifest.gears:
        found = {control.fault: control for control in draft_controls(pair, gear, PROMPT)}
        wanted = {"teacher's states misplaced"} | (CACHED if kind != "medusa" else set())
        assert set(found) == (wanted if gear.draft else set()) and all(c.caught for c in found.values())
        if gear.draft:
            assert all(one.ok for one in compare_drafts(pair, gear, drafted(pair, gear, PROMPT, [7, 8])))


@pytest.mark.parametrize("opened", [CpuEngine, OnnxStaticEngine], ids=["cpu", "static"])
def test_a_prompt_is_read_once_for_all_faults(
    opened: type[Engine], tiny_bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No fault leaves anything to the next: after all of them the right tree and the right commit pass."""
    bundle, reads = Bundle.open(tiny_bundles["medusa"]), list[int]()
    pair = Pair("cpu", EagerEngine(bundle), opened(bundle), TOLERANCE)
    gear = next(gear for gear in bundle.manifest.gears if bundle.trees[gear.tree][1].rows > 3)
    tree, append = bundle.trees[gear.tree][1], EagerEngine.append
    path = tree.paths[-1, : tree.depths[-1] + 1].tolist()

    def counted(engine: EagerEngine, state: SequenceState, chunk_n: NDArray[np.int64]) -> TeacherOutput:
        reads.append(len(chunk_n))
        return append(engine, state, chunk_n)

    monkeypatch.setattr(EagerEngine, "append", counted)
    assert all(one.caught for one in controls(pair, gear, PROMPT)) and reads == [len(PROMPT)]
    steps = ReferenceSteps(pair, gear, PROMPT, tree)
    assert any(not one.ok for one in steps.commit(path, path, drop=True))
    assert any(not one.ok for one in steps.tree(replace(tree, depths=tree.depths + (tree.depths > 0))))
    assert all(one.ok for one in [*steps.tree(tree), *steps.commit(path, path)])


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_launches_of_several_texts_are_held_to_eager_texts_alone(kind: str, tiny_bundles: dict[str, Path]) -> None:
    """By their graph, full and with an unused place; and another text's caches are noticed."""
    bundle = Bundle.open(tiny_bundles[kind])
    pair = Pair("cpu", EagerEngine(bundle), CpuEngine(bundle, Opening(threads=1)), TOLERANCE)
    assert pair.engine.batches == (2, 4)
    for count, graph in ((2, "grouped-b2"), (3, "grouped-b4"), (4, "grouped-b4")):
        found = list(compare_texts(pair, count, [PROMPT, PROMPT[::-1]]))
        compared = [one for one in found if isinstance(one, Comparison)]
        drafts = [one for one in compared if one.quantity.startswith("draft")]
        assert all(one.ok for one in compared) and {one.gear for one in drafts} == {
            gear.name for gear in bundle.manifest.gears if gear.draft and gear.slots == 128
        }
        rows = [one for one in compared if one not in drafts]
        assert all(one.graph == graph for one in rows) and len(rows) == 9 * count
        faults = [one for one in found if isinstance(one, Control)]
        assert {one.fault for one in faults} == {FAULT, DRAFT_FAULT} and all(one.caught for one in faults)


def test_a_wrong_position_is_found_where_caches_end(tiny_bundle: Path, tmp_path: Path) -> None:
    """Rotary tables are wrong from a position on that no prompt of the comparison comes to."""
    folder = tmp_path / "wrong"
    shutil.copytree(tiny_bundle, folder)
    manifest = read_manifest(folder)
    name = manifest.graph_sets[0].weights
    table = read_header(folder / name)["rope_cos"]
    content = bytearray((folder / name).read_bytes())
    values = np.frombuffer(content, np.float32, math.prod(table.shape), table.data_offsets[0]).reshape(table.shape)
    values[240:] = values[:16]
    (folder / name).write_bytes(content)
    files = manifest.files | {name: list_file(folder / name)}
    (folder / MANIFEST_FILE).write_bytes(encode(replace_fields(manifest, files=files)))
    for where, right in ((tiny_bundle, True), (folder, False)):
        bundle = Bundle.open(where)
        pair = Pair("static", EagerEngine(bundle), OnnxStaticEngine(bundle), TOLERANCE)
        gear = next(gear for gear in bundle.manifest.gears if gear.slots == 256 and gear.draft)
        assert all(one.ok for one in compare_gear(pair, gear, PROMPT))
        assert all(one.ok for one in compare_far(pair, gear, PROMPT)) == right


@pytest.mark.parametrize("path", ["teacher.layers", "teacher.intermediate", "drafter.heads"])
def test_a_manifest_of_another_network_is_one_line(tiny_bundle: Path, tmp_path: Path, path: str) -> None:
    folder, (part, name) = tmp_path / "other", path.split(".")
    shutil.copytree(tiny_bundle, folder)
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    manifest[part]["config"][name] += 1
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=r"the network that the manifest describes has .*; build it again") as refused:
        EagerEngine(Bundle.open(folder))
    assert "\n" not in str(refused.value)
