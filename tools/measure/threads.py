"""Several threads on one opened bundle: every text must be the plain one, and memory must not grow.

    python -m draftwood.tools.measure.threads BUNDLE [--threads 8] [--texts 400] [--minutes M] [--beside N] [--json]

Random prompts of ids, greedy and sampled, each answered plainly in one thread first and then by all threads at once.
``--minutes`` goes on with the same texts for so long and watches the resident set. ``--beside`` tells how long a text
waits at most while a prompt of so many tokens is read. A text that differs is excused as a tie only as
`draftwood bench` does it.
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
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import Any

import draftwood
from draftwood.errors import RequestError
from draftwood.runtime.engines import StagedEngine
from draftwood.runtime.engines.sessions import share_threads
from draftwood.runtime.opened import OpenedBundle
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.tools.measure.bench import NOISE_TURNS, Difference, explain, logit_noise
from draftwood.tools.script import refusing

Request = dict[str, Any]
# Token ids, or what was raised instead.
Answer = tuple[int, ...] | str


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
    """How many texts were equal to plain ones, which differ and why, what failed, and the resident set over time."""
    asked = random_requests(model, texts, seed)
    plain = []
    for number, request in enumerate(asked, 1):
        plain.append(model.generate(**request, policy="plain").token_ids)
        _progress("plain", number, texts)
    found = list(zip(range(texts), _answers(model, threads, asked), strict=True))
    report: dict[str, Any] = {"threads": threads, "texts": texts, "equal": sum(got == plain[at] for at, got in found)}
    if minutes:
        resident: list[float] = []
        soaked = [answer for block in _soak(model, threads, asked, minutes, resident) for answer in block]
        report["soak_equal"], report["soak_texts"] = sum(got == plain[at] for at, got in soaked), len(soaked)
        report["resident_mb"] = resident
        found += soaked
    errors = [got for _, got in found if isinstance(got, str)]
    others = {(at, got) for at, got in found if got != plain[at] and not isinstance(got, str)}
    differences = [asdict(one) for one in _explained(model, asked, plain, others)] if others else []
    report |= {"errors": len(errors), "first_error": errors[0] if errors else None, "differences": differences}
    return {"ok": not errors and all(one["tie"] for one in differences), **report}


def pause_beside(model: OpenedBundle, tokens: int, seed: int) -> dict[str, float]:
    """Seconds that a prompt of so many tokens takes, and the longest pause of a text that goes on meanwhile."""
    drawn, dims = random.Random(seed), model.manifest.dims
    if not 0 < tokens < dims.context:
        raise RequestError(f"--beside {tokens}: expected 1 to {dims.context - 1} tokens, below the bundle's context")
    prompt = [drawn.randrange(dims.vocabulary) for _ in range(tokens)]
    going = iter(model.stream(prompt[:1], max_new_tokens=dims.context - 2, ignore_eos=True, policy="plain"))
    next(going)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: model.generate(prompt, max_new_tokens=1, policy="plain"))
        pause, last = 0.0, time.monotonic()
        for _ in going:
            now = time.monotonic()
            pause, last = max(pause, now - last), now
            if other.done():
                break
        return {"tokens": tokens, "prompt_seconds": other.result().first_token_seconds, "longest_pause_seconds": pause}


def _answers(model: OpenedBundle, threads: int, asked: list[Request]) -> list[Answer]:
    """Token ids of every request, or what was raised."""

    def answer(request: Request) -> Answer:
        try:
            return model.generate(**request).token_ids
        except Exception as error:  # whatever a library raises is what is looked for
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(answer, asked))


def _explained(
    model: OpenedBundle, asked: list[Request], plain: list[tuple[int, ...]], others: set[tuple[int, tuple[int, ...]]]
) -> Iterator[Difference]:
    """Where texts part, and whether the teacher's own decision there was closer than the noise of its logits."""
    engine = model.engine
    assert isinstance(engine, StagedEngine)
    pairs = zip(asked[:NOISE_TURNS], plain, strict=False)
    noise = max(logit_noise(engine, [*request["prompt"], *tokens]) for request, tokens in pairs)
    for at, got in sorted(others):
        request = asked[at]
        sampling = Sampling(**{name: request[name] for name in ("temperature", "top_p", "seed")})
        yield explain(engine, f"text {at}", request["prompt"], plain[at], got, sampling, noise)


def _soak(
    model: OpenedBundle, threads: int, asked: list[Request], minutes: float, resident: list[float]
) -> Iterator[list[tuple[int, Answer]]]:
    """The answers of blocks of texts for so long; notes the resident set behind each."""
    began, block = time.monotonic(), 8 * threads
    for at in cycle(range(0, len(asked), block)):
        part = range(at, min(at + block, len(asked)))
        yield list(zip(part, _answers(model, threads, [asked[i] for i in part]), strict=True))
        resident.append(resident_mb())
        passed = time.monotonic() - began
        print(f"soak {passed / 60:.1f} of {minutes:g} min, {resident[-1]:.0f} MB", file=sys.stderr, flush=True)
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
    parser.add_argument(
        "--beside", type=int, metavar="N", help="the pause of a text while a prompt of N tokens is read"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    if min(args.threads, args.texts) < 1 or args.minutes < 0:
        raise RequestError("--threads and --texts: expected 1 or more, --minutes 0 or more")
    share_threads()
    with draftwood.open(args.bundle) as model:
        beside = {"beside": pause_beside(model, args.beside, args.seed)} if args.beside is not None else {}
        report = measure(model, args.threads, args.texts, args.minutes, args.seed) | beside
    print(json.dumps(report) if args.json else text(report))
    return 0 if report["ok"] else 1


def text(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"{report['equal']} of {report['texts']} texts of {report['threads']} threads equal to plain ones"]
    for one in report["differences"]:
        what = "a tie" if one["tie"] else "NOT A TIE"
        lines.append(
            f"{one['id']} differs from token {one['position']}: {what}, margin {one['margin']:.1e} of"
            f" {one['tolerance']:.1e} that noise explains"
        )
    if report["errors"]:
        lines.append(f"{report['errors']} errors, first: {report['first_error']}")
    if beside := report.get("beside"):
        lines.append(
            f"beside a prompt of {beside['tokens']} tokens, which took {beside['prompt_seconds']:.2f} s, a text paused"
            f" for {beside['longest_pause_seconds']:.2f} s at most"
        )
    if report.get("resident_mb"):
        sizes = report["resident_mb"]
        lines.append(
            f"soak: {report['soak_equal']} of {report['soak_texts']} texts equal, resident set {sizes[0]:.0f} MB at"
            f" first, {min(sizes):.0f} to {max(sizes):.0f} MB, {sizes[-1]:.0f} MB at last"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
