"""Faults in what a draft reads are told from the truth, and the truth from nothing."""

from pathlib import Path

import numpy as np
import pytest

from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.proof import TOLERANCE
from draftwood.tools.comparison.compare import Pair, compare_drafts
from draftwood.tools.comparison.faults import _drafted, draft_controls
from draftwood.tools.reference.eager import EagerEngine

PROMPT = np.random.default_rng(3).integers(2, 300, 40)
CACHED = {"token before the root in its place", "drafter's caches forgotten"}


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "fasteagle"])
def test_faults_of_a_draft_are_caught(kind: str, tiny_bundle: Path, tiny_draft_bundles: dict[str, Path]) -> None:
    bundle = Bundle.open({"medusa": tiny_bundle, **tiny_draft_bundles}[kind])
    pair = Pair("cpu", EagerEngine(bundle), CpuEngine(bundle), TOLERANCE)
    for gear in bundle.manifest.gears:
        found = {control.fault: control for control in draft_controls(pair, gear, PROMPT)}
        wanted = {"teacher's states misplaced"} | (CACHED if kind != "medusa" else set())
        assert set(found) == (wanted if gear.draft else set()) and all(c.caught for c in found.values())
        if gear.draft:
            drafts = tuple(_drafted(engine, gear, PROMPT, 7) for engine in (pair.reference, pair.engine))
            assert all(one.ok for one in compare_drafts(pair, gear, [drafts]))
