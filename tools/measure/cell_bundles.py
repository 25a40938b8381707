"""The bundles whose cells are measured: a shipped pair of a size, planned for greedy and for sampled text."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import draftwood
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.engines.sessions import share_threads
from draftwood.tools import demo
from draftwood.tools.demo.sizes import bundle_name, models
from draftwood.trees.calibration_file import read_calibration
from draftwood.trees.gears import Limits
from draftwood.trees.plan_file import format_plan
from draftwood.trees.spec import read_specs

NODES = 15
LEAST_SLOTS = 1024


def opened(size: str, drafter: str, reach: int, work: Path) -> CpuEngine:
    """An engine on the bundle for texts of ``reach`` tokens, which is built unless it is under ``work``."""
    teacher, own = models(size, work, drafter)
    slots = kv_lengths(reach)
    plan = planned(drafter)
    folder = work / bundle_name("cells", size, drafter, (slots, plan))
    if not folder.exists():
        print(f"{size} {drafter}: building {folder.name}", file=sys.stderr, flush=True)
        file = work / f"{folder.name}.plan.json"
        file.write_text(plan)
        specs = read_specs(f"plan:{file}")
        reaching = with_positions(teacher, slots[-1], work / f"{teacher.name}-{slots[-1]}")
        request = draftwood.BuildRequest(model=reaching, drafter=own, trees=specs.trees, slots=slots, plan=specs.plan)
        draftwood.build(request, folder)
    share_threads()
    return CpuEngine(Bundle.open(folder))


def kv_lengths(reach: int) -> tuple[int, ...]:
    """From ``LEAST_SLOTS`` on twice as long each time, until ``reach`` tokens and a tree fit."""
    needed, slots = reach + 2 * NODES + 2, [LEAST_SLOTS]
    while slots[-1] < needed:
        slots.append(2 * slots[-1])
    return tuple(slots)


def planned(drafter: str) -> str:
    """A plan's file: trees by size, from both kinds of shipped rank paths."""
    folder = demo.resolve(drafter)
    greedy, sampled = (read_calibration(folder / f"rank_paths_{kind}.json") for kind in ("greedy", "sampled"))
    return format_plan(draftwood.plan(greedy, Limits(nodes=NODES), sampled=sampled))


def with_positions(model: Path, positions: int, out: Path) -> Path:
    """The same weights under a configuration that allows so many positions, more than the teacher was trained for."""
    out.mkdir(exist_ok=True)
    for path in model.iterdir():
        if path.name != "config.json" and not (out / path.name).exists():
            (out / path.name).symlink_to(path.resolve())
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = max(positions, config["max_position_embeddings"])
    (out / "config.json").write_text(json.dumps(config))
    return out
