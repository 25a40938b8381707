"""``draftwood calibrate``: the rank paths that a teacher's text took, counted into one file of statistics."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwood.errors import RequestError
from draftwood.files import read_regular
from draftwood.tools.commands.arguments import add_verify_argument

if TYPE_CHECKING:
    from draftwood.runtime.text.tokenizer import Tokenizer
    from draftwood.tools.prompts import Prompt
    from draftwood.trees.calibration import Calibration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sources = parser.add_mutually_exclusive_group(required=True)
    sources.add_argument("bundle", type=Path, nargs="?", metavar="BUNDLE", help="count what its own decoding accepts")
    sources.add_argument(
        "--from-paths",
        type=Path,
        metavar="FILE.jsonl",
        help='rank paths found elsewhere, a line each: {"path": [0, 2], "context": 412, "confidence": 0.81}',
    )
    sources.add_argument("--merge", type=Path, nargs="+", metavar="STATS", help="statistics to add up into a new file")
    sources.add_argument("--model", metavar="DIR", help="a teacher that answers --prompts; or demo")
    parser.add_argument("--drafter", metavar="DIR", help="the drafter whose candidates are ranked; or demo-medusa ...")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help='JSON lines with a "prompt" (default: built in)')
    parser.add_argument("--limit", type=int, metavar="N", help="prompts to use (default: all)")
    parser.add_argument(
        "--behind",
        metavar="N[,N...]",
        help="put prompts behind others of the file, up to so many tokens in turn",
    )
    parser.add_argument("--temperature", default="0", metavar="T[,T...]", help="of the answers (default 0: greedy)")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="tokens an answer at most")
    parser.add_argument("--levels", type=int, default=5, metavar="D", help="how deep an EAGLE-3 layer is followed")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes that answer and count")
    parser.add_argument("--scheduler", metavar="HOST:PORT", help="answer and count on the workers of this Dask cluster")
    parser.add_argument("--out", required=True, type=Path, metavar="STATS", help="statistics to make or to add to")
    add_verify_argument(parser)
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def main(args: argparse.Namespace) -> int:
    from draftwood.trees.calibration import Calibration
    from draftwood.trees.calibration_file import read_calibration, write_calibration

    if args.merge:
        calibration = merge(args.merge, args.out)
        added = calibration.contexts.total
    else:
        calibration = read_calibration(args.out) if args.out.exists() else Calibration()
        before = calibration.contexts.total
        if args.bundle:
            count_bundle(calibration, args)
        elif args.from_paths:
            import_paths(calibration, args.from_paths)
        else:
            answer_prompts(calibration, args)
        added = calibration.contexts.total - before
    write_calibration(calibration, args.out)
    summary = {"out": str(args.out), "added": added, **figures(calibration)}
    print(json.dumps(summary) if args.json else text(summary))
    return 0


def count_bundle(calibration: Calibration, args: argparse.Namespace) -> None:
    """Lets a bundle answer with its largest tree, and counts the rank paths that its steps accept.

    Raises:
        RequestError: the bundle has no drafter or no tokenizer, or an option makes no sense.
        BundleError: the bundle cannot be opened.
    """
    from draftwood.runtime.bundle import Bundle
    from draftwood.runtime.decoding import Options
    from draftwood.runtime.engines import open_engine
    from draftwood.runtime.engines.sessions import share_threads
    from draftwood.runtime.speculation.sampling import Sampling
    from draftwood.tools.measure.traffic import count_traffic
    from draftwood.tools.prompts import read_prompts
    from draftwood.trees.calibration_file import write_calibration

    bundle = Bundle.open(args.bundle, args.verify)
    if bundle.manifest.drafter is None or bundle.tokenizer is None:
        raise RequestError(
            f"{args.bundle}: has no {'tokenizer' if bundle.manifest.drafter else 'drafter'} to count with"
        )
    share_threads()
    engine, prompts = open_engine(bundle), read_prompts(args.prompts, args.limit)
    if args.behind is not None:
        prompts = _behind(prompts, args, bundle.tokenizer, bundle.manifest.dims.context)
    for temperature in parse_temperatures(args.temperature):
        sampling = Sampling(temperature=temperature, seed=args.seed)
        options = Options(max_new_tokens=args.max_new_tokens, sampling=sampling)
        for number, _ in enumerate(count_traffic(engine, prompts, options, calibration), 1):
            if number % 16 == 0 or number == len(prompts):
                write_calibration(calibration, args.out)
                total = calibration.contexts.total
                print(f"{number} of {len(prompts)} turns, {total} contexts", file=sys.stderr, flush=True)


def answer_prompts(calibration: Calibration, args: argparse.Namespace) -> None:
    """Lets the teacher answer, and counts; the file is written after every job, so that a stopped run goes on.

    Raises:
        RequestError: an option that makes no sense, or a prompt that does not fit.
        CheckpointError: teacher or drafter cannot be used.
    """
    from draftwood.compiler.teachers.checkpoint import Checkpoint
    from draftwood.runtime.text.tokenizer import Tokenizer
    from draftwood.tools.demo import resolve
    from draftwood.tools.measure.counting import count_all, jobs
    from draftwood.tools.prompts import read_prompts
    from draftwood.trees.calibration_file import write_calibration

    if args.drafter is None:
        raise RequestError("--model needs --drafter: the folder of the drafter whose candidates are ranked")
    if args.scheduler and args.workers > 1:
        raise RequestError("--scheduler and --workers do not go together; the cluster says how many workers there are")
    if min(args.workers, args.levels, args.max_new_tokens) < 1:
        raise RequestError("--workers, --levels and --max-new-tokens: expected 1 or more of each")
    teacher, prompts = resolve(args.model), read_prompts(args.prompts, args.limit)
    if args.behind is not None:
        prompts = _behind(prompts, args, Tokenizer.load(teacher), Checkpoint.open(teacher).config.max_positions)
    work = jobs(
        prompts,
        teacher,
        resolve(args.drafter),
        temperatures=parse_temperatures(args.temperature),
        max_new_tokens=args.max_new_tokens,
        seed=args.seed,
        levels=args.levels,
    )
    with executor_of(args.workers, args.scheduler) as executor:
        for number, _ in enumerate(count_all(work, calibration, executor), 1):
            write_calibration(calibration, args.out)
            total = calibration.contexts.total
            print(f"{number} of {len(work)} jobs, {total} contexts", file=sys.stderr, flush=True)


def _behind(prompts: list[Prompt], args: argparse.Namespace, tokenizer: Tokenizer, context: int) -> list[Prompt]:
    """The prompts behind documents as ``--behind`` asks, those that leave an answer room in a text of ``context``."""
    from draftwood.tools.documents import behind_in_turn

    lengths = [int(part) if part.isdecimal() else -1 for part in args.behind.split(",")]
    if min(lengths) < 0:
        raise RequestError(f"--behind {args.behind}: expected tokens of 0 or more, separated by commas, such as 0,512")
    found = behind_in_turn(prompts, lengths, tokenizer, context - args.max_new_tokens)
    if len(found) < len(prompts):
        said = f"--behind {max(lengths)}: a text has {context} tokens at most; what is longer is left out"
        print(said, file=sys.stderr)
    return found


def parse_temperatures(text: str) -> tuple[float, ...]:
    """Temperatures, each once, from ``0,0.8``."""
    try:
        found = tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        found = (-1.0,)
    if not all(0 <= temperature < float("inf") for temperature in found):
        raise RequestError(f"--temperature {text}: expected numbers of 0 or more, separated by commas, such as 0,0.8")
    return found


@contextmanager
def executor_of(workers: int, scheduler: str | None) -> Iterator[Executor | None]:
    from draftwood.tools.cluster import cluster

    if scheduler:
        with cluster(scheduler) as client:
            yield client.get_executor()
        return
    if workers == 1:
        yield None
        return
    # Not forked: a forked child of a process with PyTorch's threads may hang.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield pool


def import_paths(calibration: Calibration, file: Path) -> int:
    """Adds the lines of ``file`` that are not counted yet; returns how many.

    Raises:
        RequestError: the file cannot be read.
        TreeError: a line that is no rank path.
    """
    from draftwood.trees.path_lines import add_lines

    try:
        return add_lines(calibration, read_regular(file), str(file))
    except OSError as error:
        raise RequestError(f"--from-paths {file}: cannot be read: {error.strerror}; check the path") from error


def merge(files: list[Path], out: Path) -> Calibration:
    """The sum of several statistics.

    Raises:
        RequestError: ``out`` exists, or two of them counted the same source.
        TreeError: one cannot be read.
    """
    from draftwood.trees.calibration import Calibration
    from draftwood.trees.calibration_file import read_calibration

    if out.exists():
        raise RequestError(f"--out {out}: exists; merged statistics go into a new file, so that none counts twice")
    merged = Calibration()
    for file in files:
        one = read_calibration(file)
        if twice := sorted(one.sources.keys() & merged.sources.keys()):
            raise RequestError(f"--merge {file}: counted {twice[0]}, which an earlier file counted too; leave one out")
        merged.merge(one)
    return merged


def figures(calibration: Calibration) -> dict[str, Any]:
    """What the statistics hold, as plain values."""
    from draftwood.trees.calibration import UNKNOWN_BIN

    contexts = calibration.contexts
    return {
        "contexts": contexts.total,
        "distinct": len(contexts.counts_N),
        **{part: calibration.part(part).total for part in ("counted", "heldout")},
        "depth": contexts.depth,
        "width": contexts.width,
        "tasks": [task for task in calibration.tasks if task],
        "with_length": int(contexts.counts_N[contexts.steps_N > 0].sum()),
        "with_confidence": int(contexts.counts_N[contexts.bins_N != UNKNOWN_BIN].sum()),
        "grouped": calibration.grouped,
        "sampled": calibration.sampled,
    }


def text(summary: dict[str, Any]) -> str:
    """`figures` for people."""
    return (
        f"{summary['out']}: {summary['added']} contexts added, {summary['contexts']} in all, {summary['sampled']}"
        f" of sampled text: {summary['counted']}"
        f" counted, {summary['heldout']} held out; depth {summary['depth']},"
        f" {summary['width']} ranks; {summary['with_length']} with a length, {summary['with_confidence']} with a"
        f" confidence, tasks: {', '.join(summary['tasks']) or 'none'}"
    )
