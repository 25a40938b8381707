"""Rotary position embedding as config.json spells it: its base and its scaling."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

from draftwood.compiler.checkpoints.fields import Fields, IgnoredField
from draftwood.compiler.teachers.config import RopeScaling

_ORIGINAL, _DECLARED = "original_max_position_embeddings", "max_position_embeddings"
_ROPE_FIELDS = {"rope_type", "type", "rope_theta", "factor", "partial_rotary_factor"}
_OWN_FIELDS = {
    "llama3": {"low_freq_factor", "high_freq_factor", _ORIGINAL},
    "yarn": {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate", _ORIGINAL},
}


def read_rope(fields: Fields, default_theta: float) -> tuple[float, RopeScaling | None]:
    """Base and scaling: ``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling``. If both are there
    they must mean the same. A field that transformers ignores with a warning is treated alike."""
    spelled = [name for name in ("rope_scaling", "rope_parameters") if fields.get(name)]
    where = spelled[0] if spelled else "rope_scaling"
    for name in spelled:
        if not isinstance(fields.get(name), dict):
            fields.fail(name, "an object")
    outside = fields.number("rope_theta", default_theta)
    if len(spelled) == 2 and _meant(fields, spelled[0], outside) != _meant(fields, spelled[1], outside):
        fields.fail("rope_scaling", "the same as rope_parameters, or only one of the two")
    rope = Fields(fields.path, fields.get(where, {}))
    if any(isinstance(value, dict) for value in rope.values.values()):
        fields.fail(where, "one object for all layers; a base or scaling for each kind of layer is not supported")
    theta = rope.number("rope_theta", outside)
    kind = _kind(rope)
    if kind not in ("default", *_READERS) or rope.get("partial_rotary_factor", 1) != 1:
        fields.fail(where, f"rope_type default, {', '.join(_READERS)}, over the whole head")
    if unknown := sorted(rope.values.keys() - _ROPE_FIELDS - _OWN_FIELDS.get(kind, set())):
        message = f"{fields.path}: {where} has {unknown[0]!r}, which nothing reads with rope_type {kind!r}; left out"
        warnings.warn(message, IgnoredField, stacklevel=2)
    return theta, None if kind == "default" else _READERS[kind](rope, fields)


def _kind(rope: Fields) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _meant(fields: Fields, name: str, theta: float) -> dict[str, Any]:
    """An object's meaning, in one spelling."""
    rope = Fields(fields.path, fields.get(name))
    if name == "rope_parameters" and _kind(rope) == "default":  # it leaves the kind to rope_scaling, not the base
        return _meant(fields, "rope_scaling", theta) | {"rope_theta": rope.number("rope_theta", theta)}
    values = {
        key: value for key, value in rope.values.items() if key not in ("type", "rope_type") and value is not None
    }
    return {"rope_theta": theta, **values, "rope_type": _kind(rope)}


def reach(declared: int, scaling: RopeScaling | None) -> int:
    """Longest context in tokens: yarn is often added to a config.json whose declared context stays as it was."""
    if scaling is None or scaling.kind != "yarn":
        return declared
    return max(declared, int(min(scaling.factor * scaling.original_max_positions, 2**31 - 1)))


def _linear(rope: Fields, fields: Fields) -> RopeScaling:
    return RopeScaling(kind="linear", factor=rope.number("factor"))


def _dynamic(rope: Fields, fields: Fields) -> RopeScaling:
    return RopeScaling(kind="dynamic", factor=rope.number("factor"), original_max_positions=_context(fields, _DECLARED))


def _llama3(rope: Fields, fields: Fields) -> RopeScaling:
    return RopeScaling(
        kind="llama3",
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_positions=_original(rope, fields),
    )


def _yarn(rope: Fields, fields: Fields) -> RopeScaling:
    original = _original(rope, fields)
    # A null factor is the ratio of the two contexts, and a beta of 0 counts as left out, in transformers too.
    factor = rope.number("factor", _context(fields, _DECLARED) / original)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_positions=original,
        beta_slow=rope.number("beta_slow", 1) or 1.0,
        beta_fast=rope.number("beta_fast", 32) or 32.0,
        truncate=rope.flag("truncate", True),
        attention_factor=rope.number("attention_factor", _attention_factor(rope, factor)),
    )


def _attention_factor(rope: Fields, factor: float) -> float:
    """The default factor of cosines and sines, used if config.json has none (YaRN, section 3.4)."""

    def scale(of: float) -> float:
        return 0.1 * of * math.log(factor) + 1.0 if factor > 1 else 1.0

    numerator, denominator = rope.number("mscale", 0), rope.number("mscale_all_dim", 0)
    if numerator and denominator and scale(denominator):
        return scale(numerator) / scale(denominator)
    return scale(1.0)


def _original(rope: Fields, fields: Fields) -> int:
    # transformers lets the field outside the object win, and falls back to the declared context.
    return _context(fields if fields.get(_ORIGINAL) is not None else rope, _ORIGINAL, _context(fields, _DECLARED))


def _context(fields: Fields, name: str, default: int | None = None) -> int:
    length = fields.whole(name, default)
    if not 1 <= length < 2**31:
        fields.fail(name, "1 to 2147483647")
    return length


_READERS: dict[str, Callable[[Fields, Fields], RopeScaling]] = {
    "linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn,
}  # fmt: skip
