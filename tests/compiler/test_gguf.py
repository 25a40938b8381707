"""GGUF as a checkpoint: tensors, blocks, tokenizers, parts, and refusals."""

import struct
from pathlib import Path

import gguf
import pytest
import torch

from draftwood.compiler.checkpoints import gguf_blocks
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.conversion import in_precision
from draftwood.errors import CheckpointError
from draftwood.tests.gguf_files import random_blocks, save_gguf
from draftwood.tools.tokenizers import tokenizer_of

EXACT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "IQ4_NL", "IQ4_XS")
ROUNDED = ("Q2_K", "Q3_K", "Q6_K")


@pytest.mark.parametrize("kind", EXACT)
def test_whole_numbers_stand_for_the_packages_numbers_bit_for_bit(kind: str) -> None:
    rows = random_blocks(kind, (3, 512))
    want, whole = (
        gguf.dequantize(rows, gguf.GGMLQuantizationType[kind]),
        gguf_blocks.whole_numbers(rows, (3, 512), kind),
    )
    assert torch.equal(whole.product(), torch.from_numpy(want)) and gguf_blocks.exact(kind)
    assert whole.bits == 8 or torch.equal(whole.in_eight_bits().product(), torch.from_numpy(want))


@pytest.mark.parametrize("kind", ROUNDED)
def test_other_blocks_are_rounded_by_half_a_step_at_most_and_say_so(kind: str) -> None:
    rows = random_blocks(kind, (3, 512))
    want, whole = gguf_blocks.numbers(rows, kind), gguf_blocks.whole_numbers(rows, (3, 512), kind)
    off = (whole.product() - want).abs().unflatten(1, (-1, 32)).amax(-1) / whole.scale_OG
    assert 0 < float(off.max()) <= 0.501 and not gguf_blocks.exact(kind)


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


def test_a_file_has_its_chat_template(tiny_teacher: Path, tmp_path: Path) -> None:
    save_gguf(tiny_teacher, tmp_path / "model.gguf")
    ours = tokenizer_of(tmp_path / "model.gguf")
    assert ours.has_chat and ours.render([{"role": "user", "content": "hi"}]) == "hi"


@pytest.mark.parametrize(
    ("kinds", "ends"), [([1, 3, 4, 1, 3, 1], (5, 1, 2)), (None, (5, 1, 2, 3)), ([1, 3], (5, 1, 2, 3))], ids=str
)
def test_added_tokens_that_end_texts_are_end_tokens(
    tiny_teacher: Path, tmp_path: Path, kinds: list[int] | None, ends: tuple[int, ...]
) -> None:
    tokens, path = ["a", "<|endoftext|>", "<|im_end|>", "</s>", "<|user|>", "eot"], tmp_path / "model.gguf"
    more = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 5}
    save_gguf(tiny_teacher, path, **more | {"tokenizer.ggml.token_type": kinds or [7]})
    assert Checkpoint.open(path).config.eos == ends


def test_parts_are_one_model(tiny_teacher: Path, tmp_path: Path) -> None:
    (folder := tmp_path / "parts").mkdir()
    save_gguf(tiny_teacher, folder / "m.gguf", "Q8_0", tensors_a_file=9)
    save_gguf(tiny_teacher, tmp_path / "m.gguf", "Q8_0")
    files, whole = sorted(folder.iterdir()), Checkpoint.open(tmp_path / "m.gguf")
    assert [file.name for file in files] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for path in (folder, *files):
        opened = Checkpoint.open(path)
        assert all(torch.equal(opened.weight(name), whole.weight(name)) for name in whole.names())
    assert tokenizer_of(folder).encode("the cat") == tokenizer_of(tmp_path / "m.gguf").encode("the cat")


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
        ({"llama.swin_norm": True}, "llama.swin_norm is True; expected 0 or no such key"),
        ({"llama.attention.causal": False}, "llama.attention.causal is False; expected True"),
        ({"llama.rope.dimension_sections": [1, 1]}, "llama.rope.dimension_sections is"),
        ({"llama.rope.scaling.type": "longrope"}, "expected none, linear or yarn"),
        ({"llama.rope.scaling.attn_factor": 2.0}, "llama.rope.scaling.attn_factor is 2.0"),
        ({"llama.rope.scaling.alpha": 2.0}, "llama.rope.scaling.alpha is 2.0"),
        (
            {
                "llama.attention.sliding_window": 64,
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
            },
            "expected none with a sliding window",
        ),
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
