"""Runs one dumped step again, on any engines, and names the first tensor that differs from the reference's.

python -m draftwood.tools.reference.replay DUMP --bundle BUNDLE [--model DIR] [--engine NAME] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import RequestError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines import StagedEngine, engine_names, open_engine
from draftwood.runtime.engines.sessions import share_threads
from draftwood.runtime.proof import HALF_TOLERANCE, TOLERANCE
from draftwood.tools.comparison.compare import relative_difference
from draftwood.tools.reference.dump import StepDump, Tensors, load_rows, run_step
from draftwood.tools.script import refusing

RECORDED = "recorded"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The first tensor of an engine that differs; ``tensor`` is None where all agree.

    ``engine`` is "recorded" for what the failing engine had when the dump was written. ``difference`` is
    relative to the tensor's largest expected value (at least 1).
    """

    engine: str
    tensor: str | None
    where: str
    difference: float


def replay(dump: StepDump, engines: Mapping[str, StagedEngine], tolerance: float = TOLERANCE) -> list[Finding]:
    """What was recorded, then every engine run again from the reference's committed rows, against the reference.

    A recorded difference in a committed row is the fault of an earlier step: the caches had parted before.

    Raises:
        RequestError: an engine's bundle has another teacher than the dump.
    """
    findings = [first_tensor(RECORDED, dump, dump.got, tolerance)]
    for name, engine in engines.items():
        if engine.bundle.manifest.teacher.digest != dump.teacher:
            raise RequestError(f"{engine.bundle.folder}: its teacher is not the one of the dump; give the bundle's own")
        state = load_rows(engine, dump.slots, dump.text, dump.expected)
        findings.append(first_tensor(name, dump, run_step(engine, state, dump.tokens, dump.tree), tolerance))
    return findings


def first_tensor(engine: str, dump: StepDump, got: Tensors, tolerance: float) -> Finding:
    """The first tensor in the order of the computation: committed rows, then branch rows by layer, then outputs."""
    worst = 0.0
    for name, part, mine, want in _stages(dump, got):
        difference = relative_difference(mine, want)
        worst = max(worst, difference)
        if difference > tolerance:
            row = _first_row(mine, want, tolerance, axis=1 if "_cache." in name else 0)
            return Finding(engine=engine, tensor=name, where=f"{part} {row}", difference=difference)
    return Finding(engine=engine, tensor=None, where="", difference=worst)


def _stages(dump: StepDump, got: Tensors) -> Iterator[tuple[str, str, NDArray, NDArray]]:
    """Name, what a row is called, what was got and what was expected, in the order of the computation."""
    length, caches = len(dump.text), [name for name in dump.expected if "_cache." in name]
    for part, rows in (("committed slot", slice(0, length)), ("branch row", slice(length, None))):
        for name in caches:
            mine, want = (tensors[name][:, rows] for tensors in (got, dump.expected))
            count = min(mine.shape[1], want.shape[1])
            yield name, part, mine[:, :count], want[:, :count]
    for name, want in dump.expected.items():
        if name == "choice" and name in got:
            # The expected logit of what was chosen: equal unless a choice differs by more than rounding.
            order = np.arange(len(want))
            yield name, "row", dump.expected["logits"][order, got[name]], dump.expected["logits"][order, want]
        elif name not in caches and name in got:
            yield name, "row", got[name], want


def _first_row(got: NDArray, want: NDArray, tolerance: float, axis: int) -> int:
    """The first row in which a difference passes the tolerance."""
    apart = np.abs(got - want) / max(1.0, float(np.abs(want).max()))
    others = tuple(i for i in range(apart.ndim) if i != axis)
    return int(np.flatnonzero(~(apart.max(axis=others) <= tolerance))[0])


def describe(dump: StepDump, findings: list[Finding]) -> str:
    """The report in words."""
    lines = [f"{dump.reason}: {dump.message}", f"{len(dump.text)} tokens committed, {dump.tree.rows} rows"]
    width = max(len(found.engine) for found in findings)
    for found in findings:
        verdict = f"differs first in {found.tensor}, {found.where}," if found.tensor else "agrees,"
        lines.append(f"{found.engine:{width}} {verdict} by {found.difference:.1e}")
    return "\n".join(lines)


@refusing
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="run one dumped step again and name the first tensor that differs")
    parser.add_argument("dump", type=Path, metavar="DUMP")
    parser.add_argument("--bundle", type=Path, required=True, metavar="BUNDLE")
    parser.add_argument("--model", metavar="DIR", help="also run the teacher with transformers")
    parser.add_argument("--engine", choices=engine_names(), default="cpu", help="what runs the bundle (default cpu)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run modelling code from the teacher's folder")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    share_threads()
    dump, bundle = StepDump.read(args.dump), Bundle.open(args.bundle)
    engines = {args.engine: open_engine(bundle, args.engine)}
    if args.model:
        from draftwood.tools.demo import resolve
        from draftwood.tools.reference.transformers import HfEngine

        engines["transformers"] = HfEngine.open(bundle, resolve(args.model), args.trust_remote_code)
    # The NPU's graphs compute in half precision, whatever the reference did.
    findings = replay(dump, engines, HALF_TOLERANCE if args.engine in ("npu", "ge") else TOLERANCE)
    print(json.dumps([asdict(found) for found in findings]) if args.json else describe(dump, findings))
    return 1 if any(found.tensor for found in findings[1:]) else 0


if __name__ == "__main__":
    sys.exit(main())
