"""``draftwood demo``: SmolLM2 with its EAGLE-3 layer and drafts looked up in the text, the way a user goes.

It builds a bundle, times its gears on this machine as `tune` does, and tries them on two questions. Then it answers
twelve others in three ways: by plain decoding, by the fixed tree that was fastest, and by the default policy.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwood.errors import BundleError
from draftwood.files import cache_home, json_text
from draftwood.manifest import SCHEMA_VERSION
from draftwood.tools import demo
from draftwood.version import __version__

if TYPE_CHECKING:
    from draftwood.compiler.bundle.request import BuildRequest
    from draftwood.runtime.engines.cpu import CpuEngine
    from draftwood.tools.prompts import Prompt

TUNE_SECONDS, NEW_TOKENS = 5.0, 96
PLAIN, FIXED, ADAPTIVE = WAYS = ("plain", "fixed", "adaptive")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def main(args: argparse.Namespace) -> int:
    import draftwood
    from draftwood.runtime.bundle import Bundle
    from draftwood.runtime.engines.cpu import CpuEngine
    from draftwood.runtime.tuned import keep_times
    from draftwood.threads import share_threads
    from draftwood.tools.demo import language_model
    from draftwood.tools.measure.gears import tried_gears
    from draftwood.tools.measure.tune import tune
    from draftwood.tools.prompts import read_prompts

    request = language_model.request()
    folder = _cache_folder(request)
    if not args.json:
        print(f"model: SmolLM2-135M-Instruct, {request.model.name}, its four bits as they are")
        print("drafter: demo-eagle3, one layer that was trained for it, in eight bits")
        print("plan: plain decoding, chains that the drafter drafts, and chains that copy from where the text had its")
        print("last tokens before\n")
    built = _built(folder, lambda: draftwood.build(request, folder, progress=lambda what: _say(f"building {what}")))
    share_threads()
    bundle = Bundle.open(folder)
    engine = CpuEngine(bundle)
    _say("timing the gears on this machine, as draftwood tune does")
    times = tune(engine, TUNE_SECONDS)
    keep_times(bundle, "cpu", None, times)
    gears = tried_gears(engine, language_model.CHOOSING, NEW_TOKENS)
    fixed = next(gear["gear"] for gear in gears if gear["fixed"])
    if not args.json:
        print(f"bundle: {folder}\n")
        _print_gears(gears)
    answers = answer_all(engine, read_prompts(language_model.QUESTIONS), fixed, times)
    ok = all(answer["tokens_equal"] for answer in answers)
    if args.json:
        report = {"ok": ok, "bundle": str(folder), "build_seconds": round(built, 1), "gears": gears}
        print(json_text(report | {"speedup": speedups(answers), "prompts": answers}))
    else:
        _print_answers(answers, fixed)
    return 0 if ok else 1


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _cache_folder(request: BuildRequest) -> Path:
    """A folder named by all that goes into the bundle and by the code that builds it, so that nothing old is met."""
    digest = hashlib.sha256(f"{__version__} {SCHEMA_VERSION} {request!r}".encode())
    package = demo.FOLDER.parents[1]
    code = (path for folder in ("trees", "kernels", "compiler") for path in (package / folder).rglob("*"))
    shared = package.glob("*.py")  # contract, manifest, noise
    drafter = request.drafter.iterdir() if request.drafter else ()
    for path in sorted([request.model, *drafter, *code, *shared]):
        if path.suffix in (".gguf", ".json", ".py", ".safetensors"):
            digest.update(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}".encode())
    return cache_home() / "draftwood" / f"{demo.KEPT}-{digest.hexdigest()[:16]}"


def _built(folder: Path, build: Callable[[], object]) -> float:
    """Sees to it that the bundle is there; returns the seconds it took.

    Another demo's results are used, also those of a demo that still runs; a bundle that does not open is made again.
    """
    from draftwood.compiler.bundle.staging import exclusive
    from draftwood.runtime.bundle import Bundle

    began = time.monotonic()
    with exclusive(folder, tell=_say):
        try:
            Bundle.open(folder)
            _say(f"taking the bundle that was built before, {folder}")
        except BundleError:
            shutil.rmtree(folder, ignore_errors=True)
            build()
            _remove_older(folder)
    return time.monotonic() - began


def _remove_older(folder: Path) -> None:
    """Leaves a new bundle and the last one before it: every version of the code builds its own, of 370 MB."""
    others = [path for path in folder.parent.glob(f"{demo.KEPT}-*") if path != folder]
    for older in sorted(others, key=lambda path: path.stat().st_mtime)[:-1]:
        shutil.rmtree(older, ignore_errors=True)


def answer_all(engine: CpuEngine, prompts: Sequence[Prompt], fixed: str, times: Sequence[Any]) -> list[dict[str, Any]]:
    """Prompts, answered each way in turns."""
    from draftwood.runtime.options import Options
    from draftwood.runtime.policy import Policies
    from draftwood.tools.measure.conversations import turn_prompts
    from draftwood.tools.measure.runner import Way, measure, median_seconds, warm_up

    bundle, options = engine.bundle, Options(max_new_tokens=NEW_TOKENS)
    policies = {
        PLAIN: Policies(bundle, "plain"),
        FIXED: Policies(bundle, fixed),
        ADAPTIVE: Policies(bundle, times=tuple(times)),
    }
    ways = {name: Way(engine, chosen) for name, chosen in policies.items()}
    answered: dict[str, Sequence[int]] = {}  # of a conversation its last answer, which the next turn follows
    answers = list[dict[str, Any]]()
    for number, (prompt, ids) in enumerate(turn_prompts(engine, prompts, answered)):
        if not answers:
            warm_up(ways, ids, options)
        _say(f"answering {prompt.id}, {number + 1} of {len(prompts)}")
        figures, plain = measure(ways, ids, options, 1, number)
        answered[prompt.conversation] = plain.token_ids
        answer: dict[str, Any] = {
            "id": prompt.id,
            "tokens": len(plain.token_ids),
            "tokens_equal": all(way["equal"] for way in figures.values()),
            "text": plain.text or "",
        }
        for name, way in figures.items():
            seconds = max(median_seconds(way), 1e-9)
            answer[name] = {
                "seconds": seconds,
                "tokens_per_s": max(way["tokens"] - 1, 1) / seconds,
                "accept_length": (way["tokens"] - 1) / max(way["steps"], 1),
            }
        answers.append(answer)
    return answers


def speedups(answers: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Over plain decoding, all prompts taken together: a long answer counts by its length."""
    seconds = {name: sum(answer[name]["seconds"] for answer in answers) for name in WAYS}
    return {name: seconds[PLAIN] / seconds[name] for name in (FIXED, ADAPTIVE)}


