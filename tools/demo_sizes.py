"""The demo pair at the sizes where a real teacher lives: widened with zeros, the same function at a larger cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from draftwood.compiler.config import read_config
from draftwood.tools import demo
from draftwood.tools.widen import widen, widen_medusa


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A larger shape for the demo teacher; heads keep their width of 64."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int


SIZES: dict[str, Shape | None] = {
    "native": None,
    "110m": Shape(hidden=768, intermediate=2048, layers=16, heads=12, kv_heads=6),
    "500m": Shape(hidden=1280, intermediate=3584, layers=26, heads=20, kv_heads=10),
}


def models(size: str, work: Path) -> tuple[Path, Path]:
    """Teacher and heads of a size, made under ``work`` unless they are there."""
    teacher, heads, shape = demo.resolve("demo"), demo.resolve("demo-medusa"), SIZES[size]
    if shape is None:
        return teacher, heads
    wide, wide_heads = work / f"teacher-{size}", work / f"medusa-{size}"
    if not wide.exists():
        # fp32, since bf16 cannot hold a gain times the square root of 3 or 5
        widen(teacher, wide, **asdict(shape), dtype="float32")
    if not wide_heads.exists():
        widen_medusa(heads, wide_heads, read_config(teacher), hidden=shape.hidden, dtype="float32")
    return wide, wide_heads
