"""``draftwood export``: a drafter in the layout that another engine serves."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwood.errors import RequestError

if TYPE_CHECKING:
    from draftwood.compiler.drafters.kind import Folder

# Each a module with ``add_arguments`` and ``main``, and what it writes.
FORMATS = {
    "speculators": ("draftwood.tools.commands.export", "a drafter for vLLM, as speculators writes it"),
    "vllm-ascend": ("draftwood.tools.commands.export_ascend", "a drafter for vLLM on an Ascend NPU, with settings"),
    "specforge": ("draftwood.tools.commands.export", "a drafter for SGLang, as SpecForge writes it"),
    "deepspec": ("draftwood.tools.commands.export", "a DSpark drafter for SGLang and vLLM, as DeepSpec writes it"),
    "medusa": ("draftwood.tools.commands.export", "Medusa heads as FasterDecoding writes them, for TGI"),
    "vllm": ("draftwood.tools.commands.export", "Medusa heads for vLLM"),
}
# Those that say how many tokens to draft.
PROPOSING = ("speculators", "vllm-ascend")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    formats = parser.add_subparsers(dest="format", metavar="FORMAT", required=True)
    for name, (module, line) in FORMATS.items():
        one = formats.add_parser(name, help=line, description=f"{line[0].upper()}{line[1:]}.", allow_abbrev=False)
        if module == __name__:
            add_drafter_arguments(one, tokens=name in PROPOSING)
        else:
            importlib.import_module(module).add_arguments(one)


def main(args: argparse.Namespace) -> int:
    module = FORMATS[args.format][0]
    code: int = export_drafter(args) if module == __name__ else importlib.import_module(module).main(args)
    return code


def add_drafter_arguments(parser: argparse.ArgumentParser, *, tokens: bool) -> None:
    """Of the formats that hold a drafter; ``tokens`` of those that say how many to draft."""
    parser.add_argument("drafter", metavar="DRAFTER", help="a drafter's folder, or a shipped one's name")
    parser.add_argument("--model", required=True, metavar="DIR", help="its teacher's folder, or demo")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="folder to write, not there yet")
    parser.add_argument("--verifier", metavar="NAME", help="what its reader finds the teacher by (the folder's name)")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    parser.set_defaults(tokens=None)
    if tokens:
        said = "tokens to draft a step (all of a pass; 5 with EAGLE-3)"
        parser.add_argument("--tokens", type=int, metavar="N", help=said)


def export_drafter(args: argparse.Namespace) -> int:
    """Writes a drafter and says what was written."""
    found = write_drafter(args, args.format)
    print(json.dumps(found) if args.json else described(found))
    return 0


def write_drafter(args: argparse.Namespace, layout: str) -> dict[str, Any]:
    """Writes config.json and model.safetensors, whole or not at all, and opens them again: what they are."""
    from draftwood.compiler.drafters.registry import kind_of, open_drafter
    from draftwood.compiler.teachers.checkpoint import Checkpoint
    from draftwood.tools.demo import resolve

    if args.out.exists():
        raise RequestError(f"--out {args.out}: exists already; name a folder that is not there")
    if args.tokens is not None and args.tokens < 1:
        raise RequestError(f"--tokens {args.tokens}: expected 1 or more")
    teacher, source = Checkpoint.open(resolve(args.model)), resolve(args.drafter)
    verifier = args.verifier or teacher.folder.resolve().name
    opened = open_drafter(source, teacher)
    if opened.model.quantised:
        raise RequestError(f"{source}: is quantised, and engines read plain weights; export the original")
    kind = kind_of(source)
    folder = kind.exported(opened, teacher, layout, args.tokens, verifier)
    _write(args.out, folder)
    open_drafter(args.out, teacher)
    found = {"folder": str(args.out), "format": layout, "kind": kind.name, "file": folder.file}
    sizes = [tensor.nbytes for tensor in folder.tensors.values()]
    return found | {"tensors": len(sizes), "bytes": sum(sizes)}


def described(found: dict[str, Any]) -> str:
    """What was written, in a line."""
    return f"{found['folder']}: {found['kind']}, {found['tensors']} tensors, {found['bytes'] / 1e6:.1f} MB"


def _write(out: Path, folder: Folder) -> None:
    """The folder is made beside its name and renamed."""
    from safetensors.torch import save_file

    part = out.with_name(f".{out.name}.part")
    try:
        part.mkdir()
        (part / "config.json").write_text(json.dumps(folder.fields, indent=2) + "\n")
        save_file(folder.tensors, part / folder.file, metadata={"format": "pt"})
        part.rename(out)
    except OSError as error:
        raise RequestError(f"--out {out}: cannot be written: {error.strerror}") from error
