"""Teacher checkpoints: accepted and refused ones, and that the rotary tables are transformers' own."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftwood.compiler.checkpoints.fields import IgnoredField
from draftwood.compiler.checkpoints.safetensors_file import read_header
from draftwood.compiler.teachers.checkpoint import Checkpoint, expected_tensors
from draftwood.compiler.teachers.config import RopeScaling, TeacherConfig
from draftwood.compiler.teachers.registry import read_config
from draftwood.compiler.teachers.rope import rope_frequencies, rope_tables
from draftwood.errors import CheckpointError

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
PANGU = {
    "architectures": ["PanguEmbeddedForCausalLM"],
    "model_type": "PanguEmbedded",
    **SIZES,
    "bias": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 16000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "pad_token_id": 0,
    "eos_token_id": 45,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
ROPES = [
    pytest.param({"rope_type": "default"}, id="default"),
    pytest.param({"rope_type": "linear", "factor": 3.0}, id="linear"),
    pytest.param(LLAMA3, id="llama3"),
    pytest.param({"rope_type": "dynamic", "factor": 3.7}, id="dynamic"),
    pytest.param({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, id="yarn"),
    pytest.param(
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
            "beta_fast": 48.0,
            "beta_slow": 2.0,
            "mscale": 0.8,
            "mscale_all_dim": 1.2,
        },
        id="yarn-mscale",
    ),
    pytest.param(
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "attention_factor": 0.7},
        id="yarn-factor",
    ),
]


def save_llama(
    folder: Path, dtype: torch.dtype = torch.float32, shards: str = "5GB", **fields: object
) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **fields)).to(dtype)
    model.save_pretrained(folder, max_shard_size=shards)
    return model


def save_pangu(folder: Path, **fields: object) -> TeacherConfig:
    (folder / "config.json").write_text(json.dumps(PANGU | fields))
    config = read_config(folder)
    made = {name: torch.randn(shape).bfloat16() for name, shape in expected_tensors(config).items()}
    inverse = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(config.layers)}
    save_file(made | inverse, folder / "model.safetensors", metadata={"format": "pt"})
    return config


def edit_config(folder: Path, **fields: object) -> None:
    values = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(values))


def add_tensor(folder: Path, name: str, tensor: torch.Tensor) -> None:
    """Into the one file, or into a shard of its own that the index names."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        edit_tensors(folder, **{name: tensor})
        return
    save_file({name: tensor}, folder / "more.safetensors", metadata={"format": "pt"})
    described = json.loads(index.read_text())
    described["weight_map"][name] = "more.safetensors"
    index.write_text(json.dumps(described))


def edit_tensors(folder: Path, drop: str = "", **tensors: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    stored = {name: tensor for name, tensor in load_file(path).items() if name != drop}
    save_file(stored | tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}], ids=str)
@pytest.mark.parametrize("shards", ["5GB", "5KB"])
def test_weights_are_those_of_the_model(tmp_path: Path, shards: str, fields: dict) -> None:
    state = save_llama(tmp_path, shards=shards, **fields).state_dict()
    checkpoint = Checkpoint.open(tmp_path)
    for ours, parts in ((ours, part.concatenated) for ours, part in checkpoint.parts.items()):
        torch.testing.assert_close(checkpoint.weight(ours), torch.cat([state[p] for p in parts]), rtol=0, atol=0)
    assert ("lm_head.weight" in checkpoint.names()) == (not checkpoint.config.tied)
    assert ("layers.1.o.bias" in checkpoint.names()) == bool(fields.get("attention_bias"))
    assert len(list(tmp_path.glob("*.safetensors"))) == (
        1 if shards == "5GB" else len(set(checkpoint_files(checkpoint)))
    )


def checkpoint_files(checkpoint: Checkpoint) -> list[Path]:
    return [entry.file for entry in checkpoint.entries.values()]


def test_config_of_a_llama(tmp_path: Path) -> None:
    save_llama(tmp_path, torch.bfloat16, head_dim=16, eos_token_id=[3, 4], rms_norm_eps=1e-5)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 3]}')
    config = Checkpoint.open(tmp_path).config
    assert config == TeacherConfig(
        family="llama", layers=2, hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=16, vocabulary=61,
        rms_norm_eps=1e-5, rope_theta=10_000.0, rope_scaling=None, max_positions=64, qkv_bias=False,
        o_bias=False, tied=False, dtype="bfloat16", bos=1, eos=(3, 4, 9),
    )  # fmt: skip


