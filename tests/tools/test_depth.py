"""At 36 layers rounding alone never fails, and planted faults are caught, in every precision; two of them are slow."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.errors import BundleError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.engines.opening import Opening
from draftwood.runtime.proof import prove
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import Draft, TeacherOutput
from draftwood.tests.packed_checkpoints import save_packed
from draftwood.tools.comparison.check import check
from draftwood.trees import Topology
from draftwood.trees.spec import Lookup

LAYERS, SEEDS = 36, 3
RAGGED = Topology.from_paths(((0,), (1,), (0, 0), (0, 1), (1, 0)))


SLOW = [pytest.param(precision, marks=pytest.mark.slow) for precision in ("exact", "w8a8")]


@pytest.fixture(scope="module", params=["nbits", *SLOW])
def deep(
    request: pytest.FixtureRequest, save_tiny: Callable, kept: Callable, tmp_path_factory: pytest.TempPathFactory
) -> Bundle:
    def make(folder: Path) -> None:
        place = tmp_path_factory.mktemp("deep")
        save_packed(save_tiny(place, num_hidden_layers=LAYERS), place / "packed", "awq")
        trees = (("plain", Topology.plain()), ("ragged", Lookup(RAGGED.parents, RAGGED.ranks)))
        asked = BuildRequest(
            model=place / "packed", drafter=None, trees=trees, slots=(128,), prefill_rows=(), precision=request.param
        )
        build(asked, folder)

    return Bundle.open(kept(f"deep-{request.param}", make))


def test_check_at_36_layers(deep: Bundle) -> None:
    prompts = [np.random.default_rng(seed).integers(2, 300, 30) for seed in range(SEEDS)]
    report = check(deep, prompts, engine="cpu")
    assert [one for one in report["comparisons"] if not one["ok"]] == []
    assert {one["fault"] for one in report["controls"] if one["caught"]} == {
        "causal mask instead of the tree's",
        "mask inverted",
        "two mask rows swapped",
        "positions of draft rows shifted by one",
        "path index misrouted",
        "commit's write dropped",
        "a scale of one layer off by a half",
    }
    assert all(one["caught"] for one in report["controls"])


def test_the_proof_at_36_layers(deep: Bundle) -> None:
    """As it is built it passes; with a wrong mask, shifted positions or a dropped write it is refused."""
    prove(CpuEngine(deep, Opening(threads=1)))
    for spoil in (_causal, _shifted, _dropped):
        engine = CpuEngine(deep, Opening(threads=1))
        engine.verify = partial(_spoiled, engine.verify, spoil)  # type: ignore[method-assign]
        with pytest.raises(BundleError, match="gear ragged-kv128"):
            prove(engine)


def _spoiled(verify: Any, spoil: Any, states: list[SequenceState], drafts: list[Draft]) -> list[TeacherOutput]:
    return verify(states, [spoil(*both) for both in zip(states, drafts, strict=True)])


def _causal(state: SequenceState, draft: Draft) -> Draft:
    return draft._replace(tree=replace(draft.tree, mask=np.tri(draft.tree.rows, dtype=np.bool_)))


def _shifted(state: SequenceState, draft: Draft) -> Draft:
    return draft._replace(tree=replace(draft.tree, depths=draft.tree.depths + (draft.tree.depths > 0)))


def _dropped(state: SequenceState, draft: Draft) -> Draft:
    state.kv._move = lambda *_: None
    return draft
