"""GGUF teachers against transformers' own, random and real: logits and greedy texts by architecture, block and rope."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftwood.compiler.checkpoints.gguf_header import read_header
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.compiler.teachers.gguf_tokenizer import write_tokenizer
from draftwood.compiler.teachers.registry import family_of, make_decoder
from draftwood.errors import CheckpointError
from draftwood.runtime.text.tokenizer import Tokenizer
from draftwood.tests.gguf_files import real_files, save_gguf
from draftwood.tests.many_lines import lines

Save = Callable[..., Path]
TEXTS, LENGTH, NEW = 12, 9, 8
# fp32 against fp32, logits of magnitude up to 10: sums in another order. Measured: 2e-5 at most, over all.
FP32 = 1e-4
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True, "num_experts": 4}
FAMILIES = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "llama with biases": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": True},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4,
                "num_experts_per_tok": 2},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128},
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 16, **MIXTURE},
    "glm4": {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "head_dim": 16, "partial_rotary_factor": 0.5,
             "pad_token_id": 0},
}  # fmt: skip
WRITTEN = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
RANDOM = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")


def decoder_of(opened: Checkpoint, positions: int) -> Decoder:
    tables = family_of(opened.config).tables(opened.config, positions).items()
    weights = {name: opened.weight(name).float() for name in opened.names()}
    decoder = make_decoder(opened.config, positions)
    decoder.load_state_dict(weights | {name: torch.from_numpy(table) for name, table in tables})
    return decoder.requires_grad_(False)


def logits(decoder: Decoder, ids: list[int]) -> torch.Tensor:
    """Of every row of a text, in one step of eager PyTorch."""
    rows, config = len(ids), decoder.config
    slots = 32 * -(-(rows + 1) // 32)
    caches = [torch.zeros(config.kv_heads * slots, config.head_dim) for _ in range(2 * config.layers)]
    branch = torch.zeros(config.layers, 2, 1, config.kv_heads, config.head_dim)
    seen, none = torch.ones(rows, rows, dtype=torch.bool).tril(), torch.zeros(1, dtype=torch.int64)
    out = decoder.step(torch.tensor(ids), torch.arange(rows), seen, none, none, none, branch, caches, form="eager")
    return out.logits_RV


def hold_to(theirs: Any, opened: Checkpoint, new: int = NEW, share: float = 0.0) -> None:
    """Logits are transformers' within ``FP32``, or a ``share`` of the largest, and twelve greedy texts its own."""
    random = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, min(opened.config.vocabulary, 250), (TEXTS, LENGTH), generator=random)
    theirs.generation_config.pad_token_id = 0
    texts = theirs.generate(prompts, max_new_tokens=new, do_sample=False, eos_token_id=None)
    with torch.inference_mode():
        want_XRV = theirs(texts).logits
    decoder = decoder_of(opened, LENGTH + new)
    for text, want_RV in zip(texts.tolist(), want_XRV, strict=True):
        found_RV = logits(decoder, text)
        assert torch.allclose(found_RV, want_RV, rtol=0, atol=max(FP32, share * float(want_RV.abs().max())))
        # A text is greedy if each of its tokens is the best after those before it.
        assert found_RV[LENGTH - 1 : -1].argmax(-1).tolist() == text[LENGTH:]
    assert len(set(map(tuple, texts[:, LENGTH:].tolist()))) > TEXTS // 2


def load(path: Path, **more: object) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager", **more).eval()


def rounded(folder: Path, kind: str) -> None:
    """The folder's matrices as blocks of a kind hold them."""
    held = load_file(folder / "model.safetensors")
    block = gguf.GGMLQuantizationType[kind]
    for name, value in held.items():
        if value.ndim > 1 and not name.endswith(("mlp.gate.weight", "block_sparse_moe.gate.weight")):
            blocks = gguf.quants.quantize(value.numpy(), block)
            held[name] = torch.from_numpy(gguf.quants.dequantize(blocks, block)).clone()
    save_file(held, folder / "model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_an_architecture_computes_what_transformers_computes_of_its_rounded_numbers(
    family: str, save_tiny: Save, tmp_path: Path
) -> None:
    (folder := tmp_path / "folder").mkdir()
    save_tiny(folder, **FAMILIES[family])
    save_gguf(folder, tmp_path / "model.gguf", "Q8_0")
    rounded(folder, "Q8_0")
    opened, want = Checkpoint.open(tmp_path / "model.gguf"), Checkpoint.open(folder)
    assert opened.names() == want.names()
    assert all(torch.equal(opened.weight(name), want.weight(name)) for name in want.names())
    hold_to(load(folder), opened)