@pytest.mark.parametrize(("named", "ends"), [({"eos_token_id": 2}, (2, 9)), ({"eos_token_id": None}, (9,)), ({}, (9,))])
def test_a_familys_own_end_token_is_for_folders_that_name_none(tmp_path: Path, named: dict, ends: tuple) -> None:
    save_llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["eos_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(config | named))
    (tmp_path / "generation_config.json").unlink()
    assert read_config(tmp_path).eos == (() if named.get("eos_token_id", 2) is None else (2,))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert read_config(tmp_path).eos == ends


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral"])
def test_experts_of_a_layer_in_one_tensor_are_read(tmp_path: Path, family: str) -> None:
    """transformers 5 keeps them so in memory, and trainers save them so."""
    fields = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [1]}
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**fields))
    for form in (True, False):
        model.save_pretrained(tmp_path / str(form), save_original_format=form)
    one, other = (Checkpoint.open(tmp_path / str(form)) for form in (True, False))
    assert one.config == other.config and one.names() == other.names() and one.entries.keys() != other.entries.keys()
    assert all(torch.equal(one.weight(name), other.weight(name)) for name in one.names())


@pytest.mark.parametrize("spelling", ["bias", "attention_bias"])
def test_pangu(tmp_path: Path, spelling: str) -> None:
    config = save_pangu(tmp_path, **({} if spelling == "bias" else {"bias": None, "attention_bias": True}))
    assert (config.family, config.head_dim, config.rope_theta) == ("pangu-embedded", 8, 1.6e7)
    assert config.qkv_bias and config.o_bias and config.eos == (45,)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.dtype == torch.bfloat16
    assert checkpoint.weight("layers.0.qkv.bias").shape == (64,)
    assert not any("inv_freq" in name for name in checkpoint.entries)


def test_pangu_of_published_size() -> None:
    config = TeacherConfig(
        family="pangu-embedded", layers=34, hidden=4096, intermediate=12800, heads=32, kv_heads=8,
        head_dim=128, vocabulary=153376, rms_norm_eps=1e-5, rope_theta=1.6e7, rope_scaling=None,
        max_positions=32768, qkv_bias=True, o_bias=True, tied=False, dtype="bfloat16", bos=1, eos=(45892,),
    )  # fmt: skip
    shapes = expected_tensors(config)
    assert len(shapes) == 479 - 34  # the published index also counts inv_freq
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 8_030_887_936


@pytest.mark.parametrize("rope", ROPES)
def test_rope_spellings_agree(tmp_path: Path, rope: dict) -> None:
    save_llama(tmp_path, rope_parameters={"rope_theta": 5e5, **rope})
    new = read_config(tmp_path)
    legacy = {("type" if name == "rope_type" else name): value for name, value in rope.items()}
    edit_config(tmp_path, rope_parameters=None, rope_theta=5e5, rope_scaling=legacy)
    assert read_config(tmp_path) == new
    kinds = {
        "default": None,
        "linear": RopeScaling(kind="linear", factor=3.0),
        "llama3": RopeScaling(kind="llama3", factor=8.0, original_max_positions=512),
        "dynamic": RopeScaling(kind="dynamic", factor=3.7, original_max_positions=64),
    }
    assert rope["rope_type"] == "yarn" or new.rope_scaling == kinds[rope["rope_type"]]


@pytest.mark.parametrize("head_dim", [8, 64, 96, 128])
@pytest.mark.parametrize("theta", [10_000.0, 5e5, 1.6e7])
@pytest.mark.parametrize("rope", ROPES)
def test_rope_tables_are_those_of_transformers(tmp_path: Path, rope: dict, theta: float, head_dim: int) -> None:
    # Within the declared context: dynamic scaling gives no one table beyond it.
    sizes = SIZES | {"head_dim": head_dim, "max_position_embeddings": 8193}
    theirs = LlamaConfig(**sizes, rope_parameters={"rope_theta": theta, **rope})
    theirs.architectures = ["LlamaForCausalLM"]
    theirs.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    module = LlamaRotaryEmbedding(theirs)
    assert np.array_equal(rope_frequencies(config), module.inv_freq.double().numpy())
    expected = module(torch.zeros(1), torch.arange(8193)[None])
    for ours, table in zip(rope_tables(config, 8193), expected, strict=True):
        # Angles are equal to the bit; the cosine of a vector lane and of a tail may differ in the last place.
        np.testing.assert_allclose(ours, table[0].numpy(), rtol=0, atol=1.2e-7)


