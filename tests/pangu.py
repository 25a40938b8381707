"""Writes a Llama as an openPangu-Embedded: another architecture, the same function to the bit.

    python -m draftwood.tests.pangu --teacher LLAMA --out PANGU

openPangu-Embedded is a Llama with a bias on q, k, v and o; the biases that a Llama does not have are zeros. The file
stands in for a published openPangu that is too large: it is read, trained for, built and lowered as one.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draftwood.compiler.bundle.staging import staged
from draftwood.compiler.teachers.checkpoint import Checkpoint, expected_tensors
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.formats import write_tokenizer
from draftwood.compiler.teachers.registry import read_config
from draftwood.errors import RequestError
from draftwood.tests.house.script import refusing


def convert(source: Path, target: Path) -> Checkpoint:
    """Writes the folder ``target``, whole or not at all, and opens it.

    Raises:
        CheckpointError: the source is not a supported teacher.
        RequestError: it is no plain Llama, or ``target`` exists.
    """
    llama = Checkpoint.open(source)
    config = llama.config
    if config.family != "llama" or config.rope_scaling is not None or config.quantised or llama.packed:
        raise RequestError(
            f"{source}: a {config.family} with other positions or layers; expected a Llama, its rotary"
            " positions as they are, not quantised"
        )
    with staged(target) as folder:
        (folder / "config.json").write_text(json.dumps(_fields(config), indent=2) + "\n")
        tensors = {name: llama.tensor(name) for name in llama.entries}
        for name, shape in expected_tensors(read_config(folder)).items():
            if name not in tensors:
                tensors[name] = torch.zeros(shape, dtype=llama.dtype)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        write_tokenizer(source, folder)
    return Checkpoint.open(target)


def _fields(config: TeacherConfig) -> dict[str, Any]:
    """config.json as openPangu-Embedded's is spelled."""
    return {
        "architectures": ["PanguEmbeddedForCausalLM"],
        "model_type": "PanguEmbedded",
        "bias": True,
        "bos_token_id": config.bos,
        "eos_token_id": list(config.eos),
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "max_position_embeddings": config.max_positions,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied,
        "torch_dtype": config.dtype,
        "vocab_size": config.vocabulary,
    }


@refusing
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--teacher", type=Path, required=True, metavar="DIR", help="a Llama's folder")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; must not exist")
    args = parser.parse_args()
    written = convert(args.teacher, args.out)
    print(f"{args.out}: {written.config.family}, {len(written.entries)} tensors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
