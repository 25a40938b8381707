"""A prompt takes the cheapest launches there are for its length."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.device.devices import DEVICES, device
from draftwood.compiler.device.table import modelled_table
from draftwood.compiler.teachers.registry import read_config
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.chunks import KNEE, next_rows
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.engines.opening import Opening
from draftwood.runtime.engines.static import OnnxStaticEngine
from draftwood.tools.demo import SHAPES
from draftwood.trees import Topology


def launches(left: int, room: int, sizes: tuple[int, ...]) -> list[int]:
    """Rows of the launches for a prompt, 1 for a token by itself."""
    found = []
    while left:
        rows = next_rows(left, room, sizes) or 1
        assert rows <= room
        # The last launch takes the smallest graph that holds it.
        found.append(min(size for size in (1, *sizes) if size >= min(rows, left)))
        left, room = max(left - rows, 0), room - rows
    return found


def cost(rows: int) -> int:
    return max(rows, KNEE)


@cache
def least(left: int, room: int, sizes: tuple[int, ...]) -> int:
    """The least that any launches cost, by trying all."""
    if left == 0:
        return 0
    fits = [rows for rows in sizes if rows <= room]
    return min(cost(rows) + least(max(left - rows, 0), room - rows, sizes) for rows in (1, *fits))


@pytest.mark.parametrize("sizes", [(), (16,), (128, 512), (64, 300), (100, 256, 384), (1, 2, 60)])
@pytest.mark.parametrize("spare", [0, 40, 130, 1000])
def test_no_other_launches_cost_less(sizes: tuple[int, ...], spare: int) -> None:
    for left in (1, 2, 15, 17, 99, 127, 129, 200, 256, 301, 511, 513, 640):
        found = launches(left, left + spare, sizes)
        assert sum(map(cost, found)) == least(left, left + spare, sizes), (left, found)


def test_a_long_prompt_takes_the_largest_until_its_end() -> None:
    assert launches(10_130, 20_000, (128, 512)) == [512] * 19 + [512]
    assert launches(512 * 19 + 130, 20_000, (128, 512)) == [512] * 19 + [128, 128]
    assert launches(512 * 19 + 130, 512 * 19 + 130, (128, 512))[:20] == [512] * 19 + [128], "no room for a padded one"


@pytest.mark.parametrize("name", sorted(DEVICES))
@pytest.mark.parametrize("prefill", [(128,), (128, 512), (64, 256, 1024)])
def test_it_is_near_what_the_model_of_a_device_finds_cheapest(name: str, prefill: tuple[int, ...]) -> None:
    """Within 2.5 % over all prompts up to 2000 tokens; a 910B4, whose knee is at 326 rows, is the furthest."""
    table = modelled_table(
        device(name), read_config(SHAPES["shape:openpangu-embedded-7b"]), (1,), (4096,), prefill=prefill
    )
    seconds = {entry.rows: entry.seconds for entry in table.entries if entry.kind in ("decode", "prefill")}
    best = [0.0]
    for left in range(1, 2001):
        best.append(min(time + best[max(left - rows, 0)] for rows, time in seconds.items()))
    mine = [sum(seconds[rows] for rows in launches(left, 4095, prefill)) for left in range(1, 2001)]
    assert sum(mine) / sum(best) < 1.03


def test_a_static_bundle_takes_them(
    save_tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graphs that run are those, and they leave the same as one launch of the CPU's graph."""
    (tmp_path / "teacher").mkdir()
    teacher, trees = save_tiny(tmp_path / "teacher", num_hidden_layers=1), (("plain", Topology.plain()),)
    build(BuildRequest(model=teacher, drafter=None, trees=trees, slots=(128,), prefill_rows=(8, 32)), tmp_path / "b")
    bundle = Bundle.open(tmp_path / "b")
    static, cpu = OnnxStaticEngine(bundle, Opening(threads=1)), CpuEngine(bundle, Opening(threads=1))
    ran, run = [], static.executor.run
    monkeypatch.setattr(static.executor, "run", lambda graph, *rest: (ran.append(graph.rows), run(graph, *rest))[1])
    for length, expected in ((1, [1]), (5, [8]), (30, [32]), (33, [32, 1]), (40, [32, 8]), (100, [32] * 3 + [8])):
        tokens = np.arange(length) % 50 + 3
        ran.clear()
        got = static.prefill(static.begin(128), tokens).logits_RV
        want = cpu.prefill(cpu.begin(128), tokens).logits_RV
        assert ran == expected
        np.testing.assert_allclose(got, want, atol=1e-4)