REFUSED = [
    ({"architectures": ["GemmaForCausalLM"]}, "architectures is .*Gemma"),
    ({"architectures": ["MistralForCausalLM"]}, "model_type is 'llama'; expected 'mistral' with Mistral"),
    ({"architectures": None}, "architectures is None"),
    ({"architectures": [["LlamaForCausalLM"]]}, "architectures is .*Llama"),
    ({"model_type": "mistral"}, "model_type"),
    ({"mlp_bias": True}, "mlp_bias is True; expected False"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu'"),
    ({"pretraining_tp": 2}, "pretraining_tp is 2"),
    ({"sliding_window": 4096}, "sliding_window is 4096"),
    (
        {"quantization_config": {"bits": 4}},
        "the quantisation is of None; expected AWQ gemm, GPTQ, AutoRound, or",
    ),
    ({"quantization_config": {"load_in_4bit": True}}, "the quantisation is of 'bitsandbytes', a codebook of 16"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({"dtype": "float64"}, "dtype is 'float64'; expected float32"),
    ({"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "rope_parameters is .*longrope.*dynamic, llama3"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 0.5}}, "slow <= fast"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0}}, "attention_factor is 0"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 0.5}}, "rope factor is 0.5; expected 1 to 1e6"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 1e308}}, r"rope factor is 1e\+308; expected 1 to 1e6"),
    (
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": 1e308, "mscale_all_dim": 1}},
        "attention_factor",
    ),
    (
        {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 10**400}},
        "original_max_position_embeddings is 1000.*; expected 1 to 2147483647",
    ),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1}}, "rope_theta is 1.0; expected more"),
    (
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e5}}},
        "rope_parameters is .*; expected one object for all layers",
    ),
    ({"rope_parameters": {"rope_type": "linear"}}, "factor is None; expected a finite number"),
    ({"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, "low < high"),
    (
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "linear", "factor": 3.0}},
        "rope_scaling is .*the same as rope_parameters",
    ),
    ({"num_key_value_heads": 3}, "config.json: heads is 4; expected a multiple of kv_heads, 3"),
    ({"head_dim": 7}, "head_dim is 7; expected an even"),
    ({"hidden_size": None}, "hidden_size is None; expected a whole number"),
    ({"hidden_size": 30, "head_dim": None}, "hidden_size is 30; expected a multiple"),
    ({"num_hidden_layers": 0}, "layers is 0"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
    ({"eos_token_id": 61}, "ids below 61"),
    ({"eos_token_id": "two"}, "eos_token_id is 'two'"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; expected true or false"),
]


@pytest.mark.parametrize(
    ("fields", "message"), REFUSED, ids=[next(iter(f)) + str(i) for i, (f, _) in enumerate(REFUSED)]
)
def test_config_refused(tmp_path: Path, fields: dict, message: str) -> None:
    save_llama(tmp_path)
    edit_config(tmp_path, **fields)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value) and "\n" not in str(caught.value)


def test_a_refusal_names_the_file_that_holds_the_value(tmp_path: Path) -> None:
    save_llama(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 61]}')
    with pytest.raises(CheckpointError, match=r"generation_config.json: eos_token_id is .*; expected ids below 61"):
        read_config(tmp_path)


def test_what_nothing_reads_is_left_out_with_a_warning(tmp_path: Path) -> None:
    save_llama(tmp_path)
    known = read_config(tmp_path)
    rope = {"rope_type": "linear", "factor": 4.0}
    edit_config(tmp_path, rope_parameters=rope | {"attn_factor": 1.5})
    with pytest.warns(IgnoredField, match="config.json: rope_parameters has 'attn_factor', which nothing reads with"):
        found = read_config(tmp_path)
    edit_config(tmp_path, rope_parameters=rope)
    assert found == read_config(tmp_path) != known


def test_pangu_biases_must_agree(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PANGU | {"attention_bias": False}))
    with pytest.raises(CheckpointError, match="attention_bias is False; expected the same as bias"):
        read_config(tmp_path)


