"""``draftwood profile``: a latency table, measured on this machine or modelled for a device that is not here.

Measured: every entry is visited once a round, in shuffled order, so that whatever else the machine does hits all
alike. A visit decodes a few steps for real: draft, verify behind a cache filled to half its KV length, commit of
a path that lies scattered in the tree, so that the next step has rows to move.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from draftwood.errors import RequestError
from draftwood.tools.commands.build import parse_sizes

if TYPE_CHECKING:
    from draftwood.compiler.device.model import Drafter
    from draftwood.manifest import Gear
    from draftwood.runtime.bundle import Bundle
    from draftwood.runtime.engines import StagedEngine
    from draftwood.runtime.sequence import SequenceState
    from draftwood.trees import Topology, TreeBuffers
    from draftwood.trees.latency import EntryKind, LatencyEntry, LatencyTable

LEAST_ROUNDS = 9
SECONDS = 0.5  # an entry is timed over at least this long
STEPS = 4  # timed steps of a visit at least; one more before them is not counted
VISIT_SECONDS = 0.05  # a visit lasts at least so long, or short steps never see the caches of a running text
HOST_TOKENS = 48  # new tokens of a text that is decoded for the host's share
MODELLED_ROWS = tuple(range(1, 65))
MODELLED_SLOTS = (1024, 2048, 4096, 8192)
DRAFTERS = (
    "medusa:HEADS[:tied], eagle3[:VOCABULARY], fasteagle:LAYERS[:VOCABULARY[:HEADS:KV_HEADS:MLP]] or a drafter's folder"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", nargs="?", type=Path, metavar="BUNDLE", help="bundle to measure on this machine")
    parser.add_argument("--device", metavar="NAME", help="device to model instead, such as ascend-910b3")
    parser.add_argument("--model", metavar="DIR", help="teacher to model: a Hugging Face folder, or demo")
    parser.add_argument("--drafter", metavar="SPEC", help=f"drafter to model: {DRAFTERS}")
    parser.add_argument(
        "--rows", metavar="T[,T...]", help="row counts beside the bundle's trees'; of a model, instead of 1 to 64"
    )
    parser.add_argument(
        "--kv", metavar="C[,C...]", help="KV lengths in slots (default: the bundle's; of a model, 1024 to 8192)"
    )
    parser.add_argument("--rounds", type=int, default=LEAST_ROUNDS, metavar="N", help="measure at least so often")
    parser.add_argument("--threads", type=int, metavar="N", help="processors to use (default: all)")
    parser.add_argument("--out", required=True, type=Path, metavar="LATENCY", help="file to write the table to")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the time of a step against its rows")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


def main(args: argparse.Namespace) -> int:
    if (args.bundle is None) == (args.device is None):
        raise RequestError("profile: expected a BUNDLE to measure or --device NAME to model, one of the two")
    for path in (args.out, args.png):
        if path is not None and not path.parent.is_dir():
            raise RequestError(f"{path}: there is no folder {path.parent}; make it first")
    table = _modelled(args) if args.device else _measured(args)
    _write(args.out, table.to_json())
    if args.png:
        draw_staircase(table, args.png)
    print(table.to_json() if args.json else table_text(table), end="" if args.json else "\n")
    return 0


def _modelled(args: argparse.Namespace) -> LatencyTable:
    from draftwood.compiler.bundle.build import PREFILL_ROWS
    from draftwood.compiler.device.model import device, modelled_table
    from draftwood.compiler.teachers.config import read_config
    from draftwood.manifest import file_digest
    from draftwood.tools.demo import resolve

    chosen = device(args.device)
    if args.model is None:
        raise RequestError(f"--device {args.device}: needs --model, the teacher to model")
    folder = resolve(args.model)
    config = read_config(folder)
    slots = parse_sizes("--kv", args.kv) if args.kv else tuple(c for c in MODELLED_SLOTS if c <= config.max_positions)
    _check_slots(slots, config.max_positions)
    return modelled_table(
        chosen,
        config,
        parse_rows(args.rows) if args.rows else MODELLED_ROWS,
        slots,
        drafter=parse_drafter(args.drafter, folder) if args.drafter else None,
        teacher={"name": folder.resolve().name, "config_digest": file_digest(folder / "config.json")},
        prefill=PREFILL_ROWS,
    )


def _check_slots(slots: Sequence[int], positions: int) -> None:
    from draftwood.compiler.bundle.build import SLOT_MULTIPLE

    for length in slots:
        if length <= 0 or length % SLOT_MULTIPLE or length > positions:
            raise RequestError(
                f"--kv {length}: expected a positive multiple of {SLOT_MULTIPLE}, at most the {positions} positions"
                " that the teacher knows"
            )
    if not slots:
        raise RequestError(f"--kv: the teacher knows {positions} positions only; name the KV lengths to model")


def parse_rows(text: str) -> tuple[int, ...]:
    """Row counts, ascending, from ``1,16,17``."""
    rows = parse_sizes("--rows", text)
    if rows[0] < 1:
        raise RequestError(f"--rows {text}: a step has at least 1 row")
    return rows


def parse_drafter(text: str, teacher: Path) -> Drafter:
    """The drafter that a spec or a drafter's folder describes."""
    from draftwood.compiler.device import model as device_model
    from draftwood.compiler.drafters.kinds import MedusaDrafter, OpenedDrafter
    from draftwood.compiler.teachers.checkpoint import Checkpoint
    from draftwood.compiler.teachers.config import read_config
    from draftwood.tools.demo import resolve

    config = read_config(teacher)
    if (path := resolve(text)).exists():
        drafter = OpenedDrafter.open(path, Checkpoint.open(teacher)).drafter
        if isinstance(drafter, MedusaDrafter):
            sizes = drafter.config
            return device_model.Medusa(levels=sizes.heads, blocks=sizes.blocks, tied=sizes.tied)
        vocabulary = drafter.config.draft_vocabulary
        if drafter.kind == "eagle3":
            return device_model.Eagle3(vocabulary=vocabulary)
        block = drafter.config.block
        sizes = {name: getattr(block, name) for name in ("layers", "heads", "kv_heads", "intermediate")}
        return device_model.FastEagle(vocabulary=vocabulary, **sizes)
    kind, *options = text.split(":")
    numbers = [int(option) for option in options if option.isdecimal()]
    match kind, numbers, [option for option in options if not option.isdecimal()]:
        case "medusa", [levels], [] | ["tied"] as tied if levels:
            return device_model.Medusa(levels=levels, tied=bool(tied))
        case "eagle3", [] | [_] as sizes, [] if all(sizes):
            return device_model.Eagle3(vocabulary=(*sizes, config.vocabulary)[0])
        case "fasteagle", [layers] | [layers, _], [] if all(numbers):
            return device_model.FastEagle(layers=layers, vocabulary=(*numbers[1:], config.vocabulary)[0])
        case "fasteagle", [layers, vocabulary, heads, kv_heads, intermediate], [] if all(numbers):
            sizes = {"heads": heads, "kv_heads": kv_heads, "intermediate": intermediate}
            return device_model.FastEagle(layers=layers, vocabulary=vocabulary, **sizes)
    raise RequestError(f"--drafter {text}: expected {DRAFTERS}")


