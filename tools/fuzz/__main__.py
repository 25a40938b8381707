"""``python -m draftwood.tools.fuzz``: gives every reader files that are wrong, and counts what becomes of it.

Right are two outcomes: a refusal in one line, or a run whose result holds together. Exit code 1 where there is any
other. A case is known by its subject, seed and number: ``--only SUBJECT --seed S --case NUMBER`` runs it again.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OUTCOMES = ("refused", "ran", "traceback", "hang", "abort", "wrong", "executed")
GOOD = OUTCOMES[:2]
# A worker that had threads could not be forked.
ONE_THREAD = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m draftwood.tools.fuzz", description=__doc__)
    made.add_argument("--cases", type=int, default=2000, metavar="N", help="how many (default 2000)")
    made.add_argument("--seed", type=int, default=0, metavar="S", help="of all random numbers (default 0)")
    made.add_argument("--only", action="append", default=[], metavar="SUBJECT", help="this subject; repeatable")
    made.add_argument("--case", type=int, metavar="NUMBER", help="this case alone")
    made.add_argument("--seconds", type=float, metavar="T", help="begin no case after this time")
    made.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="processes")
    made.add_argument("--keep", type=Path, metavar="DIR", help="keep the files of bad cases")
    made.add_argument("--seeds", type=Path, metavar="DIR", help="where the right files are, or are to be made")
    made.add_argument("--json", action="store_true", help="print the report as JSON")
    return made


def main() -> int:
    args = parser().parse_args()
    began = time.monotonic()
    with _seeds(args.seeds) as seeds:
        outcomes = list(run(seeds, args, began))
    report = report_of(outcomes, args.seed, time.monotonic() - began)
    print(json.dumps(report) if args.json else text(report))
    return 0 if report["ok"] else 1


@contextmanager
def _seeds(given: Path | None) -> Iterator[Path]:
    """The folder of seeds, made where it is not there; without a name it goes when the run ends."""
    with tempfile.TemporaryDirectory(prefix="draftwood-seeds-") as temporary:
        folder = given or Path(temporary) / "seeds"
        if not folder.exists():
            _say("making the seeds: a teacher, five drafters, three bundles")
            command = [sys.executable, "-m", "draftwood.tools.fuzz.seeds", str(folder)]
            subprocess.run(command, check=True, env=os.environ | ONE_THREAD)
        yield folder


def run(seeds: Path, args: argparse.Namespace, began: float) -> Iterator[dict[str, Any]]:
    """The outcomes of all cases as they come, from as many workers as are asked for."""
    first, end = (args.case, args.case + 1) if args.case is not None else (0, args.cases)
    workers = [_worker(seeds, args, first + i, end) for i in range(min(args.workers, end - first))]
    done = 0
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            assert worker.stdout is not None
            selector.register(worker.stdout, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                line = key.fileobj.readline()  # type: ignore[union-attr]
                if not line:
                    selector.unregister(key.fileobj)
                    continue
                done += 1
                outcome = json.loads(line)
                _progress(outcome, done, end - first, time.monotonic() - began)
                yield outcome
    if any(worker.wait() for worker in workers):
        raise SystemExit("a worker ended early; its cases are missing")


def _worker(seeds: Path, args: argparse.Namespace, first: int, end: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "draftwood.tools.fuzz.worker", str(seeds), "--seed", str(args.seed)]
    command += ["--numbers", str(first), str(end), str(args.workers)]
    command += [word for name in args.only for word in ("--only", name)]
    command += ["--seconds", str(args.seconds)] if args.seconds else []
    command += ["--keep", str(args.keep)] if args.keep else []
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | ONE_THREAD)


def bad(outcome: dict[str, Any]) -> bool:
    """Whether an outcome is one that must not be."""
    return outcome["what"] not in GOOD


def report_of(outcomes: list[dict[str, Any]], seed: int, seconds: float) -> dict[str, Any]:
    """Counts by outcome, in all and by subject, and every bad case."""
    subjects: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        subjects.setdefault(outcome["subject"], Counter())[outcome["what"]] += 1
    counts = Counter(outcome["what"] for outcome in outcomes)
    return {
        "ok": not any(map(bad, outcomes)),
        "cases": len(outcomes),
        "seed": seed,
        "seconds": round(seconds, 1),
        "outcomes": {what: counts[what] for what in OUTCOMES},
        "subjects": {name: dict(found) for name, found in sorted(subjects.items())},
        "bad": [outcome for outcome in outcomes if bad(outcome)],
    }


def text(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"{'subject':22}" + "".join(f"{what:>11}" for what in OUTCOMES)]
    rows = {**report["subjects"], "all": report["outcomes"]}
    lines += [
        f"{name:22}" + "".join(f"{found.get(what) or '':>11}" for what in OUTCOMES) for name, found in rows.items()
    ]
    lines += [f"BAD {_case(outcome)}: {outcome['mutation']}: {outcome['says']}" for outcome in report["bad"]]
    verdict = "ok" if report["ok"] else f"FAILED: {len(report['bad'])} bad outcomes"
    return "\n".join([*lines, f"{report['cases']} cases, seed {report['seed']}, {report['seconds']} s: {verdict}"])


def _case(outcome: dict[str, Any]) -> str:
    return f"{outcome['what']}: --only {outcome['subject']} --seed {outcome['seed']} --case {outcome['number']}"


def _progress(outcome: dict[str, Any], done: int, cases: int, seconds: float) -> None:
    if bad(outcome):
        _say(f"{_case(outcome)}: {outcome['says'][:200]}")
    if done % 100 == 0 or done == cases:
        _say(f"{done} of {cases} cases, {seconds:.0f} s, {seconds / done * (cases - done):.0f} s left")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
