"""``draftwood profile``: a latency table, measured on this machine or modelled for a device that is not here."""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import msgspec

from draftwood.compiler.drafters.registry import describe_drafter, kind_named, kinds, names
from draftwood.errors import RequestError
from draftwood.manifest import MANIFEST_FILE, MOST_TEXTS
from draftwood.tools.commands.build import PRECISIONS, parse_sizes
from draftwood.tools.making.precision import table_file
from draftwood.tools.measure.profile import measure
from draftwood.tools.show.latency import table_text
from draftwood.trees.calibration_file import prepare_out, write_out

if TYPE_CHECKING:
    from draftwood.compiler.device.table import DraftCost
    from draftwood.compiler.teachers.config import TeacherConfig
    from draftwood.compiler.teachers.conversion import Precision
    from draftwood.runtime.bundle import Bundle
    from draftwood.trees.latency import LatencyTable

MODELLED_ROWS = tuple(range(1, 65))
MODELLED_SLOTS = (1024, 2048, 4096, 8192)
# Compared precisions differ by more than further rounds would tell.
_TEACHER_ROUNDS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="BUNDLE|MODEL",
        help="bundle to measure on this machine; or a teacher: a Hugging Face folder, a GGUF file, or demo",
    )
    parser.add_argument("--device", metavar="NAME", help="device to model MODEL on, such as ascend-910b3")
    parser.add_argument(
        "--ranks", type=int, default=1, metavar="N", help="devices that run a step together (default: 1)"
    )
    parser.add_argument("--drafter", metavar="SPEC", help=f"drafter to model: {_drafters()}")
    parser.add_argument(
        "--precision",
        default="exact",
        metavar="P[,P...]",
        help=f"of the teacher, as for build: {', '.join(PRECISIONS)}; several are timed in turns",
    )
    parser.add_argument(
        "--rows", metavar="T[,T...]", help="row counts besides the bundle's trees'; with --device, instead of 1 to 64"
    )
    parser.add_argument(
        "--kv",
        metavar="C[,C...]",
        help="KV lengths in slots (default: the bundle's; 1024 for a MODEL; with --device, 1024 to 8192)",
    )
    parser.add_argument("--batch-size", metavar="B[,B...]", help="sequences a launch (default: 1)")
    parser.add_argument(
        "--out",
        required=True,
        type=Path,
        metavar="LATENCY",
        help="file for the table; with several precisions, one file each, whose name has the precision after its stem",
    )


def main(args: argparse.Namespace) -> int:
    from draftwood.tools.demo import resolve

    source, precisions = resolve(args.source), parse_precisions(args.precision)
    is_bundle = (source / MANIFEST_FILE).is_file()
    if is_bundle and args.device:
        raise RequestError(f"--device {args.device}: a teacher is modelled, and {source} is a bundle; name its MODEL")
    outs = [table_file(args.out, precision, precisions) for precision in precisions]
    if args.device:
        tables = [_modelled(source, args, precision) for precision in precisions]
    else:
        for out in outs:
            prepare_out(out)
        tables = [_measured(source, args)] if is_bundle else _measured_teacher(source, args, precisions)
    for precision, out, table in zip(precisions, outs, tables, strict=True):
        write_out(out, table.to_json().encode())
        print(f"{precision}, {table_text(table)}" if len(precisions) > 1 else table_text(table))
    return 0


def parse_precisions(text: str) -> tuple[Precision, ...]:
    """The precisions of ``nbits,w8a8``."""
    names = tuple(text.split(","))
    if set(names) - set(PRECISIONS) or len(set(names)) < len(names):
        raise RequestError(f"--precision {text}: expected some of {', '.join(PRECISIONS)}, each once")
    return cast("tuple[Precision, ...]", names)


