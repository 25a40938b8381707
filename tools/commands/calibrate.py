"""``draftwood calibrate``: the rank paths that a teacher's text takes, counted into one file of statistics.

The source decides the counts. A bundle answers, and its own steps are counted. A teacher's folder, with ``--drafter``,
answers, and its answers are ranked.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwood.errors import RequestError
from draftwood.files import absolute_path

if TYPE_CHECKING:
    from draftwood.trees.calibration import Calibration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a bundle, whose own decoding is counted; or a teacher's folder or GGUF file (or demo), with --drafter",
    )
    parser.add_argument("--drafter", metavar="DIR", help="the drafter whose candidates are ranked")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help='JSON lines with a "prompt" (default: built in)')
    parser.add_argument("--temperature", default="0", metavar="T[,T...]", help="of the answers (default 0: greedy)")
    parser.add_argument(
        "--max-new-tokens", type=int, default=128, metavar="N", help="of an answer (default: %(default)s)"
    )
    parser.add_argument(
        "--workers",
        type=_workers,
        default=1,
        metavar="N",
        help="processes that answer, if SOURCE is a teacher; or HOST:PORT of a Ray cluster (default: 1)",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="STATS", help="statistics to make or to add to")


def main(args: argparse.Namespace) -> int:
    from draftwood.compiler.bundle.staging import exclusive
    from draftwood.trees.calibration import Calibration
    from draftwood.trees.calibration_file import read_calibration, write_calibration

    with exclusive(args.out, wait=False):  # the counts of another process that adds to the file would be lost
        calibration = read_calibration(args.out) if args.out.exists() else Calibration()
        before = calibration.contexts.total
        if args.drafter:
            answer_prompts(calibration, args)
        else:
            count_bundle(calibration, args)
        write_calibration(calibration, args.out)
    print(f"{args.out}: {calibration.contexts.total - before} contexts added, {text(figures(calibration))}")
    return 0


def count_bundle(calibration: Calibration, args: argparse.Namespace) -> None:
    """Lets a bundle answer with its drafter's largest tree, and counts the rank paths that its steps accept.

    Raises:
        RequestError: the bundle has no drafter or no tokenizer, or an option makes no sense.
        BundleError: the bundle cannot be opened.
    """
    from draftwood.manifest import MANIFEST_FILE
    from draftwood.runtime.bundle import Bundle
    from draftwood.runtime.engines.choice import open_engine
    from draftwood.runtime.options import Options
    from draftwood.threads import share_threads
    from draftwood.tools.measure.calibrate import count_traffic, drafting_alone
    from draftwood.tools.prompts import read_prompts
    from draftwood.trees.calibration_file import write_calibration

    folder = Path(args.source)
    if not (folder / MANIFEST_FILE).exists():
        raise RequestError(f"{folder}: no bundle; if it is a teacher, give --drafter, whose candidates are ranked")
    if args.workers != 1:
        raise RequestError(f"--workers {args.workers}: {folder} is a bundle, which answers here; leave the option out")
    bundle = drafting_alone(Bundle.open(folder))
    if bundle.manifest.drafter is None or bundle.tokenizer is None:
        raise RequestError(
            f"{bundle.folder}: has no {'tokenizer' if bundle.manifest.drafter else 'drafter'} to count with"
        )
    _claim(
        calibration, args.out, {"teacher": bundle.manifest.teacher.digest, "drafter": bundle.manifest.drafter.digest}
    )
    share_threads()
    engine, prompts = open_engine(bundle), read_prompts(args.prompts)
    for temperature in parse_temperatures(args.temperature):
        options = Options.of(max_new_tokens=args.max_new_tokens, temperature=temperature)
        for number, _ in enumerate(count_traffic(engine, prompts, options, calibration), 1):
            if number % 16 == 0 or number == len(prompts):
                write_calibration(calibration, args.out)
                _say(f"{number} of {len(prompts)} turns, {calibration.contexts.total} contexts")


def answer_prompts(calibration: Calibration, args: argparse.Namespace) -> None:
    """Lets the teacher answer, and counts; the file is written after every job, so that a stopped run goes on.

    Raises:
        RequestError: an option that makes no sense, or a prompt that does not fit.
        CheckpointError: teacher or drafter cannot be used.
    """
    from draftwood.tools.demo import resolve
    from draftwood.tools.measure.calibrate import count_all, jobs
    from draftwood.tools.prompts import read_prompts
    from draftwood.trees.calibration_file import write_calibration

    if min(args.workers if isinstance(args.workers, int) else 1, args.max_new_tokens) < 1:
        raise RequestError("--workers and --max-new-tokens: expected 1 or more of each")
    teacher, prompts = absolute_path(resolve(args.source)), read_prompts(args.prompts)
    temperatures = parse_temperatures(args.temperature)
    drafter = absolute_path(resolve(args.drafter))
    work = jobs(prompts, teacher, drafter, temperatures=temperatures, max_new_tokens=args.max_new_tokens)
    if work:
        _claim(calibration, args.out, work[0].models)
    with executor_of(args.workers) as executor:
        for number, _ in enumerate(count_all(work, calibration, executor), 1):
            write_calibration(calibration, args.out)
            _say(f"{number} of {len(work)} jobs, {calibration.contexts.total} contexts")


def _claim(calibration: Calibration, out: Path, models: Mapping[str, str]) -> None:
    """Notes the models of the counts; RequestError if there are counts of others, or nothing says whose."""
    from draftwood.trees.calibration import differing

    if calibration.contexts.total and (name := differing(calibration.models, models)):
        whose = f"of another {name}" if calibration.models else "and nothing says of which models"
        raise RequestError(f"--out {out}: holds counts {whose}; take another --out, or remove it")
    calibration.models = dict(models)


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def parse_temperatures(text: str) -> tuple[float, ...]:
    """Temperatures, each once, from ``0,0.8``."""
    from draftwood.runtime.options import Options

    try:
        temperatures = tuple(sorted({float(part) for part in text.split(",")}))
        for temperature in temperatures:
            Options.of(temperature=temperature)  # refuses what no text can be drawn at
    except (ValueError, RequestError):
        raise RequestError(
            f"--temperature {text}: expected numbers from 0 to 100, separated by commas, such as 0,0.8"
        ) from None
    return temperatures


def _workers(text: str) -> int | str:
    return text if ":" in text else int(text)


_workers.__name__ = "number, or HOST:PORT"


@contextmanager
def executor_of(workers: int | str) -> Iterator[Executor | None]:
    """Processes of this machine, or of a cluster's; None if one is enough."""
    if isinstance(workers, str):
        from draftwood.tools.cluster.connection import joined

        with joined(workers):
            from draftwood.tools.cluster.executor import RayExecutor  # imports Ray, which may be used by then

            yield RayExecutor()
        return
    if workers == 1:
        yield None
        return
    # Not forked: a forked child of a process with PyTorch's threads may hang.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        try:
            _start(pool, workers)
            yield pool
        except BaseException as error:
            _end(pool)
            if not isinstance(error, BrokenProcessPool):
                raise
            raise RequestError(
                f"--workers {workers}: one has ended, as the system ends a process if memory runs out; take fewer; the"
                " same command goes on from the jobs that are counted"
            ) from error


