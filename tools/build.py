"""``draftwood build``: a checkpoint and draft trees in, a frozen bundle out."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from draftwood.errors import RequestError

TARGETS = ("onnx",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="DIR", help="teacher: a Hugging Face folder, or demo")
    parser.add_argument("--drafter", metavar="DIR", help="Medusa heads: a folder or file, or demo-medusa")
    parser.add_argument(
        "--tree",
        default="plain",
        metavar="SPEC[,SPEC...]",
        help="plain | chain:D | full:k1xk2x... | backbone:D:k | medusa:FILE | tree:FILE; plain is always added",
    )
    parser.add_argument("--kv", default="1024", metavar="C[,C...]", help="KV lengths in slots, multiples of 128")
    parser.add_argument("--target", default="onnx", metavar="T[,T...]", help="what to lower to: onnx")
    parser.add_argument("--out", required=True, type=Path, metavar="BUNDLE", help="folder to make; must not exist")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def parse_slots(text: str) -> tuple[int, ...]:
    """KV lengths, ascending, from ``256,1024``."""
    try:
        slots = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise RequestError(f"--kv {text}: expected whole numbers separated by commas, such as 256,1024") from None
    return tuple(slots)


def check_targets(text: str) -> None:
    """Refuses a target that this version cannot lower to."""
    for target in text.split(","):
        if target not in TARGETS:
            raise RequestError(f"--target {target}: expected {', '.join(TARGETS)}; other targets are not built yet")


def main(args: argparse.Namespace) -> int:
    from draftwood.compiler.bundle import BuildRequest, build
    from draftwood.tools.demo import resolve
    from draftwood.trees import parse_specs

    check_targets(args.target)
    request = BuildRequest(
        model=resolve(args.model),
        drafter=resolve(args.drafter) if args.drafter else None,
        trees=tuple(parse_specs(args.tree)),
        slots=parse_slots(args.kv),
    )
    began = time.monotonic()
    manifest = build(request, args.out, progress=lambda what: print(f"building {what}", file=sys.stderr, flush=True))
    summary = {
        "bundle": str(args.out),
        "seconds": round(time.monotonic() - began, 1),
        "gears": [gear.name for gear in manifest.gears],
        "graphs": len(manifest.graphs),
        "bytes": sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file()),
    }
    if args.json:
        print(json.dumps(summary))
    else:
        print(
            f"{args.out}: {summary['graphs']} graphs, {len(manifest.gears)} gears, {summary['bytes'] / 1e6:.1f} MB,"
            f" {summary['seconds']} s"
        )
    return 0
