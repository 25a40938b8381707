"""How each family's config.json is read: published ones, defaults of its own class, windows, and refusals."""

import json
import math
from pathlib import Path

import pytest
import transformers

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.teachers.checkpoint import expected_tensors
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.experts import MixtureConfig
from draftwood.compiler.teachers.registry import read_config
from draftwood.errors import CheckpointError, RequestError
from draftwood.tools.demo import SHAPES
from draftwood.trees import Topology

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
MODEL_TYPES = {"Qwen3Moe": "qwen3_moe", "GptOss": "gpt_oss"}
WINDOW = {"use_sliding_window": True, "sliding_window": 100}
SLIDING = ["full_attention", "sliding_attention"]


def read(folder: Path, family: str, **fields: object) -> TeacherConfig:
    named = {"architectures": [f"{family}ForCausalLM"], "model_type": MODEL_TYPES.get(family, family.lower())}
    (folder / "config.json").write_text(json.dumps(named | SIZES | {"head_dim": 8, "eos_token_id": 2} | fields))
    return read_config(folder)


@pytest.mark.parametrize(
    ("shape", "parameters", "layers"),
    [
        ("llama-3.1-8b", 8_030_261_248, 32),
        ("qwen3-8b", 8_190_735_360, 36),
        ("qwen3-30b-a3b", 30_532_122_624, 48),
        ("qwen2.5-7b", 7_615_616_512, 28),
        ("openpangu-embedded-7b", 8_030_887_936, 34),
    ],
)
def test_a_published_shape_has_as_many_parameters(shape: str, parameters: int, layers: int) -> None:
    config = read_config(SHAPES[f"shape:{shape}"])
    found = sum(map(math.prod, expected_tensors(config).values()))
    assert (found, config.layers) == (parameters, layers)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Mistral", "Mixtral", "Glm4"])
def test_what_is_left_out_is_what_the_familys_own_class_fills_in(tmp_path: Path, family: str) -> None:
    fields = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    fields |= {"hidden_size": 64, "num_attention_heads": 32, "vocab_size": 160_000}
    named = {"architectures": [f"{family}ForCausalLM"], "model_type": MODEL_TYPES.get(family, family.lower())}
    (tmp_path / "config.json").write_text(json.dumps(named | fields))
    ours = read_config(tmp_path)
    theirs = getattr(transformers, f"{family}Config")(**fields)
    assert (ours.kv_heads, ours.tied) == (theirs.num_key_value_heads, theirs.tie_word_embeddings)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 2)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"] and ours.bos == theirs.bos_token_id
    if isinstance(ours, MixtureConfig):
        inner = getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
        assert (ours.experts, ours.experts_per_token) == (theirs.num_local_experts, theirs.num_experts_per_tok)
        assert (ours.expert_intermediate, ours.dense_layers) == (inner, ())
        assert ours.shares_normalised == getattr(theirs, "norm_topk_prob", True)
    ends = theirs.eos_token_id
    assert ours.eos == tuple(ends if isinstance(ends, list) else [] if ends is None else [ends])


@pytest.mark.parametrize(
    ("family", "fields", "longest"),
    [
        ("Mistral", {"sliding_window": None}, 256),
        ("Mistral", {"sliding_window": 100}, 100),
        ("Mistral", {"sliding_window": 4096}, 256),
        ("Mistral", {}, 256),
        ("Mistral", {"max_position_embeddings": 9999}, 4096),
        ("Qwen2", {"sliding_window": 100, "use_sliding_window": False}, 256),
        ("Qwen2", {**WINDOW, "max_window_layers": 2}, 256),
        ("Qwen2", {**WINDOW, "max_window_layers": 1}, 100),
        ("Qwen3", {**WINDOW, "layer_types": SLIDING}, 100),
        ("Qwen3Moe", {**WINDOW, "max_window_layers": 2}, 100),
        ("Qwen3Moe", {"sliding_window": 100}, 256),
        ("Mixtral", {"sliding_window": 100}, 100),
        ("Mixtral", {"max_position_embeddings": 9999}, 9999),
        ("Qwen3", {**WINDOW, "layer_types": ["full_attention"] * 2, "max_window_layers": 0}, 256),
    ],
)
def test_a_window_is_honoured_by_texts_that_fit_into_it(
    tmp_path: Path, family: str, fields: dict, longest: int
) -> None:
    assert read(tmp_path, family, **fields).max_positions == longest