def _modelled(folder: Path, args: argparse.Namespace, precision: Precision) -> LatencyTable:
    from draftwood.compiler.bundle.request import PREFILL_ROWS, check_slots
    from draftwood.compiler.device.devices import device
    from draftwood.compiler.device.table import modelled_table
    from draftwood.compiler.teachers.checkpoint import Checkpoint
    from draftwood.compiler.teachers.conversion import in_precision

    chosen = device(args.device)
    config = in_precision(Checkpoint.describe(folder), precision, npu=True).config
    slots = parse_sizes("--kv", args.kv) if args.kv else tuple(c for c in MODELLED_SLOTS if c <= config.max_positions)
    if not slots:
        raise RequestError(
            f"--kv: the teacher knows {config.max_positions} positions only; name the KV lengths to model"
        )
    check_slots(slots, config.max_positions)
    drafter = parse_drafter(args.drafter, folder) if args.drafter else None
    texts = parse_texts(args.batch_size) if args.batch_size else (1,)
    _check_ranks(args.ranks, config, drafter, texts)
    return modelled_table(
        chosen,
        config,
        parse_rows(args.rows) if args.rows else MODELLED_ROWS,
        slots,
        drafter=drafter.cost if drafter else None,
        block=drafter.block if drafter else None,
        int8_drafter=bool(drafter and drafter.int8),
        teacher={"name": folder.resolve().name, "config_digest": _digest(config)},
        prefill=PREFILL_ROWS,
        ranks=args.ranks,
        texts=texts,
    )


def _digest(config: TeacherConfig) -> str:
    """SHA-256 of all that is known of a teacher but its weights, in whichever format they are."""
    return hashlib.sha256(msgspec.json.encode(config, order="deterministic")).hexdigest()


def _check_ranks(ranks: int, config: TeacherConfig, drafter: ModelledDrafter | None, texts: Sequence[int]) -> None:
    """Raises RequestError if no bundle of such ranks can be built."""
    from draftwood.compiler.bundle.request import MOST_RANKS
    from draftwood.compiler.device.steps import int8_draft
    from draftwood.compiler.ranks.share import check_ranks

    if not 1 <= ranks <= MOST_RANKS:
        raise RequestError(f"--ranks {ranks}: expected 1 to {MOST_RANKS} devices")
    if ranks > 1 and texts[-1] > 1:
        raise RequestError(
            f"--batch-size {texts[-1]}: {ranks} ranks take one text a launch; leave --ranks or --batch-size out"
        )
    check_ranks(config, ranks, "the teacher")
    if drafter is not None:
        check_ranks(int8_draft(drafter.block, drafter.int8), ranks, "the drafter")


def parse_rows(text: str) -> tuple[int, ...]:
    """Row counts, ascending, from ``1,16,17``."""
    rows = parse_sizes("--rows", text)
    if rows[0] < 1:
        raise RequestError(f"--rows {text}: a step has at least 1 row")
    return rows


def parse_texts(text: str) -> tuple[int, ...]:
    """Numbers of texts, ascending, from ``1,2,4``; 1 is always among them."""
    texts = parse_sizes("--batch-size", text)
    if not 1 <= texts[0] <= texts[-1] <= MOST_TEXTS:
        raise RequestError(f"--batch-size {text}: expected numbers from 1 to {MOST_TEXTS}")
    return tuple(sorted({1, *texts}))


def _drafters() -> str:
    """The values of ``--drafter``."""
    specs = (f"{kind.name}{kind.cost_sizes}" for kind in kinds() if kind.cost_source is not None)
    return f"{', '.join(specs)} or a drafter's folder"


class ModelledDrafter(NamedTuple):
    """A drafter's cost, the sizes of its decoder blocks, and whether its layers are W8A8."""

    cost: DraftCost
    block: TeacherConfig
    int8: bool


def parse_drafter(text: str, teacher: Path) -> ModelledDrafter:
    """The drafter that a spec or a drafter's folder describes."""
    from draftwood.compiler.teachers.checkpoint import Checkpoint
    from draftwood.tools.demo import resolve

    (name, *sizes), int8, cost, described = text.split(":"), False, None, Checkpoint.describe(teacher)
    block = described.config
    if (path := resolve(text)).exists():
        model = describe_drafter(path, described).model
        int8, block = bool(model.quantised), model.block(block)
        if (known := kind_named(model.kind).cost) is not None:
            cost = known.of_config(model.config)
    elif name in names() and (known := kind_named(name).cost) is not None:
        cost = known.of_sizes(sizes, block)
    if cost is None:
        raise RequestError(f"--drafter {text}: expected {_drafters()}")
    return ModelledDrafter(cost, cost.block(block), int8)