@pytest.mark.parametrize("text", [None, "{", "[1]"])
def test_config_must_be_a_json_object(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json: (no such file|not readable|holds a list)"):
        read_config(tmp_path)


def test_harmless_fields_are_ignored(tmp_path: Path) -> None:
    save_llama(tmp_path)
    before = read_config(tmp_path)
    edit_config(tmp_path, auto_map={}, _name_or_path="x", made_up=True, sliding_window=None, use_cache=False)
    assert read_config(tmp_path) == before


def test_tensor_refusals(tmp_path: Path) -> None:
    save_llama(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    gate = "model.layers.1.mlp.gate_proj.weight"
    cases = [
        ({"drop": gate}, rf"1 tensors missing, first {gate}; expected it with shape \[48, 32\]"),
        ({gate: torch.ones(47, 32)}, rf"{gate} has shape \[47, 32\]; expected \[48, 32\]"),
        ({gate: torch.ones(48, 32, dtype=torch.float64)}, f"{gate} has dtype F64; expected one of F32"),
        ({gate: torch.ones(48, 32).half()}, f"{gate} has dtype F16; expected F32"),
        ({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, "1 tensors that .*q_norm.weight"),
    ]
    for change, message in cases:
        (tmp_path / "model.safetensors").write_bytes(whole)
        edit_tensors(tmp_path, **change)
        with pytest.raises(CheckpointError, match=message):
            Checkpoint.open(tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_truncated_file_refused(tmp_path: Path, kept: int) -> None:
    save_llama(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a whole safetensors file"):
        Checkpoint.open(tmp_path)


def test_shards_refused(tmp_path: Path) -> None:
    save_llama(tmp_path, shards="5KB")
    index = tmp_path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    norm = good["weight_map"]["model.norm.weight"]
    other = next(file for file in good["weight_map"].values() if file != norm)
    for placed, message in [
        (None, "weight_map is missing"),
        (good["weight_map"] | {"model.norm.weight": other}, f"{other}: no tensor model.norm.weight"),
        (good["weight_map"] | {"model.norm.weight": "../x.safetensors"}, "expected files of the same folder"),
        (good["weight_map"] | {"model.norm.weight": "gone.safetensors"}, "gone.safetensors: no such file"),
    ]:
        index.write_text(json.dumps({"weight_map": placed}))
        with pytest.raises(CheckpointError, match=message):
            Checkpoint.open(tmp_path)


def test_no_safetensors_refused(tmp_path: Path) -> None:
    save_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        Checkpoint.open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin only, a pickle; expected safetensors"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("shards", ["5GB", "5KB"])
@pytest.mark.parametrize("seed", range(12))
def test_a_head_beside_the_flag_tied_is_what_its_numbers_say(tmp_path: Path, seed: int, shards: str) -> None:
    """Held to the matrix that transformers computes with."""
    random = np.random.default_rng(seed)
    model = save_llama(tmp_path, tie_word_embeddings=True, shards=shards)
    head = model.model.embed_tokens.weight.detach().clone()
    kind = ("alias", "one number", "noise", "zeros")[seed % 4]
    if kind == "one number":
        head[int(random.integers(61)), int(random.integers(32))] += 1e-3
    elif kind != "alias":
        head = head * 0 if kind == "zeros" else head + 0.1 * torch.randn(head.shape)
    add_tensor(tmp_path, "lm_head.weight", head)
    checkpoint, theirs = Checkpoint.open(tmp_path), LlamaForCausalLM.from_pretrained(tmp_path).lm_head.weight
    ours = checkpoint.matrix("embed.weight" if checkpoint.config.tied else "lm_head.weight")
    assert torch.equal(ours, theirs) and checkpoint.config.tied == (kind == "alias")


def test_stored_dtype_wins_over_the_declared_one(tmp_path: Path) -> None:
    save_llama(tmp_path, torch.float16)
    edit_config(tmp_path, dtype="float32")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.dtype == torch.float16 and checkpoint.config.dtype == "float16"


def test_digest_follows_every_byte(tmp_path: Path) -> None:
    save_llama(tmp_path)
    before = Checkpoint.open(tmp_path).digest()
    assert before == Checkpoint.open(tmp_path).digest()
    edit_config(tmp_path, use_cache=False)
    edited = Checkpoint.open(tmp_path).digest()
    edit_tensors(tmp_path, **{"model.norm.weight": torch.zeros(32)})
    assert len({before, edited, Checkpoint.open(tmp_path).digest()}) == 3


def test_file_that_changes_after_the_check(tmp_path: Path) -> None:
    save_llama(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight cannot be read"):
        checkpoint.weight("norm.weight")


def test_config_made_by_hand_is_checked(tmp_path: Path) -> None:
    save_llama(tmp_path)
    with pytest.raises(CheckpointError, match="kv_heads is 0"):
        replace(read_config(tmp_path), kv_heads=0)


def test_a_shard_that_is_a_fifo_is_refused(tiny_teacher: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "shard.safetensors")
    with pytest.raises(CheckpointError, match="a FIFO"):
        read_header(tmp_path / "shard.safetensors")
