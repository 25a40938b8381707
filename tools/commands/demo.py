"""``draftwood demo``: the whole line, the way a user goes, on SmolLM2 with trees that are looked up in the text.

With ``--drafter`` on the shipped teacher of 8 M and a drafter that was trained for it: plans draft trees from the rank
paths that `calibrate` counted, builds the plan's gears into a bundle, checks it, times its gears on this machine as
`tune` does, and answers prompts with the default policy, next to plain decoding and to the one fixed tree that promises
most. That pair is widened with zeros to 110 M parameters unless asked otherwise: the same tokens, at the cost of a
model for which speculation is worth while.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwood.errors import BundleError, RequestError
from draftwood.files import cache_home
from draftwood.manifest import SCHEMA_VERSION
from draftwood.tools import demo
from draftwood.version import __version__

if TYPE_CHECKING:
    from draftwood.runtime.bundle import Bundle
    from draftwood.runtime.engines.cpu import CpuEngine
    from draftwood.tools.prompts import Prompt
    from draftwood.trees import RankPaths
    from draftwood.trees.spec import Specs

NODES = 11  # of the largest tree; two smaller ones stand beside it
SLOTS, PREFILL_ROWS = 512, (128,)
TUNE_SECONDS, ROUNDS, NEW_TOKENS = 5.0, 3, 96
PLAIN, FIXED, ADAPTIVE = WAYS = ("plain", "fixed", "adaptive")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--drafter",
        choices=demo.ALL_DRAFTERS,
        help="a trained drafter with the small shipped teacher, not SmolLM2; -w8a8: its linear layers in eight bits",
    )
    parser.add_argument(
        "--size", choices=("native", "110m", "500m"), help="of that teacher, with --drafter (default: 110m)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def main(args: argparse.Namespace) -> int:
    if args.drafter:
        args.size = args.size or "110m"
        return _trained(args)
    if args.size:
        raise RequestError(f"--size {args.size}: is of the shipped teacher, and SmolLM2 has one size; name a --drafter")
    return _language_model(args)


def _language_model(args: argparse.Namespace) -> int:
    """Builds SmolLM2's bundle unless it is kept, times its gears, and asks it twelve questions."""
    import draftwood
    from draftwood.runtime.bundle import Bundle
    from draftwood.runtime.engines.cpu import CpuEngine
    from draftwood.runtime.engines.sessions import share_threads
    from draftwood.runtime.policy.tuned import keep_times
    from draftwood.tools.demo import language_model
    from draftwood.tools.lab.gears import tried_gears
    from draftwood.tools.lab.timer import tune
    from draftwood.tools.prompts import read_prompts

    request = language_model.request()
    folder = _cache_folder("demo-smollm2", (request.model,), request)
    if not args.json:
        print(f"model: SmolLM2-135M-Instruct, {request.model.name}, its four bits as they are")
        print("plan: plain decoding, and trees that copy 3 or 7 tokens from where the text had its last ones before\n")
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
        print("Tokens a step, milliseconds a step and tokens a second of two questions that are not asked below.\n")
        _print_gears(gears, "the fastest tree for both")
    answers = answer_all(engine, read_prompts(language_model.QUESTIONS), fixed, times, NEW_TOKENS, 1)
    ok = all(one["tokens_equal"] for one in answers)
    if args.json:
        report = {"ok": ok, "bundle": str(folder), "build_seconds": round(built, 1), "gears": gears}
        print(json.dumps(report | {"speedup": speedups(answers), "prompts": answers}))
    else:
        _print_answers(answers, fixed, 1)
    return 0 if ok else 1


def _trained(args: argparse.Namespace) -> int:
    from draftwood.runtime.bundle import Bundle
    from draftwood.runtime.engines.cpu import CpuEngine
    from draftwood.runtime.engines.sessions import share_threads
    from draftwood.runtime.policy.tuned import keep_times
    from draftwood.tools.comparison.check import check, sample_prompts
    from draftwood.tools.lab.timer import best_fixed, tune
    from draftwood.tools.prompts import read_prompts

    paths, specs = demo.counted(args.drafter, sampled=False).rank_paths(), planned(args.drafter)
    if not args.json:
        _print_plan(args.drafter, paths, specs)
    folder = _cache_folder(f"{args.drafter}-{args.size}", demo.FOLDER.rglob("*"), (NODES, SLOTS, PREFILL_ROWS))
    built = _built(folder, lambda: _build(specs, folder, args))
    share_threads()
    bundle = Bundle.open(folder)
    _say("checking every graph against eager PyTorch")
    report = check(bundle, list(sample_prompts(bundle, None, 1)))
    engine = CpuEngine(bundle)
    _say("timing the gears on this machine, as draftwood tune does")
    times = tune(engine, TUNE_SECONDS)
    keep_times(bundle, "cpu", None, times)
    fixed = best_fixed(bundle, paths, times)
    gears = _gears(bundle, paths, times, fixed)
    if not args.json:
        _print_bundle(folder, report, gears)
    answers = answer_all(engine, read_prompts(None), fixed, times, NEW_TOKENS, ROUNDS)
    ok = bool(report["ok"]) and all(one["tokens_equal"] for one in answers)
    if args.json:
        found = {"ok": ok, "bundle": str(folder), "build_seconds": round(built, 1), "check_ok": report["ok"]}
        print(json.dumps(found | {"gears": gears, "speedup": speedups(answers), "prompts": answers}))
    else:
        _print_answers(answers, fixed, ROUNDS)
    return 0 if ok else 1


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def planned(drafter: str) -> Specs:
    """The plan from the counts that are shipped, as ``build --tree plan:FILE`` reads it."""
    from draftwood.tools.lab.bundles import planned_specs

    return planned_specs(drafter, NODES)[1]


