"""GGUF as a checkpoint: tensors, blocks, tokenizers, parts, and what is refused."""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftwood.compiler.checkpoints import gguf_blocks
from draftwood.compiler.checkpoints.gguf_header import read_header
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.gguf_tokenizer import write_tokenizer
from draftwood.compiler.teachers.kept import in_precision
from draftwood.errors import CheckpointError
from draftwood.runtime.text.tokenizer import Tokenizer
from draftwood.tests.gguf_files import save_gguf
from draftwood.tools.tokenizers import tokenizer_of

EXACT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "IQ4_NL", "IQ4_XS")
ROUNDED = ("Q2_K", "Q3_K", "Q6_K")
# Where the halves of a block are, which random bytes would make no number.
HALVES = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)), "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,)
}  # fmt: skip
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True, "num_experts": 4}
FAMILIES = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4,
                "num_experts_per_tok": 2},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128},
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 16, **MIXTURE},
    "glm4": {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "head_dim": 16, "partial_rotary_factor": 0.5},
}  # fmt: skip
TEXTS = (
    "Hello, world!  Two spaces,\ttab\r\n\r\nlines", "Der Käse größer als Straße", "L'été à Noël, ça va ?",
    "¿Qué tal, señor?", "Привет, мир 2026", "你好世界。今天天气很好", "def f(x):\n    return x**2 + 0x1F  # it's",
    "👩\u200d👧 🏳\ufe0f\u200d🌈", "e\u0301 \u200b\u00a0x", "   leading and trailing   ", "I'LL DON'T we've 12345",
    "<|im_start|>user\nhi<|im_end|>", "\u2581under ▁▁ x", "",
)  # fmt: skip


