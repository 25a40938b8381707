"""``draftwood export``: a drafter in the layout that another engine serves."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

FORMATS = {
    "speculators": "for vLLM, on NPUs too, as speculators writes it",
    "specforge": "for SGLang, as SpecForge writes it",
    "deepspec": "a DSpark drafter for SGLang and vLLM, as DeepSpec writes it",
    "vllm": "Medusa heads for vLLM",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    formats = "; ".join(f"{name}: {line}" for name, line in FORMATS.items())
    parser.add_argument("format", choices=FORMATS, metavar="FORMAT", help=formats)
    parser.add_argument("drafter", metavar="DRAFTER", help="a drafter's folder")
    parser.add_argument("model", metavar="MODEL", help="its teacher: a folder, a GGUF file, or demo")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="folder to write, not there yet")


def main(args: argparse.Namespace) -> int:
    figures = _write_drafter(args)
    size = f"{figures['tensors']} tensors, {figures['bytes'] / 1e6:.1f} MB"
    print(f"{figures['folder']}: {figures['kind']}, {size}")
    return 0


def _write_drafter(args: argparse.Namespace) -> dict[str, Any]:
    """Writes config.json and model.safetensors, whole or not at all, and opens them again; returns a description."""
    from draftwood.compiler.bundle.staging import staged
    from draftwood.compiler.checkpoints.safetensors_file import write_tensors
    from draftwood.compiler.drafters.registry import open_drafter
    from draftwood.compiler.teachers.checkpoint import Checkpoint
    from draftwood.files import real_path
    from draftwood.tools.demo import resolve

    with staged(real_path(args.out)) as folder:
        teacher = Checkpoint.open(resolve(args.model))
        verifier = teacher.path.resolve().name  # its reader finds the teacher by this
        opened = open_drafter(resolve(args.drafter), teacher)
        exported = opened.model.exported(opened.checkpoint, teacher, args.format, verifier)
        (folder / "config.json").write_text(json.dumps(exported.fields, indent=2) + "\n")
        write_tensors(folder / exported.file, exported.tensors)
    open_drafter(args.out, teacher)
    figures = {"folder": str(args.out), "format": args.format, "kind": opened.model.kind, "file": exported.file}
    sizes = [tensor.nbytes for tensor in exported.tensors.values()]
    return figures | {"tensors": len(sizes), "bytes": sum(sizes)}
