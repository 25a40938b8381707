"""Several threads on one opened bundle: every text must be the plain one, and memory must not grow.

    python -m draftwood.tools.measure.threads BUNDLE [--threads 8] [--texts 400] [--minutes M] [--json]

Random prompts of ids, greedy and sampled, each answered plainly in one thread first and then by all threads at once.
``--minutes`` goes on with the same texts for so long and watches the resident set.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import Any

import draftwood
from draftwood.errors import RequestError
from draftwood.runtime.engines.sessions import share_threads
from draftwood.runtime.opened import OpenedBundle
from draftwood.tools.script import refusing

Request = dict[str, Any]


def random_requests(model: OpenedBundle, count: int, seed: int) -> list[Request]:
    """Prompts of every length up to half the context, answers of up to 64 tokens, greedy and sampled."""
    drawn, dims = random.Random(seed), model.manifest.dims
    return [
        {
            "prompt": [drawn.randrange(dims.vocabulary) for _ in range(drawn.randint(1, dims.context // 2))],
            "max_new_tokens": drawn.randint(1, min(64, dims.context // 2)),
            "temperature": drawn.choice((0.0, 0.7, 1.0)),
            "top_p": drawn.choice((1.0, 0.9)),
            "seed": drawn.randrange(2**32),
            "ignore_eos": True,
        }
        for _ in range(count)
    ]


def measure(model: OpenedBundle, threads: int, texts: int, minutes: float, seed: int) -> dict[str, Any]:
    """How many texts were equal to plain ones, how many failed, and the resident set over time."""
    asked = random_requests(model, texts, seed)
    plain = []
    for number, request in enumerate(asked, 1):
        plain.append(model.generate(**request, policy="plain").token_ids)
        _progress("plain", number, texts)
    report = _compare(model, threads, asked, plain)
    soaked: list[dict[str, float]] = []
    if minutes:
        soaked = list(_soak(model, threads, asked, plain, minutes))
        report["soak_equal"] = sum(int(one["equal"]) for one in soaked)
        report["soak_texts"] = sum(int(one["texts"]) for one in soaked)
        report["resident_mb"] = [one["resident_mb"] for one in soaked]
    ok = report["equal"] == texts and all(one["equal"] == one["texts"] for one in soaked)
    return {"ok": ok, "threads": threads, "texts": texts, **report}


def _compare(model: OpenedBundle, threads: int, asked: list[Request], plain: list[tuple[int, ...]]) -> dict[str, Any]:
    def answered(request: Request) -> tuple[int, ...] | str:
        try:
            return model.generate(**request).token_ids
        except Exception as error:  # whatever a library raises is what is looked for
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(answered, asked))
    errors = [one for one in found if isinstance(one, str)]
    return {
        "equal": sum(one == want for one, want in zip(found, plain, strict=True)),
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
    }


def _soak(
    model: OpenedBundle, threads: int, asked: list[Request], plain: list[tuple[int, ...]], minutes: float
) -> Iterator[dict[str, float]]:
    """Blocks of texts for so long: how many, how many equal, and the resident set behind each."""
    began, block = time.monotonic(), 8 * threads
    for at in cycle(range(0, len(asked), block)):
        part = slice(at, at + block)
        found = _compare(model, threads, asked[part], plain[part])
        passed = time.monotonic() - began
        yield {"texts": len(asked[part]), "equal": found["equal"], "resident_mb": resident_mb()}
        print(f"soak {passed / 60:.1f} of {minutes:g} min, {resident_mb():.0f} MB", file=sys.stderr, flush=True)
        if passed > 60 * minutes:
            return


def resident_mb() -> float:
    """The process's resident set now, in MB (1e6 bytes)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def _progress(what: str, done: int, total: int) -> None:
    if done % 50 == 0 or done == total:
        print(f"{what}: {done} of {total} texts", file=sys.stderr, flush=True)


@refusing
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="several threads on one opened bundle")
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--threads", type=int, default=8, metavar="N", help="threads that ask (default 8)")
    parser.add_argument("--texts", type=int, default=400, metavar="N", help="texts they answer (default 400)")
    parser.add_argument("--minutes", type=float, default=0.0, metavar="M", help="go on for so long, watching memory")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    if min(args.threads, args.texts) < 1 or args.minutes < 0:
        raise RequestError("--threads and --texts: expected 1 or more, --minutes 0 or more")
    share_threads()
    with draftwood.open(args.bundle) as model:
        report = measure(model, args.threads, args.texts, args.minutes, args.seed)
    print(json.dumps(report) if args.json else text(report))
    return 0 if report["ok"] else 1


def text(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"{report['equal']} of {report['texts']} texts of {report['threads']} threads equal to plain ones"]
    if report["errors"]:
        lines.append(f"{report['errors']} errors, first: {report['first_error']}")
    if report.get("resident_mb"):
        sizes = report["resident_mb"]
        lines.append(
            f"soak: {report['soak_equal']} of {report['soak_texts']} texts equal, resident set {sizes[0]:.0f} MB at"
            f" first, {min(sizes):.0f} to {max(sizes):.0f} MB, {sizes[-1]:.0f} MB at last"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