def _cache_folder(name: str, files: Iterable[Path], content: object) -> Path:
    """A folder named by all that goes into the bundle and by the code that builds it, so that nothing old is met."""
    digest = hashlib.sha256(f"{__version__} {SCHEMA_VERSION} {content!r}".encode())
    package = Path(demo.FOLDER).parents[1]
    code = (path for folder in ("trees", "kernels", "compiler") for path in (package / folder).rglob("*"))
    for path in sorted([*files, *code]):
        if path.suffix in (".safetensors", ".json", ".py", ".stats", ".gguf"):
            digest.update(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}".encode())
    return cache_home() / "draftwood" / f"{name}-{digest.hexdigest()[:16]}"


def _built(folder: Path, build: Callable[[], object]) -> float:
    """Sees to it that the bundle is there; returns the seconds it took.

    What another demo made is used, also one that is still at it; what does not open is made again.
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
    return time.monotonic() - began


def _build(specs: Specs, folder: Path, args: argparse.Namespace) -> None:
    import draftwood
    from draftwood.tools.demo.sizes import models

    with tempfile.TemporaryDirectory(prefix="draftwood-demo-") as work:
        _say(f"widening the models to {args.size}" if args.size != "native" else "taking the models as they are")
        teacher, drafter = models(args.size, Path(work), args.drafter)
        request = draftwood.BuildRequest(
            model=teacher,
            drafter=drafter,
            trees=specs.trees,
            slots=(SLOTS,),
            prefill_rows=PREFILL_ROWS,
            int8_drafter=demo.in_int8(args.drafter),
            plan=specs.plan,
        )
        draftwood.build(request, folder, progress=lambda what: _say(f"building {what}"))


def _gears(bundle: Bundle, paths: RankPaths, times: Sequence[Any], fixed: str) -> list[dict[str, Any]]:
    """What every gear promises: tokens a step by the counts, milliseconds a step as measured."""
    from draftwood.tools.lab.timer import TYPICAL, us_at

    found = []
    for gear in bundle.manifest.gears:
        tree, ms = bundle.trees[gear.tree][0], us_at(times, gear.name, TYPICAL) / 1e3
        expected = paths.expected_accept_length(tree)
        found.append(
            {
                "gear": gear.name,
                "rows": tree.rows,
                "expected_accept_length": expected,
                "ms_a_step": ms,
                "expected_tokens_per_s": 1e3 * expected / ms,
                "fixed": gear.name == fixed,
            }
        )
    return found


def answer_all(
    engine: CpuEngine, prompts: Sequence[Prompt], fixed: str, times: Sequence[Any], max_new_tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """Prompts, answered each way in turns; of the rounds' times the median."""
    from draftwood.runtime.decoding import Options
    from draftwood.runtime.policy import Policies
    from draftwood.tools.lab.conversations import turn_prompts
    from draftwood.tools.lab.runner import Way, measure, median_seconds, warm_up

    bundle, options = engine.bundle, Options(max_new_tokens=max_new_tokens)
    policies = {
        PLAIN: Policies(bundle, "plain"),
        FIXED: Policies(bundle, fixed),
        ADAPTIVE: Policies(bundle, times=tuple(times)),
    }
    ways = {name: Way(engine, chosen) for name, chosen in policies.items()}
    answered: dict[str, Sequence[int]] = {}  # of a conversation its last answer, which the next turn follows
    found = list[dict[str, Any]]()
    for number, (prompt, ids) in enumerate(turn_prompts(engine, prompts, answered)):
        if not found:
            warm_up(ways, ids, options)
        _say(f"answering {prompt.id}, {number + 1} of {len(prompts)}")
        figures, plain = measure(ways, ids, options, rounds, number)
        answered[prompt.conversation] = plain.token_ids
        answer: dict[str, Any] = {
            "id": prompt.id,
            "tokens": len(plain.token_ids),
            "tokens_equal": all(one["equal"] for one in figures.values()),
            "text": plain.text or "",
        }
        for name, one in figures.items():
            seconds = max(median_seconds(one), 1e-9)
            answer[name] = {
                "seconds": seconds,
                "tokens_per_s": max(one["tokens"] - 1, 1) / seconds,
                "accept_length": (one["tokens"] - 1) / max(one["steps"], 1),
            }
        found.append(answer)
    return found