def _print_gears(gears: Sequence[dict[str, Any]]) -> None:
    print("Tokens a step, milliseconds a step and tokens a second of two questions that are not asked below.\n")
    wide = max(len(gear["gear"]) for gear in gears)
    print(f"{'gear':{wide}} {'rows':>4} {'tokens a step':>14} {'ms a step':>10} {'tokens/s':>9}")
    for gear in gears:
        mark = "  <- the fastest tree for both" if gear["fixed"] else ""
        print(
            f"{gear['gear']:{wide}} {gear['rows']:4} {gear['accept_length']:14.2f} {gear['ms_a_step']:10.2f}"
            f" {gear['tokens_per_s']:9.0f}{mark}"
        )
    print(flush=True)


def _print_answers(answers: Sequence[dict[str, Any]], fixed: str) -> None:
    from draftwood.tools.demo.language_model import SHOWN

    total, same = speedups(answers), sum(answer["tokens_equal"] for answer in answers)
    print("Tokens a second, all three in turns, each once. plain: one token a step.")
    print(f"fixed: always {fixed}.")
    print("adaptive: the default policy, which chooses a gear for every step; the last two columns are its own.\n")
    columns = f"{'prompt':12} {'tokens':>6} {'same':>5} {'plain':>7} {'fixed':>7} {'adaptive':>9}"
    print(f"{columns} {'tokens a step':>14} {'speed-up':>9}")
    for answer in answers:
        plain, tree, adaptive = (answer[name]["tokens_per_s"] for name in WAYS)
        print(
            f"{answer['id']:12} {answer['tokens']:6} {'yes' if answer['tokens_equal'] else 'NO':>5} {plain:7.0f}"
            f" {tree:7.0f} {adaptive:9.0f} {answer[ADAPTIVE]['accept_length']:14.2f} {adaptive / plain:9.2f}"
        )
    print(f"\n{same} of {len(answers)} answers are plain decoding's, token for token, with both.")
    print(f"Speed-up over all tokens: adaptive {total[ADAPTIVE]:.2f}, fixed {total[FIXED]:.2f}.")
    for answer in (answer for answer in answers if answer["id"] in SHOWN):
        print(f"\nThe answer to {answer['id']!r}:\n{answer['text'].strip()}")