def test_layers_without_experts(tmp_path: Path) -> None:
    def plain(**fields: object) -> object:
        return getattr(read(tmp_path, "Qwen3Moe", num_hidden_layers=6, **fields), "dense_layers", None)

    assert plain() == ()
    assert plain(mlp_only_layers=[1]) == (1,)
    assert plain(decoder_sparse_step=3, mlp_only_layers=[2]) == (0, 1, 2, 3, 4)


def test_a_gear_longer_than_the_window_is_refused(tmp_path: Path) -> None:
    read(tmp_path, "Mistral", sliding_window=130)
    trees = (("plain", Topology.plain()),)
    asked = BuildRequest(
        model=tmp_path, drafter=None, trees=trees, slots=(256,), prefill_rows=(8,), targets=("ge",), weights="none"
    )
    with pytest.raises(RequestError, match=r"--kv 256: the teacher knows 130 positions; choose at most 128"):
        build(asked, tmp_path / "bundle")


def test_yarn_reaches_farther_than_what_was_declared_before_it(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert read(tmp_path, "Qwen3", rope_scaling=rope).max_positions == 512
    assert read(tmp_path, "Qwen3", rope_scaling=rope, max_position_embeddings=1024).max_positions == 1024


@pytest.mark.parametrize(
    ("family", "fields", "said"),
    [
        ("Qwen2", {"layer_types": SLIDING}, "layer_types is .*; expected no 'sliding_attention' where use_sliding"),
        ("Qwen3", {**WINDOW, "sliding_window": "wide", "max_window_layers": 0}, "sliding_window is 'wide'; expected a"),
        ("Qwen3", {"num_experts": 8}, "num_experts is 8; expected 0"),
        ("Qwen3", {"layer_types": ["linear_attention"] * 2}, "layer_types is .*; expected 'full_attention' or 'slid"),
        ("Qwen3", {"model_type": "qwen2"}, "model_type is 'qwen2'; expected 'qwen3' with Qwen3ForCausalLM"),
        ("Glm4", {"partial_rotary_factor": 0.4}, "partial_rotary_factor rotates 3 dimensions; expected an even number"),
        ("Glm4", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "rotates 12 dimensions; .*from 2 to 8"),
        ("Glm4", {"attention_bias": 1}, "attention_bias is 1; expected true or false"),
        ("Mistral", {"sliding_window": True}, "sliding_window is True; expected a whole number"),
        ("Mistral", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu'"),
        (
            "Mistral",
            {"quantization_config": {"bits": 4}},
            "the quantisation is of None; expected AWQ gemm, GPTQ, AutoRound, or",
        ),
        ("GptOss", {}, "architectures is .'GptOssForCausalLM'.; expected .*: its attention has sinks"),
        ("Gemma3", {}, "architectures is .'Gemma3ForCausalLM'.; expected .*: its norms, embedding and windows"),
        ("Qwen3Moe", {"num_experts": 8, "num_local_experts": 4}, "num_experts is 8; expected the same as num_local"),
        ("Qwen3Moe", {"num_experts_per_tok": 129}, "experts_per_token is 129; expected 1 to 128"),
        ("Qwen3Moe", {"num_experts": 2000}, "experts is 2000; expected 1 to 1024"),
        ("Qwen3Moe", {"mlp_only_layers": "first"}, "mlp_only_layers is 'first'; expected a list of layers"),
        ("Qwen3Moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0; expected 1 or more"),
        ("Qwen3Moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size is 64; expected 0"),
        ("Mixtral", {"norm_topk_prob": 1, "num_local_experts": 1}, "experts_per_token is 2; expected 1 to 1"),
        ("Gemma2", {}, "architectures is .'Gemma2ForCausalLM'.; expected one of Llama.*Qwen2.*Qwen3.*Mistral"),
        ("Qwen3", {"rope_scaling": {"type": "longrope"}}, "rope_scaling is .*; expected rope_type default, linear,"),
    ],
)
def test_what_a_family_has_no_form_of_is_refused_by_name(tmp_path: Path, family: str, fields: dict, said: str) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        read(tmp_path, family, **fields)
    assert "\n" not in str(caught.value)
