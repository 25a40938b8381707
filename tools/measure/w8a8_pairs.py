"""The bundles that `draftwood.tools.measure.w8a8` compares, and what they are made of; what is there stays as it is."""

from __future__ import annotations

import json
import shutil
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from draftwood import manifest as m
from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.bundle.staging import staged
from draftwood.compiler.targets.onnx import WEIGHTS_FILE
from draftwood.compiler.quantisation.teacher import Request, quantise
from draftwood.runtime.text.tokenizer import Tokenizer
from draftwood.tools.calibration_texts import read_texts
from draftwood.tools.demo.sizes import bundle_name, models
from draftwood.tools.measure.w8a8_shown import BOTH
from draftwood.trees import Topology, parse_specs

SLOTS = 1024  # the KV length of all bundles
# Of as many rows as the widest step that is timed, so that a bundle's buffers hold it.
WIDEST = ("rows", Topology.full((3, 2, 1)))
_STATIC = (32,)  # prompts of graphs that no CPU runs: as few as can be


def bundles(size: str, args: Namespace) -> dict[str, Path]:
    """A bundle of each precision, by its name."""
    teacher, drafter = models(size, args.work, args.drafter)
    taught = quantised(teacher, _folder("teacher", size, args), args.calibration)
    found = {"fp32": (teacher, drafter), "w8a8": (taught, drafter), BOTH: (taught, drafter)}
    return {name: _bundle(name, size, args, *pair) for name, pair in found.items()}


def _bundle(name: str, size: str, args: Namespace, teacher: Path, drafter: Path) -> Path:
    folder = _folder(name, size, args, (args.tree, SLOTS))
    if not folder.exists():
        _say(f"building {folder.name}")
        trees = (*parse_specs(args.tree), WIDEST)
        asked = BuildRequest(
            model=teacher,
            drafter=drafter,
            trees=trees,
            slots=(SLOTS,),
            prefill_rows=_STATIC,
            int8_drafter=name == BOTH,
        )
        build(asked, folder)
    return folder


def _folder(what: str, size: str, args: Namespace, content: object = None) -> Path:
    name: str = bundle_name(f"w8a8-{what}".replace(" ", "-"), size, args.drafter, content)
    return Path(args.work / name)


def quantised(teacher: Path, out: Path, calibration: Path) -> Path:
    """The teacher with all its linear layers in int8, made at ``out`` unless it is there."""
    if not out.exists():
        texts = read_texts(calibration, Tokenizer.load(teacher), limit=32, longest=128)
        quantise(Request(model=teacher, texts=texts.calibration, head=True), out)
    return out


def dense(bundles: Mapping[str, Path]) -> dict[str, Path]:
    """Bundles of the same graphs with random weights without zeros, beside those given unless they are there."""
    found = {name: folder.with_name(f"{folder.name}-dense") for name, folder in bundles.items()}
    for name, out in found.items():
        if not out.exists():
            _say(f"writing {out.name}")
            with staged(out) as folder:
                shutil.copytree(bundles[name], folder, dirs_exist_ok=True)
                fill(folder / WEIGHTS_FILE)
                old = m.read_manifest(folder)
                files = {**old.files, WEIGHTS_FILE: m.list_file(folder / WEIGHTS_FILE)}
                (folder / m.MANIFEST_FILE).write_bytes(m.encode(msgspec.structs.replace(old, files=files)))
    return found


def fill(weights: Path) -> None:
    """Overwrites a safetensors file's matrices with random numbers and the zeros of its vectors with ones."""
    random = np.random.default_rng(0)
    size = int.from_bytes(weights.open("rb").read(8), "little")
    header = json.loads(weights.open("rb").read(8 + size)[8:])
    for entry in header.values():
        kind = {"F32": np.float32, "I8": np.int8}.get(entry["dtype"])
        if kind is None:
            continue
        value = np.memmap(weights, kind, "r+", 8 + size + entry["data_offsets"][0], tuple(entry["shape"]))
        if value.ndim == 1:
            value[value == 0] = 1
        elif kind == np.int8:
            value[...] = random.integers(1, 128, value.shape) * random.choice((-1, 1), value.shape)
        else:  # keeps the size of what it multiplies
            value[...] = random.standard_normal(value.shape, np.float32) * value.shape[-1] ** -0.5


def _say(stage: str) -> None:
    print(stage, file=sys.stderr, flush=True)
