"""One step of any size on a CPU: prefill, decode and verify in one graph with run-time shapes, of one text or more.

Several texts share the products with the weights, row after row, and keep their own caches and attention: which texts a
launch takes is a question of what is bound, and nothing is copied. A text may have as many rows as it likes.
"""

from __future__ import annotations

from collections.abc import Iterator

from draftwood.compiler.steps.step import Step, cached, tensor
from draftwood.compiler.steps.teacher import TeacherStep, teacher_outputs
from draftwood.compiler.teachers.block import CpuText
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.manifest import TensorSignature, batch_name, cache_names, text_name

# T rows of a text, P path slots, B branch rows, C slots, S seen slots, W = P + T; X rows of all texts, R with logits

# Examples are distinct and above 1, so that torch.export ties no two sizes and specialises none.
_EXAMPLES = {"T": 5, "P": 3, "B": 6, "W": 8, "S": 40, "C": 128}
_INPUTS = len(CpuText._fields)


class CpuStep(TeacherStep):
    """Prefill, decode and verify of any size in one graph with run-time shapes, for onnxruntime."""

    def forward(self, rows, *given):  # type: ignore[no-untyped-def]
        texts = len(given) // (_INPUTS + 2 * self.decoder.config.layers)
        own, caches = given[: texts * _INPUTS], given[texts * _INPUTS :]
        read = [CpuText(*own[i : i + _INPUTS]) for i in range(0, len(own), _INPUTS)]
        out = self.decoder.step_cpu(read, rows, caches)
        return (out.logits_RV, out.choice_R, out.features_RF, *out.branches, *out.caches)


def cpu_step(decoder: Decoder, dtype: str = "float32", texts: int = 1) -> Step:
    """The graph with run-time sizes that onnxruntime serves every gear with, for one text, or for several at once."""
    config = decoder.config
    names = [str(text) if texts > 1 else "" for text in range(texts)]
    inputs = [spec for name in names for spec in _inputs(decoder, dtype, name)]
    branch = (config.layers, 2, config.kv_heads, config.head_dim)
    outputs = [
        *teacher_outputs(decoder, "R", "X" if texts > 1 else "T", dtype),
        *(tensor(text_name(n, "branch.out"), dtype, *branch[:2], f"T{n}", *branch[2:]) for n in names),
    ]
    caches = {text_name(n, cache): f"C{n}" for n in names for cache in cache_names(config.layers)}
    signature = cached(
        caches,
        batch_name(texts),
        "batch" if texts > 1 else "step",
        [tensor("rows", "int64", "R"), *inputs],
        outputs,
        {name: (1, config.kv_heads, slots, config.head_dim) for name, slots in caches.items()},
        0,
        0,
        dtype,
        texts,
    )
    examples = {f"{size}{n}": example + 9 * i for i, n in enumerate(names) for size, example in _EXAMPLES.items()}
    # W and S follow from other sizes.
    for n in names:
        examples[f"W{n}"] = examples[f"P{n}"] + examples[f"T{n}"]
    return Step(CpuStep(decoder, "cpu", 0), signature, examples | {"R": 4}, read=len(inputs))


def _inputs(decoder: Decoder, dtype: str, text: str) -> Iterator[TensorSignature]:
    """One text's, as `CpuText` has them."""
    config = decoder.config
    sizes: dict[str, tuple[str | int, ...]] = {
        "tokens": ("int64", f"T{text}"),
        "positions": ("int64", f"T{text}"),
        "bias": (dtype, 1, 1, f"W{text}", f"S{text}"),
        "last": ("int32", 1),
        "total": ("int32",),
        "path": ("int64", f"P{text}"),
        "branch": (dtype, config.layers, 2, f"B{text}", config.kv_heads, config.head_dim),
    }
    for name, (kept, *shape) in sizes.items():
        yield tensor(text_name(text, name), str(kept), *shape)