def speedups(answers: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Over plain decoding, all prompts taken together: a long answer counts for what it is."""
    seconds = {name: sum(one[name]["seconds"] for one in answers) for name in WAYS}
    return {name: seconds[PLAIN] / seconds[name] for name in (FIXED, ADAPTIVE)}


def _print_plan(drafter: str, paths: RankPaths, specs: Specs) -> None:
    from draftwood.trees import Topology, draw_text

    trees = [(name, tree) for name, tree in specs.trees if isinstance(tree, Topology) and tree.nodes]
    name, tree = trees[len(trees) // 2]
    rows, bits = ", ".join(str(tree.rows) for _, tree in trees), ", its linear layers in eight bits (w8a8)"
    labels = {row: f"{100 * paths.visits(path) / paths.contexts:.0f} %" for row, path in enumerate(tree.paths, 1)}
    print(f"drafter: {drafter}{bits if demo.in_int8(drafter) else ''}")
    print(
        f"plan: draft trees of {rows} rows. A row is a token that the teacher checks in one step; the root is the last"
    )
    print(
        f"token of the text. They are chosen from {paths.contexts} places in other texts, where `draftwood calibrate`"
    )
    print("counted how often the teacher's next tokens were the drafter's first, second, ... choices.\n")
    print(f"{name}, which should gain {paths.expected_accept_length(tree):.2f} tokens a step. (0, 0) is the first")
    print("choice (0) behind a first choice (0); percent: how often the teacher wrote just that.\n")
    print(draw_text(tree, labels), end="\n\n", flush=True)


def _print_bundle(folder: Path, report: dict[str, Any], gears: Sequence[dict[str, Any]]) -> None:
    scored = [one for one in report["comparisons"] if one["quantity"] == "draft scores"]
    worst = max(one["difference"] for one in report["comparisons"] if not one["quantity"].startswith("draft"))
    caught = sum(control["caught"] for control in report["controls"])
    print(f"bundle: {folder}")
    print(
        f"check: {len(report['comparisons'])} comparisons with eager PyTorch", "passed." if report["ok"] else "FAILED."
    )
    print(f"Largest error {worst:.1e} (limit {report['tolerance']:.0e}).")
    if scored:
        score = max(scored, key=lambda one: one["difference"])
        print(
            f"Draft scores differ by {score['difference']:.0e} (limit {score['tolerance']:.0e}): drafts only propose,"
        )
        print("so their rounding changes no text.")
    print(f"{caught} of {len(report['controls'])} faults that were put in on purpose were found.\n")
    print("Expected tokens a step, by the counts; milliseconds a step, timed here; tokens a second, from both.\n")
    _print_gears(gears, "the fixed tree that promises most")


def _print_gears(gears: Sequence[dict[str, Any]], why: str) -> None:
    wide = max(len(one["gear"]) for one in gears)
    print(f"{'gear':{wide}} {'rows':>4} {'tokens a step':>14} {'ms a step':>10} {'tokens/s':>9}")
    for one in gears:
        mark = f"  <- {why}" if one["fixed"] else ""
        print(
            f"{one['gear']:{wide}} {one['rows']:4} {one['expected_accept_length']:14.2f} {one['ms_a_step']:10.2f}"
            f" {one['expected_tokens_per_s']:9.0f}{mark}"
        )
    print(flush=True)


def _print_answers(answers: Sequence[dict[str, Any]], fixed: str, rounds: int) -> None:
    total, same = speedups(answers), sum(one["tokens_equal"] for one in answers)
    times = f"medians of {rounds} rounds" if rounds > 1 else "each once"
    print(f"Tokens a second, all three in turns, {times}. plain: one token a step.")
    print(f"fixed: always {fixed}.")
    print("adaptive: the default policy, which chooses a gear for every step; the last two columns are its own.\n")
    columns = f"{'prompt':12} {'tokens':>6} {'same':>5} {'plain':>7} {'fixed':>7} {'adaptive':>9}"
    print(f"{columns} {'tokens a step':>14} {'speed-up':>9}")
    for one in answers:
        plain, tree, adaptive = (one[name]["tokens_per_s"] for name in WAYS)
        print(
            f"{one['id']:12} {one['tokens']:6} {'yes' if one['tokens_equal'] else 'NO':>5} {plain:7.0f} {tree:7.0f}"
            f" {adaptive:9.0f} {one[ADAPTIVE]['accept_length']:14.2f} {adaptive / plain:9.2f}"
        )
    print(f"\n{same} of {len(answers)} answers are plain decoding's, token for token, with both.")
    print(f"Speed-up over all tokens: adaptive {total[ADAPTIVE]:.2f}, fixed {total[FIXED]:.2f}.")
    for one in answers[:2]:
        print(f"\nThe answer to {one['id']!r}:\n{one['text'].strip()}")