def _measured(args: argparse.Namespace) -> LatencyTable:
    from draftwood.runtime.bundle import Bundle
    from draftwood.runtime.engines.cpu import CpuEngine
    from draftwood.runtime.engines.sessions import default_threads, share_threads

    if args.model or args.drafter:
        raise RequestError("--model and --drafter: a bundle has its own; they go with --device")
    rows = parse_rows(args.rows) if args.rows else ()
    bundle = _widened(Bundle.open(args.bundle), max(rows, default=1))
    share_threads(args.threads)
    engine = CpuEngine(bundle)
    slots = parse_sizes("--kv", args.kv) if args.kv else tuple(sorted({gear.slots for gear in bundle.manifest.gears}))
    return measure(engine, rows, slots, rounds=args.rounds, threads=args.threads or default_threads())


def _widened(bundle: Bundle, rows: int) -> Bundle:
    """The bundle with buffers for steps of ``rows`` rows: its CPU graph takes any number, its buffers did not."""
    dims = bundle.manifest.dims
    dims = msgspec.structs.replace(dims, branch_rows=max(dims.branch_rows, rows))
    return replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, dims=dims))


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One entry to time: a tree behind a cache, and the rows of it that every step commits."""

    topology: Topology
    tree: TreeBuffers
    path: tuple[int, ...]
    state: SequenceState
    filled: int
    # Drafts for this tree; None where nothing does.
    gear: Gear | None


def measure(
    engine: StagedEngine, rows: Iterable[int], slots: Sequence[int], rounds: int = LEAST_ROUNDS, threads: int = 0
) -> LatencyTable:
    """Times the steps of the bundle's trees, and bushy trees of other ``rows``, at every KV length."""
    from draftwood.trees.latency import LatencyTable

    if rounds < 1:
        raise RequestError(f"--rounds {rounds}: expected at least 1")
    bundle = engine.bundle
    subjects = [subject for length in slots for subject in _subjects(engine, set(rows), length)]
    times = _time(engine, subjects, rounds)
    entries = [
        _entry("verify" if count > 1 else "decode", samples, rows=count, slots=length, filled=filled)
        for (count, length, filled), samples in times.steps.items()
    ]
    entries += [_entry("draft", taken, depth=depth, width=width) for (depth, width), taken in times.drafts.items()]
    offered = bundle.manifest.drafter
    entries.append(_entry("host", times.hosts))
    return LatencyTable(
        source="measured",
        kv_read="filled",
        entries=tuple(entries),
        machine=_machine(threads),
        teacher={"name": bundle.folder.resolve().name, "digest": bundle.manifest.teacher.digest},
        drafter=msgspec.to_builtins(offered) if offered else {},
        notes=NOTES,
    )


