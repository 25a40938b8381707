"""The demo pairs at the sizes where a real teacher lives: widened with zeros, the same function at a larger cost."""

from __future__ import annotations

import zlib
from pathlib import Path
from shutil import copytree, ignore_patterns, rmtree

import torch
from safetensors.torch import load_file, save_file

from draftwood.compiler.bundle.staging import staged
from draftwood.compiler.teachers.registry import read_config
from draftwood.manifest import SCHEMA_VERSION
from draftwood.tools import demo
from draftwood.tools.demo.widen import widen, widen_drafter

# Larger shapes for the demo teacher; heads keep their width of 64.
SIZES: dict[str, dict[str, int] | None] = {
    "native": None,
    "110m": {"hidden": 768, "intermediate": 2048, "layers": 16, "heads": 12, "kv_heads": 6},
    "500m": {"hidden": 1280, "intermediate": 3584, "layers": 26, "heads": 20, "kv_heads": 10},
    "1.5b": {"hidden": 1536, "intermediate": 8960, "layers": 28, "heads": 24, "kv_heads": 12},
}
# Whose zeros become random weights: a step's cost is that of a trained teacher, and its text is nobody's.
DENSE = ("1.5b",)


def models(size: str, work: Path, drafter: str) -> tuple[Path, Path]:
    """Teacher and a shipped drafter, by its name, of a size; made under ``work`` unless they are there.

    The drafter is in plain numbers whatever its name says.
    """
    small, own, shape = demo.resolve("demo"), demo.shipped(drafter), SIZES[size]
    if shape is None:
        return small, own
    wide, wide_own = (work / f"{source.name}-{size}-{digest(source):08x}" for source in (small, own))
    # fp32, since bf16 cannot hold a gain times the square root of 3 or 5
    if not wide.exists():
        made = wide.with_name(f"{wide.name}-zeros") if size in DENSE else wide
        if not made.exists():
            widen(small, made, **shape, dtype="float32")
        if size in DENSE:
            _densely(made, wide)
            rmtree(made)
    if not wide_own.exists():
        widen_drafter(own, wide_own, small, read_config(wide), dtype="float32")
    return wide, wide_own


def _densely(sparse: Path, out: Path) -> None:
    """The same folder with small random numbers in the place of a matrix's zeros."""
    random = torch.Generator().manual_seed(0)
    with staged(out) as folder:
        copytree(sparse, folder, ignore=ignore_patterns("*.safetensors"), dirs_exist_ok=True)
        tensors = load_file(sparse / "model.safetensors")
        for value in tensors.values():
            if value.dim() == 2:
                value[value == 0] = 0.02 * torch.randn(int((value == 0).sum()), generator=random)
        save_file(tensors, folder / "model.safetensors")


def bundle_name(use: str, size: str, drafter: str, content: object) -> str:
    """The folder of a shipped pair's bundle, by all that goes into it: another pair or ``content`` is another name."""
    pair = digest(demo.resolve("demo")) ^ digest(demo.shipped(drafter))
    return f"{use}-{size}-{drafter}-{zlib.crc32(repr((SCHEMA_VERSION, content)).encode(), pair):08x}"


def digest(folder: Path) -> int:
    """A number of a model's configuration and weights, so that what is made of it is not taken for another's."""
    found = 0
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors" or path.name == "config.json":
            found = zlib.crc32(path.read_bytes(), found)
    return found
