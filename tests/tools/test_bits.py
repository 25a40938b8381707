"""Rows compared with plain decoding, bit by bit."""

from pathlib import Path

import pytest

from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.bitwise import BitwiseEngine
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.tools.lab.bits import measure

NEW = 12


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_row_of_every_step_is_counted(tiny_bundle: Path, temperature: float) -> None:
    bundle, sampling = Bundle.open(tiny_bundle), Sampling(temperature=temperature, seed=3)
    gear, tree = bundle.gear("ragged-kv128"), bundle.trees["ragged"][1]
    found = {engine: measure(engine(bundle), [5, 6, 7], sampling, gear, NEW) for engine in (BitwiseEngine, CpuEngine)}
    for counts in found.values():
        steps = counts["prompt"]["rows"]
        assert sum(count["rows"] for count in counts.values()) == steps * (tree.rows + 1) > 0
    for count in found[BitwiseEngine].values():
        assert count == {"rows": count["rows"], "equal": count["rows"], "apart": 0.0, "redrawn": 0}
    # The control: the ordinary engine's rows differ by rounding, which the same comparison must see.
    other = found[CpuEngine]["other"]
    assert other["equal"] < other["rows"] and other["apart"] > 0
