"""``draftwood build``: a checkpoint and draft trees in, a frozen bundle out."""

from __future__ import annotations

import argparse
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwood.errors import RequestError
from draftwood.files import json_text

if TYPE_CHECKING:
    from draftwood.compiler.bundle.request import BuildRequest
    from draftwood.manifest import Manifest
    from draftwood.planned import Gear
    from draftwood.trees.spec import Specs


# Those of `draftwood.compiler.teachers.conversion`, which takes seconds to import.
PRECISIONS = ("exact", "nbits", "nbits8", "nbits-head", "w8a8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="teacher: a Hugging Face folder, a GGUF file, or demo")
    parser.add_argument(
        "--drafter",
        metavar="DIR",
        help="a folder or file of any kind",
    )
    parser.add_argument(
        "--tree",
        default="plain",
        metavar="SPEC[,SPEC...]",
        help="plain | chain:D | full:k1xk2x... | backbone:D:k | medusa:FILE | tree:FILE | plan:FILE | budget:MxDxk"
        " (with EAGLE-3 or DSpark: M nodes, D levels, k candidates, a tree chosen at every step) | lookup:SPEC (tokens"
        " that followed earlier in the text, without a drafter); plain is always added",
    )
    parser.add_argument(
        "--kv",
        metavar="C[,C...]",
        help="KV lengths in slots, multiples of 128: every tree at each (default: the plan's gears, or 1024)",
    )
    parser.add_argument("--target", default="onnx", metavar="T[,T...]", help="onnx: for CPUs; ge: for Ascend NPUs")
    parser.add_argument(
        "--weights",
        default="copy",
        choices=("copy", "link", "none"),
        help="of the NPU's graphs; copy: into the bundle; link: read from the checkpoint's files if their form fits;"
        " none: added later by bind",
    )
    parser.add_argument(
        "--int8-drafter", action="store_true", help="the drafter's linear layers in eight bits; no text changes"
    )
    parser.add_argument(
        "--precision",
        default="exact",
        choices=PRECISIONS,
        help="of the teacher's linear layers; exact: as the checkpoint has them; nbits: packed ones as they are, others"
        " rounded to four bits, rows rounded block by block; nbits8: the same with eight bits; nbits-head: nbits, the"
        " output matrix in W8A8; w8a8: rounded to W8A8",
    )
    parser.add_argument(
        "--bitwise", action="store_true", help="also the CPU's step in which a row has the same bits in every tree"
    )
    parser.add_argument("--one-launch", action="store_true", help="also one NPU graph for the whole step of every gear")
    parser.add_argument(
        "--ranks", type=int, default=1, metavar="N", help="split the NPU's graphs over so many devices (default 1)"
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=1,
        metavar="N",
        help="also graphs of 2, 4, ... up to N sequences a launch (default 1)",
    )
    parser.add_argument(
        "--corpus", type=Path, metavar="FILE.txt", help="trees that are looked up find tokens in this text, too"
    )
    parser.add_argument("--out", required=True, type=Path, metavar="BUNDLE", help="folder to make; must not exist")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def parse_sizes(flag: str, text: str) -> tuple[int, ...]:
    """Whole numbers, ascending, from ``256,1024``."""
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise RequestError(f"{flag} {text}: expected whole numbers separated by commas, such as 256,1024") from None
    return tuple(sizes)


def lengths(specs: Specs, kv: str | None) -> tuple[int, ...]:
    """KV lengths: those that the plan has gears for, or those that were asked for."""
    if kv is not None or not specs.gears:
        return parse_sizes("--kv", kv or "1024")
    return tuple(sorted({gear.slots for gear in specs.gears}))


def gears_of(specs: Specs, kv: str | None) -> tuple[Gear, ...]:
    """The plan's gears and no others; or its trees at each KV length that was asked for, without step times."""
    from msgspec.structs import replace

    from draftwood.planned import named_gears

    if kv is None:
        return specs.gears
    texts: dict[str, set[int]] = {}
    for gear in specs.gears:
        texts.setdefault(gear.tree, set()).update(gear.texts)
    named = named_gears((tree, slots) for tree in texts for slots in parse_sizes("--kv", kv))
    return tuple(replace(gear, texts=tuple(sorted(texts[gear.tree]))) for gear in named)


def parse_targets(text: str) -> tuple[str, ...]:
    """Targets, each once, in the order in which they are listed."""
    from draftwood.compiler.targets.registry import TARGETS

    named = text.split(",")
    for target in named:
        if target not in TARGETS:
            raise RequestError(f"--target {target}: expected {' or '.join(TARGETS)}, or both: {','.join(TARGETS)}")
    return tuple(target for target in TARGETS if target in named)


def main(args: argparse.Namespace) -> int:
    import draftwood
    from draftwood.tools.demo import resolve
    from draftwood.trees.spec import read_specs

    specs = read_specs(args.tree)
    request = draftwood.BuildRequest(
        model=resolve(args.model),
        drafter=resolve(args.drafter) if args.drafter else None,
        trees=specs.trees,
        slots=lengths(specs, args.kv),
        gears=gears_of(specs, args.kv),
        plan=specs.plan,
        targets=parse_targets(args.target),
        weights=args.weights,
        precision=args.precision,
        int8_drafter=args.int8_drafter,
        bitwise=args.bitwise,
        whole=args.one_launch,
        ranks=args.ranks,
        texts=args.batch_size,
        corpus=args.corpus,
    )
    watch = Stopwatch(f"building with {_room(request, args.out)}" if "onnx" in request.targets else "")
    manifest = draftwood.build(request, args.out, progress=watch.next)
    stages = watch.stop()
    if args.drafter and manifest.drafter is None:
        print(f"--drafter {args.drafter}: no tree is drafted by it, so it is left out", file=sys.stderr)
    for role in counted_for_another(specs, manifest) if args.weights != "none" else ():
        print(
            f"--tree {args.tree}: its plan was counted with another {role}, or one of another precision; no text"
            " changes, but other trees may be faster: calibrate and plan with this one",
            file=sys.stderr,
        )
    summary = {
        "bundle": str(args.out),
        "seconds": round(sum(stage["seconds"] for stage in stages), 1),
        "gears": [gear.name for gear in manifest.gears],
        "graphs": sum(len(graphs.graphs) for graphs in manifest.graph_sets),
        "bytes": sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file()),
        "peak_memory_mb": max(stage["peak_memory_mb"] for stage in stages),
        "stages": stages,
    }
    if args.json:
        print(json_text(summary))
    else:
        print(
            f"{args.out}: {summary['graphs']} graphs, {len(manifest.gears)} gears, {summary['bytes'] / 1e6:.1f} MB,"
            f" {summary['seconds']} s, at most {summary['peak_memory_mb']} MB of memory"
        )
    return 0


