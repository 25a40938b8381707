"""Every key of a config.json, changed one by one: logits are transformers', or it is refused in one line."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from draftwood.compiler.teachers.decoder import Decoder
from draftwood.errors import CheckpointError

# fp32 against fp32, logits of magnitude up to 10: sums in another order. Measured: 2e-5 at most, over all.
FP32 = 1e-4
IDS = [5, 9, 17, 3, 22, 41, 8, 60, 2, 33, 12, 7, 7, 19, 28, 50]
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "Mistral": {},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Glm4": {"head_dim": 16, "pad_token_id": 0},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Keys that no class writes by itself, and ropes in every spelling.
MORE: list[dict[str, Any]] = [
    {"rope_theta": 500.0, "rope_parameters": None},
    {"rope_theta": 500.0},
    {"rope_scaling": {"type": "linear", "factor": 3.0}},
    {"rope_scaling": YARN | {"attn_factor": 1.5}, "rope_parameters": None},
    {"rope_scaling": YARN | {"something": 3}, "rope_parameters": None, "rope_theta": 500.0},
    {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
    {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "linear", "factor": 2.0,
     "rope_theta": 10000.0}},
    {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "linear", "factor": 2.0,
     "rope_theta": 77.0}},
    {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 77.0, "rope_parameters": {"rope_type": "linear",
     "factor": 2.0, "rope_theta": 77.0}},
    {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "linear", "factor": 3.0}},
    {"rope_scaling": LLAMA_3, "rope_parameters": None},
    {"rope_parameters": LLAMA_3 | {"rope_theta": 500.0, "original_max_position_embeddings": 16}},
    {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0, "rope_theta": 500.0}},
    {"rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 16, "beta_slow": 2, "rope_theta": 500.0}},
    {"rope_parameters": YARN | {"truncate": False, "rope_theta": 500.0}},
    {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}, "max_position_embeddings": 64},
    {"partial_rotary_factor": 0.5},
    {"mlp_bias": True}, {"attention_bias": True}, {"logit_scale": 2.0}, {"scoring_func": "sigmoid"},
    {"norm_topk_prob": True}, {"router_jitter_noise": 0.5}, {"attention_dropout": 0.5}, {"hidden_act": "gelu"},
    {"final_logit_softcapping": 5.0}, {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
    {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1},
    {"is_causal": False}, {"sliding_window": 0, "use_cache": False},
]  # fmt: skip

# Of these, what has to be read: transformers takes it, some of it with a warning.
READ = [0, 1, 2, 3, 4, 5, 8]


def others(value: Any) -> list[Any]:
    """Other values of a key."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2, 0, None]
    if isinstance(value, float):
        return [value * 3, 0.5, None]
    if isinstance(value, str):
        return ["gelu", None]
    if isinstance(value, dict):
        return [None, {**value, "rope_type": "linear", "factor": 2.0}]
    return [True, 2, None]


# A class of transformers for each; the others have the keys of these in two or three other places.
SLOW = ("Qwen2", "Qwen3", "Mixtral")


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in FAMILIES], scope="module"
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, save_llama: Callable) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    save_llama(folder, family=request.param, **FAMILIES[request.param])
    return request.param, folder


def changed(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in sorted(config.keys() - {"architectures", "model_type", "transformers_version", "dtype"}):
        yield from ({name: value} for value in others(config[name]))
    yield from MORE


def theirs(name: str, folder: Path) -> torch.Tensor | None:
    """None if transformers cannot make a model of all its weights, or does not run it."""
    try:
        kind = getattr(transformers, f"{name}ForCausalLM")
        model, said = kind.from_pretrained(folder, attn_implementation="eager", output_loading_info=True)
        if said["missing_keys"] or said["mismatched_keys"] or said["unexpected_keys"]:
            return None
        with torch.no_grad():
            found: torch.Tensor = model.eval()(torch.tensor([IDS])).logits[0]
        return found
    except Exception:  # it raises whatever its parts do
        return None


def ours(decoder: Decoder) -> torch.Tensor:
    config, rows = decoder.config, len(IDS)
    caches = [torch.zeros(config.kv_heads * 128, config.head_dim) for _ in range(2 * config.layers)]
    branch = torch.zeros(config.layers, 2, 1, config.kv_heads, config.head_dim)
    nothing = torch.tensor([0])
    seen = torch.ones(rows, rows, dtype=torch.bool).tril()
    tokens, path = torch.tensor(IDS), torch.zeros(1, dtype=torch.int64)
    return decoder.step(tokens, torch.arange(rows), seen, nothing, nothing, path, branch, caches).logits_RV


@pytest.mark.filterwarnings("ignore:.*which nothing reads")
def test_a_key_is_used_or_refused(family: Any, load_decoder: Callable) -> None:
    name, folder = family
    path = folder / "config.json"
    published, wrong, compared = json.loads(path.read_text()), [], 0
    transformers.logging.set_verbosity_error()
    for change in changed(published):
        path.write_text(json.dumps(published | change))
        try:
            decoder = load_decoder(folder, 128)
        except CheckpointError as error:
            assert "\n" not in str(error) and (name == "Glm4" or change not in [MORE[at] for at in READ]), change
            continue
        expected = theirs(name, folder)
        if expected is None:
            continue
        reach = min(len(IDS), decoder.config.max_positions)
        off = float((ours(decoder)[:reach] - expected[:reach]).abs().max())
        compared += 1
        if not off < FP32:
            wrong.append((change, off))
    path.write_text(json.dumps(published))
    assert wrong == [] and compared > 20
