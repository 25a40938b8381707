"""Models too large for this machine, lowered whole by their sizes: every node of every graph is placed and counted."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from draftwood.environment import torch_npu_installed
from draftwood.tools.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch_npu_installed(), reason="needs the torch_npu package")]

# Of verify: kernels in all, as in docs/results/npu.md, and joins that cost one each where GE does not lay their
# parts out.
MODELS = {
    "openpangu-embedded-7b": ("shape:medusa-5", (431, 68)),
    "qwen3-8b": ("eagle3", (562, 36)),
    "qwen3-30b-a3b": ("shape:medusa-5", (1029, 48)),
}


def save_sizes(path: Path, shapes: Mapping[str, Sequence[int]], kinds: Mapping[str, str]) -> None:
    """A safetensors file with a hole after its header; zeros, and no space on the disk."""
    header, at = {}, 0
    for name, shape in shapes.items():
        kind = kinds.get(name, "BF16")
        size = {"BF16": 2, "I64": 8}[kind]
        for count in shape:
            size *= count
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


def save_eagle3(folder: Path) -> None:
    """As drafters of Qwen3-8B are published: one Llama block, 32000 of the teacher's tokens."""
    H, I, V, Q, K = 4096, 12288, 32000, 32 * 128, 8 * 128  # noqa: E741
    block = {"self_attn.q_proj": (Q, 2 * H), "self_attn.k_proj": (K, 2 * H), "self_attn.v_proj": (K, 2 * H)}
    block |= {"self_attn.o_proj": (H, Q), "mlp.gate_proj": (I, H), "mlp.up_proj": (I, H), "mlp.down_proj": (H, I)}
    block |= dict.fromkeys(("hidden_norm", "input_layernorm", "post_attention_layernorm"), (H,))
    shapes = {f"midlayer.{name}.weight": shape for name, shape in block.items()}
    shapes |= {"fc.weight": (H, 3 * H), "norm.weight": (H,), "lm_head.weight": (V, H), "d2t": (V,)}
    folder.mkdir()
    save_sizes(folder / "model.safetensors", shapes, {"d2t": "I64"})
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": H, "intermediate_size": I,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 1,
        "vocab_size": 151936, "draft_vocab_size": V, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000, "hidden_act": "silu", "attention_bias": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize("model", MODELS)
def test_all_runs_on_the_ai_core(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter, counted = MODELS[model]
    if drafter == "eagle3":
        drafter = str(tmp_path / "drafter")
        save_eagle3(tmp_path / "drafter")
    asked = [f"shape:{model}", "--drafter", drafter, "--tree", "full:3x2x1", "--kv", "1024"]
    bundle = str(tmp_path / "bundle")
    assert main(["build", *asked, "--target", "ge", "--weights", "none", "--out", bundle]) == 0
    capsys.readouterr()
    assert main(["inspect", bundle, "--npu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    kinds = {graph["kind"] for graph in found["graphs"]}
    assert kinds >= {"prefill", "decode", "verify", "accept", "draft"}
    for graph in found["graphs"]:
        assert (graph["engines"]["AI CPU"], graph["engines"]["none"]) == (0, 0), graph["name"]
        assert [one for one in graph["findings"] if one["level"] == "error"] == []
    (verify,) = (graph["kernels"] for graph in found["graphs"] if graph["kind"] == "verify")
    assert (verify["all"], verify["joins"]) == counted
