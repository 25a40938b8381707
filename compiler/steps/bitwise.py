"""One step of any size in which a row's bits do not depend on the tree: `draftwood.kernels.block_attention`."""

from __future__ import annotations

from draftwood.compiler.steps.step import Step, signed, tensor
from draftwood.compiler.steps.teacher import TeacherStep, teacher_sizes
from draftwood.compiler.teachers.block import WrittenBlocks
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.manifest import BLOCK_SLOTS, settled_name

# T rows, I = T * K rows written, R rows with logits, F settled and A open blocks, O open slots, Z blocks that open
# tokens belong to, Y = 1 + Z


class BitwiseStep(TeacherStep):
    """Prefill, decode and verify over caches in blocks, the settled ones read and the open ones written."""

    def forward(self, tokens, positions, rows, index, bias, home, weight, chain, nothing, *caches):  # type: ignore[no-untyped-def]
        half = len(caches) // 2
        blocks = WrittenBlocks(index, bias, home, weight, chain, nothing)
        out = self.decoder.step_blocks(tokens, positions, rows, caches[:half], caches[half:], blocks)
        return self.outputs(out, branch=False)


def bitwise_step(decoder: Decoder, dtype: str = "float32") -> Step:
    """The graph that serves every gear with one text's bits, for onnxruntime."""
    config, sizes = decoder.config, teacher_sizes(decoder)
    blocks = {rows.name: (rows.heads, BLOCK_SLOTS, rows.width) for rows in config.buffers}
    settled = [tensor(settled_name(name), dtype, "F", *block) for name, block in blocks.items()]
    caches = {name: ("A", *block) for name, block in blocks.items()}
    signature = signed("bitwise", "bitwise", sizes, caches, dtype=dtype, read=settled)
    # Examples are distinct and above 1, so that torch.export ties no two sizes and specialises none.
    open_blocks = 7
    dynamic = {"T": 5, "R": 4, "I": 5 * config.kv_heads, "F": 9, "Z": 10, "Y": 11}
    dynamic |= {"A": open_blocks, "O": open_blocks * BLOCK_SLOTS}
    return Step(BitwiseStep(decoder, "cpu", 0), signature, dynamic, read=len(settled))