def _measured_teacher(model: Path, args: argparse.Namespace, precisions: Sequence[Precision]) -> list[LatencyTable]:
    """The steps of a teacher without a drafter, in bundles that are removed."""
    if args.drafter or args.ranks != 1:
        raise RequestError("--drafter and --ranks: they go with --device; without, name a BUNDLE with its drafter")
    with tempfile.TemporaryDirectory(dir=args.out.absolute().parent, prefix="profiled-") as folder:
        bundles = [_built(model, args, precision, Path(folder)) for precision in precisions]
        return _times(bundles, args, _TEACHER_ROUNDS)


def _built(model: Path, args: argparse.Namespace, precision: Precision, folder: Path) -> Bundle:
    import draftwood
    from draftwood.compiler.teachers.checkpoint import Checkpoint
    from draftwood.runtime.bundle import Bundle
    from draftwood.tools.making.needs import check_room
    from draftwood.trees.spec import read_specs

    check_room(Checkpoint.open(model), precision, folder)
    request = draftwood.BuildRequest(
        model=model,
        drafter=None,
        trees=read_specs("plain").trees,
        slots=parse_sizes("--kv", args.kv) if args.kv else (1024,),
        prefill_rows=(),  # most of the work of a build, and nothing that is timed
        precision=precision,
        texts=parse_texts(args.batch_size)[-1] if args.batch_size else 1,
    )
    draftwood.build(request, folder / precision, progress=_say_building)
    return Bundle.open(folder / precision)


def _say_building(name: str) -> None:
    print(f"building {name}", file=sys.stderr, flush=True)


def _measured(folder: Path, args: argparse.Namespace) -> LatencyTable:
    from draftwood.runtime.bundle import Bundle

    if args.drafter or args.ranks != 1 or args.precision != "exact":
        raise RequestError("--drafter, --ranks and --precision: a BUNDLE has its own; leave them out")
    return _times([Bundle.open(folder)], args)[0]


def _times(opened: Sequence[Bundle], args: argparse.Namespace, rounds: int | None = None) -> list[LatencyTable]:
    from draftwood.compiler.bundle.request import check_slots
    from draftwood.runtime.engines.bitwise import BitwiseEngine
    from draftwood.runtime.engines.choice import host_engine
    from draftwood.runtime.engines.cpu import CpuEngine
    from draftwood.threads import default_threads, share_threads

    def engine(bundle: Bundle) -> CpuEngine:
        """The one that decodes from the bundle on this machine's processor."""
        kind = BitwiseEngine if host_engine(bundle) == "bitwise" else CpuEngine
        return kind(_widened(bundle, max(rows, default=1)))

    rows = parse_rows(args.rows) if args.rows else ()
    texts = parse_texts(args.batch_size) if args.batch_size else (1,)
    share_threads()
    engines = [engine(bundle) for bundle in opened]
    most = min(engine.max_batch for engine in engines)
    if texts[-1] > most:
        by = "; engine bitwise, for trees that branch over rows in int8, takes one" if engines[0].bitwise else ""
        raise RequestError(f"--batch-size {args.batch_size}: {opened[0].folder} has graphs for at most {most}{by}")
    bundled = {gear.slots for bundle in opened for gear in bundle.manifest.gears}
    slots = parse_sizes("--kv", args.kv) if args.kv else tuple(sorted(bundled))
    check_slots(slots)
    if slots[-1] > (longest := max(bundled)):
        raise RequestError(f"--kv {slots[-1]}: {opened[0].folder} has KV lengths up to {longest}; choose at most that")
    return measure(engines, rows, slots, rounds=rounds, threads=default_threads(), texts=texts)


def _widened(bundle: Bundle, rows: int) -> Bundle:
    """The bundle with buffers for steps of ``rows`` rows: its CPU graph takes any number, its buffers did not."""
    dims = bundle.manifest.dims
    dims = msgspec.structs.replace(dims, branch_rows=max(dims.branch_rows, rows))
    return replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, dims=dims))
