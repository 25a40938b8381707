"""``draftwood demo``: the whole line on the shipped models, from planning a tree to answering prompts.

Plans the best draft tree of several sizes from the rank paths that were counted when the demo drafter was
trained, builds and checks a bundle, times every gear on this machine, takes the one that promises the most
tokens a second, and answers prompts with and without speculation.

The models are widened with zeros to 110 M parameters unless asked otherwise: the same tokens, at the cost of a
model for which speculation is worth while. At the native 8 M a step costs little more than its overhead.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from draftwood.errors import BundleError
from draftwood.files import cache_home
from draftwood.manifest import SCHEMA_VERSION
from draftwood.tools import demo
from draftwood.tools.measure.weigh import Weighed, best_tree, weigh
from draftwood.tools.prompts import read_prompts
from draftwood.version import __version__

if TYPE_CHECKING:
    from draftwood.runtime.engines.cpu import CpuEngine
    from draftwood.trees import RankPaths, Topology

TREE_ROWS = (4, 6, 12)
SLOTS = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One prompt answered both ways."""

    id: str
    tokens: int
    tokens_equal: bool
    accept_length: float
    plain_seconds: float
    speculative_seconds: float
    plain_tokens_per_s: float
    speculative_tokens_per_s: float
    speedup: float
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, metavar="BUNDLE", help="where to build the bundle (default: a cache folder)"
    )
    parser.add_argument("--drafter", choices=demo.ALL_DRAFTERS, default="demo-eagle3-w8a8", help="default: %(default)s")
    parser.add_argument("--size", choices=("native", "110m", "500m"), default="110m", help="default: 110m")
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def main(args: argparse.Namespace) -> int:
    from draftwood.runtime.bundle import Bundle
    from draftwood.runtime.engines.cpu import CpuEngine
    from draftwood.runtime.engines.sessions import share_threads
    from draftwood.tools.comparison.check import check, sample_prompts

    paths = demo.counted(args.drafter, sampled=False).rank_paths()
    trees = [(f"planned-{rows}", paths.best_tree(rows - 1)) for rows in TREE_ROWS]
    if not args.json:
        _print_plan(paths, trees)
    folder = args.out or _cache_folder(args)
    built = _built(trees, folder, args)
    share_threads()
    bundle = Bundle.open(folder)
    _say("checking every gear against eager PyTorch")
    report = check(bundle, list(sample_prompts(bundle, None, 1)))
    engine = CpuEngine(bundle)
    _say("timing the gears on this machine")
    candidates = weigh(engine, paths)
    speculative = best_tree(candidates).gear
    answers = [answer(engine, prompt, speculative, args.max_new_tokens) for prompt in read_prompts(None)]
    ok = bool(report["ok"]) and all(one.tokens_equal for one in answers)
    if args.json:
        print(json.dumps(_summary(folder, built, report, candidates, speculative, answers, ok)))
    else:
        _print_answers(folder, report, candidates, speculative, answers)
    return 0 if ok else 1


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _cache_folder(args: argparse.Namespace) -> Path:
    """A folder named by what goes into the bundle and by the code that builds it, so that nothing old is met."""
    content = hashlib.sha256(f"{__version__} {SCHEMA_VERSION}".encode())
    package = Path(demo.FOLDER).parents[1]
    sources = [demo.FOLDER, *(package / folder for folder in ("trees", "kernels", "compiler"))]
    for path in sorted(path for folder in sources for path in folder.rglob("*")):
        if path.suffix in (".safetensors", ".json", ".py"):
            content.update(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}".encode())
    return cache_home() / "draftwood" / f"{args.drafter}-{args.size}-{content.hexdigest()[:16]}"


def _built(trees: list[tuple[str, Topology]], folder: Path, args: argparse.Namespace) -> float:
    """Sees to it that the bundle is there; returns the seconds it took.

    In the demo's own cache folder what another demo made is used, also one that is still at it; what does not open
    is made again.
    """
    from draftwood.compiler.bundle.staging import exclusive
    from draftwood.runtime.bundle import Bundle

    began = time.monotonic()
    if folder != _cache_folder(args):
        _build(trees, folder, args)
        return time.monotonic() - began
    with exclusive(folder, tell=_say):
        try:
            Bundle.open(folder)
            _say(f"taking the bundle that was built before, {folder}")
        except BundleError:
            shutil.rmtree(folder, ignore_errors=True)
            _build(trees, folder, args)
    return time.monotonic() - began


def _build(trees: list[tuple[str, Topology]], folder: Path, args: argparse.Namespace) -> None:
    import draftwood
    from draftwood.tools.demo.sizes import models
    from draftwood.trees import Topology

    with tempfile.TemporaryDirectory(prefix="draftwood-demo-") as work:
        _say(f"widening the models to {args.size}" if args.size != "native" else "taking the models as they are")
        teacher, drafter = models(args.size, Path(work), args.drafter)
        planned = (("plain", Topology.plain()), *trees)
        request = draftwood.BuildRequest(
            model=teacher, drafter=drafter, trees=planned, slots=(SLOTS,), int8_drafter=demo.in_int8(args.drafter)
        )
        draftwood.build(request, folder, progress=lambda what: _say(f"building {what}"))