def rows_of(kind: str, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    held = random.integers(0, 256, (3, 512 // block, size), np.uint8)
    for at in HALVES.get(kind, (0,)):
        held[..., at : at + 2] = random.standard_normal((3, 512 // block, 1)).astype(np.float16).view(np.uint8)
    return held.reshape(3, -1)


@pytest.mark.parametrize("kind", EXACT)
def test_whole_numbers_stand_for_the_packages_numbers_bit_for_bit(kind: str) -> None:
    rows = rows_of(kind)
    want, whole = (
        gguf.dequantize(rows, gguf.GGMLQuantizationType[kind]),
        gguf_blocks.whole_numbers(rows, (3, 512), kind),
    )
    assert torch.equal(whole.product(), torch.from_numpy(want)) and gguf_blocks.exact(kind)
    assert whole.bits == 8 or torch.equal(whole.in_eight_bits().product(), torch.from_numpy(want))


@pytest.mark.parametrize("kind", ROUNDED)
def test_other_blocks_are_rounded_by_half_a_step_at_most_and_say_so(kind: str) -> None:
    rows = rows_of(kind)
    want, whole = gguf_blocks.numbers(rows, kind), gguf_blocks.whole_numbers(rows, (3, 512), kind)
    off = (whole.product() - want).abs().unflatten(1, (-1, 32)).amax(-1) / whole.scale_OG
    assert 0 < float(off.max()) <= 0.501 and not gguf_blocks.exact(kind)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_architecture_has_the_tensors_and_dimensions_of_its_folder(
    family: str, save_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    (folder := tmp_path / "folder").mkdir()
    save_tiny(folder, **FAMILIES[family])
    save_gguf(folder, tmp_path / "model.gguf")
    want, opened = Checkpoint.open(folder), Checkpoint.open(tmp_path / "model.gguf")
    assert {name: getattr(opened.config, name) for name in ("family", "heads", "kv_heads", "head_dim", "tied")} == {
        name: getattr(want.config, name) for name in ("family", "heads", "kv_heads", "head_dim", "tied")
    }
    assert opened.names() == want.names()
    assert all(torch.equal(opened.weight(name), want.weight(name)) for name in want.names())
    if family not in ("mixtral", "qwen3_moe", "glm4"):  # such files transformers does not read, or not their widths
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).eval()
        ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ids = torch.arange(12)[None]
        with torch.inference_mode():
            assert torch.allclose(theirs(ids).logits, ours(ids).logits, atol=1e-5)  # both in fp32, order of sums apart


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_nbits_keeps_the_blocks_and_the_output_matrix(kind: str, tiny_teacher: Path, tmp_path: Path) -> None:
    save_gguf(tiny_teacher, tmp_path / "model.gguf", kind)
    exact = Checkpoint.open(tmp_path)
    packed = in_precision(exact, "nbits")
    assert {layer.bits for layer in packed.config.packed} == {8 if kind == "Q8_0" else 4}
    assert all(layer.minimum == (kind == "Q4_1") for layer in packed.config.packed)
    assert packed.config.packed[-1].name == "lm_head"
    whole = exact.grouped("model.layers.0.self_attn.q_proj.weight")
    assert torch.equal(whole.product(), exact.tensor("model.layers.0.self_attn.q_proj.weight"))


def test_the_tokenizer_is_what_transformers_makes_of_the_file(tiny_teacher: Path, tmp_path: Path) -> None:
    save_gguf(tiny_teacher, tmp_path / "model.gguf")
    ours = tokenizer_of(tmp_path / "model.gguf")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    for text in TEXTS:
        assert ours.encode(text, special=False) == theirs.encode(text, add_special_tokens=False), text
    assert ours.has_chat and ours.render([{"role": "user", "content": "hi"}]) == "hi"


def test_parts_are_one_model_and_a_missing_one_is_named(tiny_teacher: Path, tmp_path: Path) -> None:
    save_gguf(tiny_teacher, tmp_path / "whole.gguf")
    names = [f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    (tmp_path / names[0]).write_bytes((tmp_path / "whole.gguf").read_bytes())
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002\.gguf: no such file; expected all 2 parts of m"):
        Checkpoint.open(tmp_path / names[0])
    (tmp_path / names[1]).write_bytes((tmp_path / "whole.gguf").read_bytes())
    with pytest.raises(CheckpointError, match="is part 0 of 1 by its metadata; expected 0 of 2"):
        Checkpoint.open(tmp_path / names[0])
    with pytest.raises(CheckpointError, match="holds 2 GGUF models"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (0, b"GGML", "begins with b'GGML'; expected GGUF"),
        (4, struct.pack("<I", 1), "is of version 1"),
        (8, struct.pack("<Q", 1 << 60), "names 1152921504606846976 tensors"),
        (16, struct.pack("<Q", 1 << 60), "names 1152921504606846976 metadata"),
        (24, struct.pack("<Q", 1 << 60), "a key of the metadata takes 1152921504606846976 bytes"),
        (32, b"\xff", "a key of the metadata holds"),
    ],
)
def test_a_header_that_lies_is_refused_in_one_line(
    at: int, value: bytes, said: str, tiny_teacher: Path, tmp_path: Path
) -> None:
    save_gguf(tiny_teacher, tmp_path / "model.gguf")
    data = bytearray((tmp_path / "model.gguf").read_bytes())
    data[at : at + len(value)] = value
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(CheckpointError) as refused:
        Checkpoint.open(tmp_path)
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"llama.logit_scale": 0.5}, "llama.logit_scale is 0.5"),
        ({"llama.rope.scaling.type": "longrope"}, "expected none, linear or yarn"),
        ({"tokenizer.ggml.padding_token_id": 1 << 30}, "expected an id below"),
        ({"llama.expert_count": 4}, "llama.expert_count is 4"),
    ],
)
def test_metadata_without_a_form_here_is_refused_by_its_key(
    more: dict, said: str, tiny_teacher: Path, tmp_path: Path
) -> None:
    save_gguf(tiny_teacher, tmp_path / "model.gguf", **more)
    with pytest.raises(CheckpointError, match=said):
        Checkpoint.open(tmp_path)
        tokenizer_of(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif("DRAFTWOOD_GGUF" not in os.environ, reason="DRAFTWOOD_GGUF names no folder of real GGUF files")
def test_real_files_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    for path in sorted(Path(os.environ["DRAFTWOOD_GGUF"]).glob("*.gguf")):
        (folder := tmp_path / path.stem).mkdir()
        assert write_tokenizer(read_header(path), folder)
        ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        for text in TEXTS:
            assert ours.encode(text, special=False) == theirs.encode(text, add_special_tokens=False), text
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        opened, held = Checkpoint.open(path), model.state_dict()
        for name in opened.entries:
            assert torch.equal(opened.tensor(name), held[name].float()), name
