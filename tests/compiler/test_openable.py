"""Built bundles are opened, proved and decoded: kinds of drafters x kinds of trees x precisions x targets."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import draftwood
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.environment import torch_npu_installed
from draftwood.errors import InvariantError, TreeError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.policy import PLAIN
from draftwood.tools.comparison.compare import Pair, compare_gear
from draftwood.tools.reference.eager import EagerEngine
from draftwood.tools.reference.ge import GeEngine
from draftwood.trees.spec import parse_specs

KINDS = ("none", "medusa", "eagle3", "peagle", "dflash", "dspark", "fasteagle")
TREES = ("plain", "lookup:chain:2", "chain:2", "full:2x1,lookup:chain:2", "budget:4x2x2")
PRECISIONS = ("exact", "int8", "int8 drafter")
TARGETS = ("onnx", "ge")
# A build takes a while; the usual run has one for each target, with a drafter that no tree asks for anything.
QUICK = {
    ("medusa", "lookup:chain:2", "exact", "onnx"),
    ("eagle3", "lookup:chain:2", "int8 drafter", "ge"),
}
CELLS = [
    pytest.param(*cell, marks=[] if cell in QUICK else pytest.mark.slow)
    for kind in KINDS
    for tree in TREES
    for precision in PRECISIONS
    for target in TARGETS
    if (cell := (kind, tree, precision, target))[2] != "int8 drafter" or kind != "none"
]


@pytest.fixture(scope="session")
def drafters(
    tiny_heads: Path,
    tiny_drafters: dict[str, Path],
    save_one_pass: dict[str, Callable[[Path], None]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path | None]:
    """A drafter of every kind, for the tiny teacher."""
    root, found = tmp_path_factory.mktemp("drafters"), {"none": None, "medusa": tiny_heads} | tiny_drafters
    for kind, save in save_one_pass.items():
        save(root / kind)
        found[kind] = root / kind
    return found


@pytest.mark.parametrize(("kind", "tree", "precision", "target"), CELLS)
def test_what_build_accepts_is_opened_and_decodes(
    drafters: dict, tiny_teacher: Path, quantised_teacher: Path, tmp_path: Path, kind: str, tree: str, precision: str,
    target: str,
) -> None:  # fmt: skip
    if target == "ge" and not torch_npu_installed():
        pytest.skip("needs the torch_npu package, which holds torchair's converters")
    request = BuildRequest(
        model=quantised_teacher if precision == "int8" else tiny_teacher,
        drafter=drafters[kind],
        trees=tuple(parse_specs(tree)),
        slots=(128,),
        prefill_rows=(8,),
        targets=(target,),
        int8_drafter=precision == "int8 drafter",
    )
    try:
        manifest = draftwood.build(request, tmp_path / "bundle")
    except TreeError as refused:  # a kind that drafts no such tree, or none at all
        assert kind == "none" or tree.startswith("budget")
        assert "\n" not in str(refused) and not (tmp_path / "bundle").exists()
        return
    assert (manifest.drafter is not None) == any(gear.neural for gear in manifest.gears)
    _decode(tmp_path / "bundle", target)


def _decode(folder: Path, target: str) -> None:
    """Text with every tree is plain decoding's; or every graph of the NPU equals eager PyTorch."""
    if target == "onnx":
        asked: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
        with draftwood.open(folder, threads=1, verify="full") as model:
            plain = model.generate([5, 9, 17], policy=PLAIN, **asked)
            for gear in model.manifest.gears:
                assert model.generate([5, 9, 17], policy=gear.name, **asked).token_ids == plain.token_ids
        return
    bundle = Bundle.open(folder, "full")
    pair = Pair("ge", EagerEngine(bundle, npu=True), GeEngine(bundle), 5e-2)  # as `check` allows of W8A8
    for gear in bundle.manifest.gears:
        found = list(compare_gear(pair, gear, np.arange(20, dtype=np.int64)))
        assert found and [one for one in found if not one.ok] == []


def test_what_cannot_be_opened_is_not_named_whole(
    save_tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftwood.compiler.bundle import build as module

    (source := tmp_path / "teacher").mkdir()
    trees = tuple(parse_specs("lookup:chain:2"))
    request = BuildRequest(
        model=save_tiny(source, num_hidden_layers=1), drafter=None, trees=trees, slots=(128,), prefill_rows=()
    )
    monkeypatch.setattr(module, "_draft_of", lambda *_: None)
    with pytest.raises(InvariantError, match="what was built cannot be opened"):
        draftwood.build(request, tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == [source]