def _start(pool: ProcessPoolExecutor, workers: int) -> None:
    """Starts the processes. A terminal sends SIGINT to all; they do not take it, for this process ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for _ in range(workers):
            pool.submit(os.getpid)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(pool: ProcessPoolExecutor) -> None:
    """Ends the processes, whatever they are at: nobody waits for it any more."""
    pool.shutdown(wait=False, cancel_futures=True)
    for process in active_children():
        process.terminate()


def figures(calibration: Calibration) -> dict[str, Any]:
    """The content of the statistics, as plain values."""
    contexts = calibration.contexts
    return {
        "contexts": contexts.total,
        "distinct": len(contexts.counts_N),
        **{part: calibration.part(part).total for part in ("counted", "heldout")},
        "depth": contexts.depth,
        "width": contexts.width,
        "tasks": [task for task in calibration.tasks if task],
        "with_length": int(contexts.counts_N[contexts.steps_N > 0].sum()),
        "grouped": calibration.grouped,
        "sampled": calibration.sampled,
    }


def text(summary: dict[str, Any]) -> str:
    """`figures` for people."""
    return (
        f"{summary['contexts']} in all, {summary['sampled']} of sampled text: {summary['counted']}"
        f" counted, {summary['heldout']} held out; depth {summary['depth']},"
        f" {summary['width']} ranks; {summary['with_length']} with a length,"
        f" tasks: {', '.join(summary['tasks']) or 'none'}"
    )
