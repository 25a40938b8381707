"""``python -m draftwood.tests.fuzz``: gives every reader files that are wrong, and counts the outcomes.

Right are two outcomes: a refusal in one line, or a run whose result holds together. Exit code 1 if there is any
other. A case is known by its subject, seed and number: ``--only SUBJECT --seed S --case NUMBER`` runs it again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from draftwood.tests.fuzz.worker import OUTCOMES, Outcome, case

# A worker that had threads could not be forked.
ONE_THREAD = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m draftwood.tests.fuzz", description=__doc__)
    made.add_argument("--cases", type=int, default=2000, metavar="N", help="how many (default 2000)")
    made.add_argument("--seed", type=int, default=0, metavar="S", help="of all random numbers (default 0)")
    made.add_argument("--only", action="append", default=[], metavar="SUBJECT", help="these, such as 'layout-*'")
    made.add_argument("--case", type=int, metavar="NUMBER", help="this case alone")
    made.add_argument("--seconds", type=float, default=float("inf"), metavar="T", help="begin no case after this time")
    made.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="processes")
    made.add_argument("--keep", type=Path, metavar="DIR", help="keep the files of bad cases")
    made.add_argument("--seeds", type=Path, metavar="DIR", help="where the right files are, or are to be made")
    made.add_argument("--json", action="store_true", help="print the report as JSON")
    return made


def main() -> int:
    from draftwood.tests.fuzz.subjects import SUBJECTS, named

    args = parser().parse_args()
    if not named(tuple(args.only)):
        parser().error(f"--only {' '.join(args.only)}: expected some of {', '.join(one.name for one in SUBJECTS)}")
    os.environ.update(ONE_THREAD)  # what is started from here on has it from its beginning
    with _seeds(args.seeds) as seeds:
        began = time.monotonic()
        outcomes = list(run(seeds, args, began))
    report = report_of(outcomes, args.seed, time.monotonic() - began)
    print(json.dumps(report) if args.json else text(report))
    return 0 if report["ok"] else 1


@contextmanager
def _seeds(given: Path | None) -> Iterator[Path]:
    """The folder of seeds, made if it is not there; without a name it goes when the run ends."""
    from draftwood.tests.fuzz.seeds import make_seeds

    with tempfile.TemporaryDirectory(prefix="draftwood-seeds-") as temporary:
        folder = given or Path(temporary) / "seeds"
        if not folder.exists():
            _say("making the seeds: a teacher, five drafters, three bundles")
            make_seeds(folder)
        yield folder


def run(seeds: Path, args: argparse.Namespace, began: float) -> Iterator[Outcome]:
    """The outcomes of all cases in their order, from as many workers as are asked for."""
    numbers = range(args.case, args.case + 1) if args.case is not None else range(args.cases)
    one = partial(case, seeds, tuple(args.only), args.seed, args.keep, began + args.seconds)
    spawned = multiprocessing.get_context("spawn")  # torch has threads in this process, which made the seeds
    with ProcessPoolExecutor(args.workers, mp_context=spawned) as pool:
        for done, outcome in enumerate(pool.map(one, numbers), 1):
            if outcome is None:
                return
            _progress(outcome, done, len(numbers), time.monotonic() - began)
            yield outcome


def report_of(outcomes: Sequence[Outcome], seed: int, seconds: float) -> dict[str, Any]:
    """Counts by outcome, in all and by subject, and every bad case."""
    subjects: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        subjects.setdefault(outcome.subject, Counter())[outcome.what] += 1
    counts = Counter(outcome.what for outcome in outcomes)
    bad = [asdict(outcome) for outcome in outcomes if not outcome.good]
    return {
        "ok": not bad,
        "cases": len(outcomes),
        "seed": seed,
        "seconds": round(seconds, 1),
        "outcomes": {what: counts[what] for what in OUTCOMES},
        "subjects": {name: dict(found) for name, found in sorted(subjects.items())},
        "bad": bad,
    }


def text(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"{'subject':22}" + "".join(f"{what:>11}" for what in OUTCOMES)]
    for name, found in {**report["subjects"], "all": report["outcomes"]}.items():
        lines.append(f"{name:22}" + "".join(f"{found.get(what) or '':>11}" for what in OUTCOMES))
    lines += [f"BAD {Outcome(**one).known_by}: {one['mutation']}: {one['says']}" for one in report["bad"]]
    verdict = "ok" if report["ok"] else f"FAILED: {len(report['bad'])} bad outcomes"
    return "\n".join([*lines, f"{report['cases']} cases, seed {report['seed']}, {report['seconds']} s: {verdict}"])


def _progress(outcome: Outcome, done: int, cases: int, seconds: float) -> None:
    if not outcome.good:
        _say(f"{outcome.known_by}: {outcome.says[:200]}")
    if done % 100 == 0 or done == cases:
        _say(f"{done} of {cases} cases, {seconds:.0f} s, {seconds / done * (cases - done):.0f} s left")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
