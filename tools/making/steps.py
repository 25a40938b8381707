"""The command lines of ``make``, in order: from a checkpoint to a bundle that is built, checked, timed and compared."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from draftwood.errors import RequestError
from draftwood.tools.made_from import read_note
from draftwood.tools.making.stages import Stage
from draftwood.trees.spec import LONG_ROWS, LOOKUPS

# Levels and candidates of the tree whose steps are counted, as far as the drafter reaches.
LEVELS, CANDIDATES = 5, 4
# Rows that are timed besides that tree's, and nodes of the largest tree that is planned.
ROWS, NODES = "1,2,3,4,5,6,8,12,16", 15
# Of chains there are none longer than those that are counted.
CHAIN_ROWS = ",".join(map(str, range(1, LEVELS + 2)))
SAMPLED = 0.8
COUNTED, JUDGING, PLAN = "counted.jsonl", "judging.jsonl", "plan.json"


def stages_of(args: argparse.Namespace, work: Path) -> Iterator[Stage]:
    """The command lines, in order."""
    fewest, most = LONG_ROWS if args.drafter else 1, _most_rows(args)
    specs = [spec for rows, spec in LOOKUPS.items() if fewest <= rows <= most]
    if args.drafter:
        yield from _planning(args, work)
        specs.insert(0, f"plan:{work / PLAN}")
    tree = ",".join(specs) or "plain"
    trees, here = ("--tree", tree, "--kv", args.kv, *_texts(args)), args.out
    why = "freezes teacher, drafter and trees"
    if args.device and args.precision.startswith("nbits"):
        # Packed weights are laid out for one target; the trees are judged in the same four bits on this machine.
        here = work / "here"
        yield _build(args, "build", args.out, why, *trees, "--target", "ge")
        trees = ("--tree", tree, "--kv", args.kv)  # of one sequence, so that they may branch
        yield _build(args, "build for this machine", here, "has the same trees, to compare texts with", *trees)
    else:
        yield _build(args, "build", args.out, why, *trees, *(("--target", "onnx,ge") if args.device else ()))
    checks, report = "holds every graph to eager PyTorch", args.out / "check.json"
    yield Stage("check", ("check", str(args.out)), report, checks, judges=True, refuses=_failure)
    yield Stage("tune", ("tune", str(here)), work / "tune.txt", "times every gear on this machine")
    judging = ("bench", str(here), "--prompts", str(work / JUDGING), "--json")
    why = "compares with plain decoding on prompts that were not counted"
    yield Stage("bench", judging, work / "bench.json", why, judges=True)


def _failure(path: Path) -> str:
    """The failures of a report of check and the way out, in one line; empty if nothing fails."""
    report = read_note(path, dict)
    if report["ok"]:
        return ""
    way_out = f"nothing is tuned or compared; draftwood check {path.parent} says all; try another --precision"
    wrong = [entry for entry in report["comparisons"] if not entry["ok"]]
    if wrong:
        worst = max(wrong, key=lambda entry: entry["difference"] / max(entry["tolerance"], 1e-30))
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return (
            f"check failed: {worst['graph']} ({worst['graphs']}), {worst['quantity']} at {worst['where']} differs"
            f" by {worst['difference']:.1e}, {worst['tolerance']:.1e} are allowed{more}; {way_out}"
        )
    missed = [entry for entry in report["controls"] if not entry["caught"]]
    if missed:
        return f"check failed: fault {missed[0]['fault']!r} in gear {missed[0]['gear']} is not caught; {way_out}"
    return f"check failed; {way_out}"


def _planning(args: argparse.Namespace, work: Path) -> Iterator[Stage]:
    """The stages from a drafter to a plan."""
    first, latency, plan = work / "first", work / "latency.json", work / PLAN
    counted = ("--prompts", str(work / COUNTED))
    shared = () if args.device else _texts(args)  # a device's times are modelled
    chains = not args.device and _chains_only(args)
    wide = ("--tree", _counting_tree(args, 1 if chains else CANDIDATES), "--kv", str(_longest(args)), *shared)
    yield _build(args, "first bundle", first, "has one wide tree, to count with", *wide)
    stats = work / "greedy.stats", work / "sampled.stats"
    for out, temperature in zip(stats, (0, SAMPLED), strict=True):
        counts = ("calibrate", str(first), *counted, "--temperature", f"{temperature:g}", "--out", str(out))
        yield Stage(f"counts, {out.stem}", counts, out, "counts what the teacher takes of the drafts")
    words: tuple[str, ...]
    if args.device:
        modelled = (*_source(args), *_precision(args), "--kv", args.kv)
        words = ("profile", *modelled, "--device", args.device, "--out", str(latency))
        yield Stage("times", words, latency, f"models steps on {args.device}")
    else:
        powers = {1 << power for power in range(args.batch_size.bit_length())}
        sizes = ",".join(map(str, sorted(powers | {args.batch_size})))
        rows = CHAIN_ROWS if chains else ROWS
        words = ("profile", str(first), "--rows", rows, "--batch-size", sizes, "--out", str(latency))
        yield Stage("times", words, latency, "times steps of so many rows here")
    files = (*map(str, stats), "--latency", str(latency))
    nodes = str(min(NODES, _most_rows(args) - 1))
    words = ("plan", *files, "--max-nodes", nodes, "--out", str(plan))
    yield Stage("plan", words, plan, "chooses trees and gears")


def _build(args: argparse.Namespace, name: str, out: Path, why: str, *more: str) -> Stage:
    drafter = ("--int8-drafter",) if args.int8_drafter else ()
    words = ("build", *_source(args), *more, *_precision(args), *drafter, "--out", str(out))
    return Stage(name, words, out, why, whole=True)


def _texts(args: argparse.Namespace) -> tuple[str, ...]:
    return () if args.batch_size == 1 else ("--batch-size", str(args.batch_size))


def _source(args: argparse.Namespace) -> tuple[str, ...]:
    return (args.model, *(("--drafter", args.drafter) if args.drafter else ()))


def _precision(args: argparse.Namespace) -> tuple[str, ...]:
    return () if args.precision == "exact" else ("--precision", args.precision)


def _most_rows(args: argparse.Namespace) -> int:
    """Rows of a tree at most: an NPU's kernel gives rows of a launch the same bits up to an eighth of a group of packed
    weights."""
    if not args.device or not args.precision.startswith("nbits"):
        return max(LOOKUPS)
    from draftwood.compiler.teachers.checkpoint import Checkpoint
    from draftwood.compiler.teachers.conversion import in_precision
    from draftwood.kernels.int4 import most_rows
    from draftwood.tools.demo import resolve

    config = in_precision(Checkpoint.open(resolve(args.model)), "nbits", npu=True).config
    most = min(most_rows(layer.group) for layer in config.packed if layer.group)
    if args.batch_size > most:
        raise RequestError(
            f"--batch-size {args.batch_size}: the NPU's kernel for weights in four bits gives other texts beyond {most}"
            f" rows a launch; expected 1 to {most}"
        )
    return most // args.batch_size


def _counting_tree(args: argparse.Namespace, candidates: int) -> str:
    """The deepest tree that the drafter can draft; a chain of one candidate.

    Raises:
        CheckpointError: teacher or drafter cannot be used.
        RequestError: the drafter can draft no tree.
    """
    from draftwood.compiler.drafters.registry import check_tree, open_drafter
    from draftwood.compiler.teachers.checkpoint import Checkpoint
    from draftwood.errors import TreeError
    from draftwood.tools.demo import resolve
    from draftwood.trees import parse_specs

    teacher = Checkpoint.open(resolve(args.model))
    drafter, refusal = open_drafter(resolve(args.drafter), teacher).model, ""
    for levels in range(LEVELS, 0, -1):
        spec = f"backbone:{levels}:{candidates}"
        try:
            check_tree(drafter, spec, parse_specs(spec)[1][1], teacher.config)
        except TreeError as error:
            refusal = str(error)
        else:
            return spec
    raise RequestError(f"--drafter {args.drafter}: drafts no tree of {candidates} candidates: {refusal}")


def _chains_only(args: argparse.Namespace) -> bool:
    """Whether the bundle can have no tree that branches."""
    from draftwood.compiler.bundle.build import chains_only
    from draftwood.compiler.teachers.checkpoint import Checkpoint
    from draftwood.compiler.teachers.conversion import in_precision
    from draftwood.tools.demo import resolve

    config = in_precision(Checkpoint.open(resolve(args.model)), args.precision).config
    return chains_only(config, ("onnx",), args.batch_size, _longest(args))


def _longest(args: argparse.Namespace) -> int:
    return max(map(int, args.kv.split(",")))