NOTES = (
    "A step reads the filled slots only, so an entry holds for a text of about its 'filled' tokens; the KV length"
    " itself costs nothing.",
    "One graph with run-time sizes serves every gear, so one more gear takes no graph memory and bytes is left out.",
    "The accepted rows are moved inside the next step, so there is no commit entry; host covers acceptance,"
    " bookkeeping and the text.",
)


@dataclass(slots=True)
class Times:
    """Samples in seconds; steps by (rows, slots, filled), drafts by (depth, width)."""

    steps: dict[tuple[int, int, int], list[float]]
    drafts: dict[tuple[int, int], list[float]]
    hosts: list[float]


def _subjects(engine: StagedEngine, rows: set[int], slots: int) -> list[Subject]:
    """The bundle's trees, one for each number of rows, and bushy ones of the other numbers, behind one cache."""
    from draftwood.trees import tensorize

    trees = {topology.rows: topology for topology, _ in engine.bundle.trees.values()}
    trees |= {count: bushy(count) for count in rows - trees.keys()}
    filled, needed = slots // 2, max(trees) + (STEPS + 1) * max(len(committed_path(tree)) for tree in trees.values())
    if filled + needed >= slots:
        raise RequestError(
            f"--kv {slots}: too short to time steps of {max(trees)} rows behind {filled} tokens; expected at least"
            f" {2 * needed + 2}, or fewer --rows"
        )
    state = engine.begin(slots)
    tokens = np.random.default_rng(0).integers(0, engine.bundle.manifest.dims.vocabulary, filled)
    engine.prefill(state, tokens)
    return [
        Subject(
            topology=tree,
            tree=tensorize(tree),
            path=committed_path(tree),
            state=state,
            filled=filled,
            gear=_drafting(engine.bundle, tree),
        )
        for _, tree in sorted(trees.items())
    ]


