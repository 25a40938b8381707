"""Qwen2 and Qwen2.5: a Llama with a bias on q, k and v (2407.10671)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.teachers.llama import Llama
from draftwood.compiler.teachers.reading import without

_SLIDING = "sliding_attention"


class Qwen2(Llama):
    """``Qwen2ForCausalLM``; layers with a window are honoured by serving texts that fit into it."""

    name = "qwen2"
    architecture = "Qwen2ForCausalLM"
    model_types = ("qwen2",)
    neutral = without("sliding_window", "use_sliding_window")
    layer_types: ClassVar[tuple[str, ...]] = ("full_attention", _SLIDING)
    defaults: ClassVar[Mapping[str, object]] = {
        "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28
    }  # fmt: skip

    def biases(self, fields: Fields) -> tuple[bool, bool]:
        return True, False

    def window(self, fields: Fields) -> int | None:
        """A published folder names a window and switches it off: it counts for the last layers, behind a switch."""
        used = fields.flag("use_sliding_window", False) and fields.get("sliding_window") is not None
        windowed = used and fields.whole("max_window_layers") < fields.whole("num_hidden_layers")
        if _SLIDING not in fields.get("layer_types", [_SLIDING] * windowed):
            return None
        if not used:
            fields.fail("layer_types", f"no {_SLIDING!r} where use_sliding_window and sliding_window are off")
        return fields.whole("sliding_window")


QWEN2 = Qwen2()