def answer(engine: CpuEngine, prompt: Any, gear: str, max_new_tokens: int) -> Answer:
    """Answers one prompt plainly and with the gear, and compares the tokens."""
    from draftwood.runtime.decoding import Decoding, Options
    from draftwood.runtime.policy import policy_for

    tokenizer = engine.bundle.tokenizer
    assert tokenizer is not None, "the demo teacher has a tokenizer"
    ids, options = (
        tokenizer.chat([{"role": "user", "content": prompt.text}]),
        Options(max_new_tokens=max_new_tokens),
    )
    plain = Decoding(engine, ids, options, policy_for(engine.bundle)).run()
    fast = Decoding(engine, ids, options, policy_for(engine.bundle, gear)).run()
    rates = [max(len(r.token_ids) - 1, 1) / max(r.decode_seconds, 1e-9) for r in (plain, fast)]
    return Answer(
        id=prompt.id,
        tokens=len(plain.token_ids),
        tokens_equal=plain.token_ids == fast.token_ids,
        accept_length=fast.accept_length_mean,
        plain_seconds=plain.decode_seconds,
        speculative_seconds=fast.decode_seconds,
        plain_tokens_per_s=rates[0],
        speculative_tokens_per_s=rates[1],
        speedup=rates[1] / rates[0],
        text=fast.text or "",
    )


def _total_speedup(answers: list[Answer]) -> float:
    """All prompts taken together: a long answer counts for what it is."""
    return sum(one.plain_seconds for one in answers) / sum(one.speculative_seconds for one in answers)


def _summary(
    folder: Path,
    built: float,
    report: dict[str, Any],
    candidates: list[Weighed],
    gear: str,
    answers: list[Answer],
    ok: bool,
) -> dict[str, Any]:
    return {
        "ok": ok,
        "bundle": str(folder),
        "build_seconds": round(built, 1),
        "check_ok": report["ok"],
        "gear": gear,
        "gears": [asdict(candidate) for candidate in candidates],
        "speedup_mean": float(np.mean([one.speedup for one in answers])),
        "speedup_total": _total_speedup(answers),
        "prompts": [asdict(one) for one in answers],
    }


def _print_plan(paths: RankPaths, trees: list[tuple[str, Topology]]) -> None:
    from draftwood.trees import draw_text

    name, tree = trees[1]
    print(f"{name}: the {tree.nodes} nodes visited most often in {paths.contexts} counted contexts;")
    print(f"expected accept length {paths.expected_accept_length(tree):.2f} tokens a step\n")
    labels = {row: f"{100 * paths.visits(path) / paths.contexts:.0f} %" for row, path in enumerate(tree.paths, 1)}
    print(draw_text(tree, labels), end="\n\n", flush=True)


def _print_answers(
    folder: Path, report: dict[str, Any], candidates: list[Weighed], gear: str, answers: list[Answer]
) -> None:
    drafts = [one for one in report["comparisons"] if one["quantity"].startswith("draft")]
    worst = max(one["difference"] for one in report["comparisons"] if one not in drafts)
    apart = max((one["difference"] for one in drafts if one["quantity"] == "draft scores"), default=0.0)
    caught = sum(control["caught"] for control in report["controls"])
    print(f"bundle {folder}")
    print(
        f"check: {len(report['comparisons'])} comparisons with eager PyTorch, largest difference {worst:.1e} of"
        f" {report['tolerance']:.0e} allowed, of drafts {apart:.0e}; {caught} of {len(report['controls'])} deliberate"
        " faults caught\n"
    )
    print(f"{'gear':18} {'rows':>4} {'expected accept':>15} {'ms a step':>10} {'expected tokens/s':>18}")
    for c in candidates:
        mark = "  <-" if c.gear == gear else ""
        print(
            f"{c.gear:18} {c.rows:4} {c.expected_accept_length:15.2f} {c.draft_ms + c.verify_ms:10.2f}"
            f" {c.expected_tokens_per_s:18.0f}{mark}"
        )
    print(f"\n{'prompt':12} {'tokens':>6} {'equal':>6} {'accept':>7} {'plain/s':>8} {'tree/s':>8} {'speed-up':>9}")
    for one in answers:
        print(
            f"{one.id:12} {one.tokens:6} {'yes' if one.tokens_equal else 'NO':>6} {one.accept_length:7.2f}"
            f" {one.plain_tokens_per_s:8.0f} {one.speculative_tokens_per_s:8.0f} {one.speedup:9.2f}"
        )
    mean = float(np.mean([one.speedup for one in answers]))
    print(f"\nspeed-up {_total_speedup(answers):.2f} over all tokens, {mean:.2f} as the mean of the prompts;", end=" ")
    print(f"the answer to {answers[0].id!r}:")
    print(answers[0].text)