def _drafting(bundle: Bundle, topology: Topology) -> Gear | None:
    """A gear that drafts a tree, or one as costly: a graph that serves all trees drafts any, EAGLE-3 its own."""
    drafter = bundle.manifest.drafter
    shared = drafter is not None and drafter.kind != "eagle3"
    gears = (gear for gear in bundle.manifest.gears if gear.draft and gear.tree in bundle.trees)
    fits = (gear for gear in gears if shared or bundle.trees[gear.tree][0] == topology)
    return next(fits, None) if topology.depth else None


def bushy(rows: int) -> Topology:
    """A tree of ``rows`` rows in which every node has four children, as far as they go."""
    from draftwood.trees import Topology

    below = range(rows - 1)
    return Topology((0, *(row // 4 for row in below)), (0, *(row % 4 for row in below)))


def committed_path(topology: Topology) -> tuple[int, ...]:
    """Rows from the root to the last row at half the tree's depth: as many as a step may accept, out of order."""
    depth = (topology.depth + 1) // 2
    row = max(row for row, found in enumerate(topology.depths) if found == depth)
    path = [row]
    while path[-1]:
        path.append(topology.parents[path[-1]])
    return tuple(reversed(path))


def _time(engine: StagedEngine, subjects: list[Subject], rounds: int) -> Times:
    times = Times(defaultdict(list), defaultdict(list), [])
    prompt, order = _prompt(engine.bundle), random.Random(0)
    _visit_all(engine, subjects, prompt, Times(defaultdict(list), defaultdict(list), []), order)  # warm-up
    began, done = time.perf_counter(), 0
    while done < rounds or time.perf_counter() - began < SECONDS * (len(subjects) + 1):
        _visit_all(engine, subjects, prompt, times, order)
        done += 1
        passed = time.perf_counter() - began
        print(f"round {done} of at least {rounds}: {len(subjects)} shapes, {passed:.0f} s", file=sys.stderr, flush=True)
    return times


def _visit_all(
    engine: StagedEngine, subjects: list[Subject], prompt: list[int], times: Times, order: random.Random
) -> None:
    visits: list[Subject | None] = [None, *subjects]
    order.shuffle(visits)
    for subject in visits:
        if subject is None:
            times.hosts.append(_host_seconds(engine, prompt))
        else:
            _visit(engine, subject, times)


def _visit(engine: StagedEngine, subject: Subject, times: Times) -> None:
    """Some steps of one tree; the cache grows by what they commit and is rolled back by the next visit."""
    from draftwood.tools.comparison import single

    state, tree, drafter = subject.state, subject.tree, engine.bundle.manifest.drafter
    tokens = np.random.default_rng(tree.rows)
    state.rollback(subject.filled)
    entered, step = time.perf_counter(), 0
    while step <= STEPS or (time.perf_counter() - entered < VISIT_SECONDS and state.kv.room(tree.rows)):
        tokens_T = tokens.integers(0, engine.bundle.manifest.dims.vocabulary, tree.rows)
        began = time.perf_counter()
        if subject.gear:
            single.draft(engine, state, subject.gear, int(tokens_T[0]))
        drafted = time.perf_counter()
        single.verify(engine, state, tokens_T, tree)
        verified = time.perf_counter()
        state.commit(subject.path)
        if step:  # the first step has no rows to move, and finds another tree's work in the processor's caches
            times.steps[tree.rows, state.slots, subject.filled].append(verified - drafted)
            if subject.gear and drafter:
                shape = subject.topology.depth, subject.topology.width
                offered = shape if drafter.kind == "eagle3" else (drafter.levels, drafter.candidates)
                times.drafts[offered].append(drafted - began)
        step += 1


def _prompt(bundle: Bundle) -> list[int]:
    """Token ids to decode a text from: a built-in prompt, or any ids where there is no tokenizer."""
    from draftwood.tools.prompts import read_prompts

    room = bundle.manifest.dims.context - HOST_TOKENS
    ids = bundle.tokenizer.encode(read_prompts(None)[0].text) if bundle.tokenizer else list(range(8))
    return ids[: max(1, room)]


def _host_seconds(engine: StagedEngine, prompt: list[int]) -> float:
    """What a step of a real text spends outside graphs: the mean of plain decoding's and the largest tree's."""
    from draftwood.runtime.decoding import Decoding, Options
    from draftwood.runtime.policy import policy_for
    from draftwood.tools.measure.traffic import widest_gear

    options = Options(max_new_tokens=HOST_TOKENS, ignore_eos=True)
    policies = [policy_for(engine.bundle, plain=True), policy_for(engine.bundle, widest_gear(engine.bundle))]
    results = [Decoding(engine, prompt, options, policy).run() for policy in policies]
    return sum(result.decode_seconds * result.host_share / result.steps for result in results) / len(results)


def _entry(kind: EntryKind, samples: list[float], **shape: Any) -> LatencyEntry:
    from draftwood.trees.latency import LatencyEntry

    low, middle, high = (round(float(value), 9) for value in np.percentile(samples, (25, 50, 75)))
    return LatencyEntry(kind=kind, seconds=middle, quartiles=(low, high), samples=len(samples), **shape)


def _machine(threads: int) -> dict[str, Any]:
    import onnxruntime

    from draftwood.tools.measure.machine import memory, processor

    facts = {**processor(), "memory_bytes": memory()["total_bytes"], "onnxruntime": onnxruntime.__version__}
    return facts | ({"threads": threads} if threads else {})


def _write(path: Path, text: str) -> None:
    """Writes the file whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RequestError(f"--out {path}: cannot be written: {error.strerror}") from error


def table_text(table: LatencyTable) -> str:
    """The table for people: ms by rows and KV length, then the draft and the host."""
    machine = table.machine.get("device") or table.machine.get("model")
    rows = sorted({count for length in table.slots for count in table.rows(length)})
    lines = [f"{table.source} on {machine}, ms a step", f"{'rows':>6}" + "".join(f"  kv {c:>6}" for c in table.slots)]
    for count in rows:
        cells = (f"{1000 * table.step_s(count, c):11.3f}" if count in table.rows(c) else " " * 11 for c in table.slots)
        lines.append(f"{count:6}" + "".join(cells))
    drafts = [entry for entry in table.entries if entry.kind == "draft"]
    for width in sorted({entry.width for entry in drafts}):
        times = ", ".join(f"{e.depth}: {1000 * e.seconds:.3f}" for e in drafts if e.width == width)
        lines.append(f"draft of width {width}, by depth {times}")
    lines.append(f"host  {1000 * table.host_s():.3f} ms a step")
    return "\n".join([*lines, *table.notes])


def draw_staircase(table: LatencyTable, path: Path) -> None:
    """Writes a PNG of step time against rows, a line for every KV length; measured ones with their quartiles."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 3.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for length in table.slots:
        steps = [entry for entry in table.entries if entry.kind in ("decode", "verify") and entry.slots == length]
        rows = [entry.rows for entry in steps]
        # A tree of fewer rows runs the next larger step, so a step reaches back to the one before it.
        (line,) = axes.step(rows, [1000 * entry.seconds for entry in steps], where="pre", label=f"KV length {length}")
        if table.source == "measured":
            low, high = 1000 * np.array([entry.quartiles for entry in steps]).T
            axes.fill_between(rows, low, high, step="pre", color=line.get_color(), alpha=0.2, linewidth=0)
        axes.plot(rows, [1000 * entry.seconds for entry in steps], ".", markersize=3, color=line.get_color())
    machine = table.machine.get("device") or table.machine.get("model")
    axes.set(xlabel="rows of the step", ylabel="ms a step", ylim=(0, None), title=f"{table.source}: {machine}")
    axes.legend(frameon=False)
    try:
        figure.savefig(path, format="png", metadata={"Software": None})
    except OSError as error:
        raise RequestError(f"--png {path}: cannot be written: {error.strerror}") from error
