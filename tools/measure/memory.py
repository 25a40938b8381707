"""How much memory one process holds that has opened a bundle and decoded with every gear.

    python -m draftwood.tools.measure.memory BUNDLE [--json]

Prints the proportional and the resident set size beside the size of the weights; Linux only. The engine is the one
that the bundle is decoded with by default.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines import StagedEngine, open_engine
from draftwood.runtime.engines.sessions import share_threads
from draftwood.tools.script import refusing

# What a bundle may cost: its weights once and a quarter (caches, tables, packing), and the process itself.
ALLOWED_RATIO, ALLOWED_MB = 1.25, 300


def measure(folder: Path) -> dict[str, float | int | bool]:
    """Opens the bundle, runs a step of every gear, and reads /proc/self/smaps_rollup. Sizes in MB (1e6 bytes)."""
    bundle = Bundle.open(folder)
    share_threads()
    engine = open_engine(bundle)
    assert isinstance(engine, StagedEngine), "the engines of a bundle with ONNX graphs are"
    for gear in bundle.manifest.gears:
        state = engine.begin(gear.slots)
        engine.start(state, np.zeros(8, np.int64))
        engine.step([state], gear)
    graphs = bundle.manifest.graph_set("onnx")
    assert graphs is not None, "a bundle that a CPU engine runs has ONNX graphs"
    weights = (folder / graphs.weights).stat().st_size / 1e6
    rss, pss = _set_mb("Rss"), _set_mb("Pss")
    return {
        "gears": len(bundle.manifest.gears),
        "weights_mb": weights,
        "rss_mb": rss,
        "pss_mb": pss,
        "allowed_mb": ALLOWED_RATIO * weights + ALLOWED_MB,
        "ok": pss <= ALLOWED_RATIO * weights + ALLOWED_MB,
    }


def _set_mb(kind: str) -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    kilobytes = next(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:"))
    return kilobytes * 1024 / 1e6


@refusing
def main() -> int:
    parser = argparse.ArgumentParser(description="memory of one process that decodes with every gear of a bundle")
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    report = measure(args.bundle)
    if args.json:
        print(json.dumps(report))
    else:
        print(
            f"{report['gears']} gears, weights {report['weights_mb']:.0f} MB, proportional set size"
            f" {report['pss_mb']:.0f} MB of {report['allowed_mb']:.0f} MB allowed, resident {report['rss_mb']:.0f} MB"
        )
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