def counted_for_another(specs: Specs, manifest: Manifest) -> list[str]:
    """The models of a plan's counts, by what each is, that are not the bundle's."""
    models = {"teacher": manifest.teacher.digest, "drafter": manifest.drafter.digest if manifest.drafter else None}
    return [role for role, digest in models.items() if digest and specs.models.get(role, digest) != digest]


def _room(request: BuildRequest, out: Path) -> str:
    """The room that the weights take here; RequestError if the disk has no room for them. They may run elsewhere."""
    from draftwood.compiler.teachers.checkpoint import Checkpoint
    from draftwood.tools.making.needs import COPIES, check_room

    copies = COPIES if "onnx" in request.targets else 1
    return check_room(Checkpoint.open(request.model), request.precision, out, copies, runs=False)


@dataclass
class Stopwatch:
    """Seconds of every stage, and the process's largest memory until its end; ``heading`` stands before the first."""

    heading: str = ""
    stages: list[dict[str, Any]] = field(default_factory=list)
    _began: float = 0.0
    _name: str = ""

    def next(self, name: str) -> None:
        """Ends the stage that runs and begins another, which it names on stderr."""
        if self.heading and not self.stages and not self._name:
            print(self.heading, file=sys.stderr, flush=True)
        self._end()
        self._name, self._began = name, time.monotonic()
        print(f"building {name}", file=sys.stderr, flush=True)

    def stop(self) -> list[dict[str, Any]]:
        self._end()
        return self.stages

    def _end(self) -> None:
        if self._name:
            unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit >> 20
            seconds = round(time.monotonic() - self._began, 2)
            self.stages.append({"name": self._name, "seconds": seconds, "peak_memory_mb": peak})
            self._name = ""