@pytest.mark.parametrize("kind", [*WRITTEN, *RANDOM])
def test_a_kind_of_block_computes_what_transformers_reads_in_the_file(
    kind: str, save_tiny: Save, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}
    (folder := tmp_path / "folder").mkdir()
    save_gguf(save_tiny(folder, **sizes), tmp_path / "model.gguf", kind)
    opened = Checkpoint.open(tmp_path / "model.gguf")
    theirs = load(tmp_path, gguf_file="model.gguf")
    held = theirs.state_dict()
    assert all(torch.equal(opened.tensor(name), held[name]) for name in opened.entries)
    hold_to(theirs, opened)


ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "llama3": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192},
}  # fmt: skip


def rope_keys(rope: dict[str, Any]) -> dict[str, Any]:
    """As llama.cpp's converter writes them; Llama 3's become a tensor."""
    if rope["rope_type"] == "llama3":
        return {}
    keys = {"llama.rope.scaling.type": rope["rope_type"], "llama.rope.scaling.factor": rope["factor"]}
    longest = {"llama.rope.scaling.original_context_length": rope.get("original_max_position_embeddings", 0)}
    return keys | (longest if rope["rope_type"] == "yarn" else {})


@pytest.mark.parametrize("kind", ROPES)
def test_a_stretched_rope_turns_as_transformers_turns_it(kind: str, save_tiny: Save, tmp_path: Path) -> None:
    (folder := tmp_path / "folder").mkdir()
    save_tiny(folder, rope_theta=500_000.0, rope_scaling=ROPES[kind])
    save_gguf(folder, tmp_path / "model.gguf", **rope_keys(ROPES[kind]))
    hold_to(load(folder), Checkpoint.open(tmp_path / "model.gguf"))


def test_a_factor_alone_is_a_linear_rope_and_none_means_none(save_tiny: Save, tmp_path: Path) -> None:
    (folder := tmp_path / "folder").mkdir()
    save_tiny(folder)
    for i, (more, kind) in enumerate(
        [
            ({"llama.rope.scaling.factor": 4.0}, "linear"),
            ({"llama.rope.scale_linear": 4.0}, "linear"),
            ({"llama.rope.scaling.factor": 4.0, "llama.rope.scaling.type": "none"}, None),
        ]
    ):
        save_gguf(folder, tmp_path / f"{i}.gguf", **more)
        scaling = Checkpoint.open(tmp_path / f"{i}.gguf").config.rope_scaling
        assert (scaling.kind, scaling.factor) == (kind, 4.0) if kind else scaling is None


def test_llama_3s_factors_are_held_to_its_rule_and_stand_alone(save_tiny: Save, tmp_path: Path) -> None:
    (folder := tmp_path / "folder").mkdir()
    save_tiny(folder, rope_theta=500_000.0, rope_scaling=ROPES["llama3"])
    save_gguf(folder, tmp_path / "both.gguf", **rope_keys(ROPES["linear"]))
    with pytest.raises(CheckpointError, match=r"scaling\.type is 'linear'; expected none with rope_freqs"):
        Checkpoint.open(tmp_path / "both.gguf")
    save_tiny(folder, rope_theta=500_000.0, rope_scaling={**ROPES["llama3"], "low_freq_factor": 2})
    save_gguf(folder, tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight holds 8 factors up to 32 that are not Llama 3's"):
        Checkpoint.open(tmp_path / "other.gguf")


@pytest.mark.slow
@pytest.mark.skipif(not real_files(), reason="DRAFTWOOD_GGUF names no GGUF file, nor a folder of them")
@pytest.mark.parametrize("path", real_files(), ids=lambda path: path.stem)
def test_a_real_file_is_read_and_computes_as_in_transformers(path: Path) -> None:
    theirs, opened = load(path.parent, gguf_file=path.name), Checkpoint.open(path)
    held = theirs.state_dict()
    for name in opened.entries:
        assert torch.equal(opened.tensor(name), held[name]), name
    # Logits of tens, after up to 30 layers.
    hold_to(theirs, opened, new=16, share=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not real_files(), reason="DRAFTWOOD_GGUF names no GGUF file, nor a folder of them")
@pytest.mark.parametrize("path", real_files(), ids=lambda path: path.stem)
def test_a_real_files_tokenizer_is_transformers_but_for_digits(path: Path, tmp_path: Path) -> None:
    header = read_header(path)
    assert write_tokenizer(header, tmp_path)
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if header.fields["tokenizer.ggml.pre"] == "smollm":
        from tokenizers import pre_tokenizers

        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    for line in lines(2000):
        assert ours.encode(line, special=False) == theirs.encode(line, add_special_tokens=False), line
