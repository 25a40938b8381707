"""How a drafter's tensors grow with its teacher: which axis each dimension lies along."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from draftwood.compiler.drafters.common.config import CachedConfig
from draftwood.compiler.teachers.config import TeacherConfig

Axes = Mapping[str, tuple[str, ...]]

# The axes of a Llama's tensors, by the end of the name. "query" and "key" are all heads' rows, "inner" the MLP's,
# "head" one head's.
LLAMA_AXES: Axes = {
    "embed_tokens.weight": ("vocabulary", "hidden"),
    "lm_head.weight": ("vocabulary", "hidden"),
    "norm.weight": ("hidden",),
    "q_norm.weight": ("head",),
    "k_norm.weight": ("head",),
    "q_proj.weight": ("query", "hidden"),
    "k_proj.weight": ("key", "hidden"),
    "v_proj.weight": ("key", "hidden"),
    "o_proj.weight": ("hidden", "query"),
    "gate_proj.weight": ("inner", "hidden"),
    "up_proj.weight": ("inner", "hidden"),
    "down_proj.weight": ("hidden", "inner"),
    "q_proj.bias": ("query",),
    "k_proj.bias": ("key",),
    "v_proj.bias": ("key",),
    "o_proj.bias": ("hidden",),
}


# What drafters with caches have beside a Llama's tensors.
_CACHED_AXES: Axes = {
    **LLAMA_AXES,
    "lm_head.weight": ("draft vocabulary", "hidden"),
    "fc.weight": ("hidden", "states"),
    "input_norm.weight": ("states",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Widening:
    """A drafter's tensors and its config.json for a larger teacher."""

    # By the end of a tensor's key; the longest that fits counts. Axes are those above or stand below.
    axes: Axes
    # The config.json of the widened drafter, from the small one's and from its block, or the teacher where it has none.
    fields: Callable[[dict[str, Any], TeacherConfig], dict[str, Any]]
    # Its decoder block, which grows in proportion to the teacher's; None where it has none.
    block: TeacherConfig | None = None
    # Axes of its own: what lies side by side along each, other axes, and lengths that stay as they are.
    parts: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)


def size_fields(wide: TeacherConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What widening changes in a Llama's config.json; ``fields`` says how it spells the dtype."""
    return {
        "hidden_size": wide.hidden,
        "intermediate_size": wide.intermediate,
        "num_attention_heads": wide.heads,
        "num_key_value_heads": wide.kv_heads,
        "head_dim": wide.head_dim,
        "rms_norm_eps": wide.rms_norm_eps,
        "dtype" if "dtype" in fields else "torch_dtype": wide.dtype,
    }


def cached_widening(
    config: CachedConfig,
    own: Axes,
    parts: Mapping[str, tuple[str | int, ...]] | None = None,
    fields: Callable[[dict[str, Any], TeacherConfig], dict[str, Any]] | None = None,
) -> Widening:
    """The widening of a drafter with caches: the axes of a kind's own tensors, and what lies along those of its own.

    Every hidden state that a matrix reads beside others is padded in its own place.
    """
    states = len(config.aux_layers)
    return Widening(
        axes={**_CACHED_AXES, **{f"fc_norm.{i}.weight": ("hidden",) for i in range(states)}, **own},
        fields=fields or (lambda small, wide: cached_fields(config, small, wide)),
        block=config.block,
        parts={
            "draft vocabulary": (config.draft_vocabulary,),
            "pair": ("hidden", "hidden"),
            "states": ("hidden",) * states,
            **(parts or {}),
        },
    )


def cached_fields(config: CachedConfig, fields: dict[str, Any], wide: TeacherConfig) -> dict[str, Any]:
    """config.json of the drafter with a block ``wide``, the ids of the teacher's states written out: the usual ones
    depend on the teacher's number of layers, and new layers come last."""
    aux = {"target_hidden_size": wide.hidden, "aux_layer_ids": list(config.aux_layers)}
    return fields | size_fields(wide, fields) | aux
