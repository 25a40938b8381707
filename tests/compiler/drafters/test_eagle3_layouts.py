"""EAGLE-3 folders as their writers spell them: layer ids, windows, vocabularies, dtypes and shards."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftwood.compiler.drafters.eagle3.model import Eagle3Model
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.errors import CheckpointError, TreeError
from draftwood.trees import Topology

IDS = "eagle_aux_hidden_state_layer_ids"
MANY = {"states": 5, "draft": 101}


def opened(
    make: Any, teacher: Checkpoint, folder: Path, layout: str, change: Callable = lambda config, held: None, **shape
):
    at = "layers.0" if layout in ("speculators", "ModelOpt", "Automodel", "DeepSpec") else "midlayer"
    config, tensors = make.eagle3_config(layout, shape.get("draft", 40)), make.eagle3_tensors(at, **shape)
    change(config, tensors)
    return Eagle3Model.open(make.save(folder, config, tensors), teacher).checkpoint


def fields(**values: object) -> Callable:
    return lambda config, held: config.update(values)


def inner(**values: object) -> Callable:
    return lambda config, held: config["transformer_layer_config"].update(values)


def nested(**values: object) -> Callable:
    return lambda config, held: config.update(eagle_config=config.get("eagle_config", {}) | values)


def tensor(**values: torch.Tensor) -> Callable:
    return lambda config, held: held.update(values)


def without(name: str) -> Callable:
    return lambda config, held: [part.pop(name, None) for part in (config, held)]


def deepspec(config: dict, held: dict) -> None:
    del held["d2t"], held["t2d"]


LEFT = [  # hooks capture the output of the named layer, by depth
    ("SpecForge", nested(**{IDS: [0, 2, 6]}), {}, (1, 3, 7)),
    ("SpecForge", nested(**{IDS: [6, 0, 2]}), {}, (1, 3, 7)),
    ("ModelOpt", nested(**{IDS: [1, 4, 7]}), {}, (2, 5, 8)),
    ("ModelOpt", nested(**{IDS: [0, 1, 2, 3, 4]}), {"states": 5}, (1, 2, 3, 4, 5)),
    ("AngelSlim", fields(), {}, (2, 4, 5)),
    ("AngelSlim", nested(**{IDS: [1, 3, 4]}), {}, (2, 4, 5)),
    ("Automodel", fields(), {}, (2, 4, 5)),
    ("DeepSpec", deepspec, MANY | {"qk": True}, (1, 2, 4, 6, 7)),
    ("speculators", fields(**{IDS: [0, 1, 2, 6, 8]}), {"states": 5}, (0, 1, 2, 6, 8)),
]


@pytest.mark.parametrize(("layout", "change", "shape", "wanted"), LEFT)
def test_ids_by_writer(
    make: Any, teacher: Checkpoint, tmp_path: Path, layout: str, change: Callable, shape: dict, wanted: tuple
) -> None:
    config = opened(make, teacher, tmp_path, layout, change, **shape).config
    assert config.aux_layers == wanted and config.features == 64 * len(wanted)
    assert config.block.qk_norm == (layout == "DeepSpec")


def sliding(config: dict, held: dict) -> None:
    """As speculators 0.7 trains: every layer slides, over two layers here."""
    block = {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2, "sliding_window": 2048}
    config["transformer_layer_config"] |= block | {"use_sliding_window": True}


def test_a_default_window_is_honoured(make: Any, teacher: Checkpoint, tmp_path: Path) -> None:
    config = opened(make, teacher, tmp_path, "speculators", sliding, layers=2).config
    assert config.window == 2048 and config.block.layers == 2
    with pytest.raises(TreeError, match=r"deep; expected less than the drafter's window of 2048; choose a shallower"):
        Eagle3Model(config).check_tree("deep", Topology.chain(2048), teacher.config)


@pytest.mark.parametrize("version", ["0.1.0", "0.7.0"])
def test_a_version_decides_the_residual(make: Any, teacher: Checkpoint, tmp_path: Path, version: str) -> None:
    # Every version of the library's own class fills in false.
    def change(config: dict, held: dict) -> None:
        del config["norm_before_residual"]
        config |= {"speculators_version": version}

    assert not opened(make, teacher, tmp_path, "speculators", change).config.norm_before_residual


def test_what_the_teacher_was_trained_with_is_left(make: Any, teacher: Checkpoint, tmp_path: Path) -> None:
    extra = {"verifier_norm.weight": torch.ones(64), "verifier_lm_head.weight": torch.ones(40, 64)}
    assert not any("verifier" in str(p) for p in opened(make, teacher, tmp_path, "speculators", tensor(**extra)).parts)


def test_own_field_settles_the_feedback(make: Any, teacher: Checkpoint, tmp_path: Path) -> None:
    for stated in (True, False):
        change = fields(norm_output=True, normed_feedback=stated)
        assert opened(make, teacher, tmp_path, "SpecForge", change).config.norm_output == stated


def shuffled(config: dict, held: dict) -> None:
    ids = held["t2d"].nonzero().flatten()
    held["d2t"] = ids[torch.randperm(40, generator=torch.Generator().manual_seed(2))] - torch.arange(40)


def whole(config: dict, held: dict) -> None:
    held |= {"d2t": torch.zeros(101, dtype=torch.int64), "t2d": torch.zeros(101, dtype=torch.bool)}


def test_vocabulary_maps(make: Any, teacher: Checkpoint, tmp_path: Path) -> None:
    ids = opened(make, teacher, tmp_path, "SpecForge").ids
    narrow = lambda config, held: held.update(d2t=held["d2t"].int(), t2d=held["t2d"].long())  # noqa: E731
    assert torch.equal(opened(make, teacher, tmp_path, "SpecForge", narrow).ids, ids)
    mixed = opened(make, teacher, tmp_path, "SpecForge", shuffled)
    assert torch.equal(mixed.ids.sort().values, ids) and not torch.equal(mixed.ids, ids)
    assert torch.equal(mixed.buffers(8)["teacher_ids"], mixed.ids)
    everything = opened(make, teacher, tmp_path, "SpecForge", whole, draft=101)
    assert not everything.config.mapped and torch.equal(everything.ids, torch.arange(101))


@pytest.mark.parametrize("draft", [40, 128], ids=["subset", "whole"])
def test_padding_is_cut_off(make: Any, teacher: Checkpoint, tmp_path: Path, draft: int) -> None:
    tables = {"embed_tokens.weight": torch.randn(128, 64), "lm_head.weight": torch.randn(draft, 64)}

    def change(config: dict, held: dict) -> None:
        config |= {"vocab_size": 128, "draft_vocab_size": draft}
        held |= tables | {"t2d": torch.cat((held["t2d"], torch.zeros(27, dtype=torch.bool)))}
        if draft == 128:
            del held["d2t"], held["t2d"]

    found = opened(make, teacher, tmp_path, "AngelSlim", change)
    assert found.config.draft_vocabulary == min(draft, 101) and found.config.block.vocabulary == 101
    assert torch.equal(found.weight("draft_embed.weight"), tables["embed_tokens.weight"][:101])
    assert torch.equal(found.weight("draft_head.weight"), tables["lm_head.weight"][:101])


SCALED = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0},
    # Within the declared context; beyond it frequencies change with a text's length, which no table can say.
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}


@pytest.mark.parametrize("kind", SCALED)
def test_rotary_tables_are_transformers(make: Any, teacher: Checkpoint, tmp_path: Path, kind: str) -> None:
    found = opened(make, teacher, tmp_path, "SpecForge", fields(rope_scaling=SCALED[kind]))
    config = LlamaConfig(**make.sizes | {"rope_parameters": SCALED[kind] | {"rope_theta": 5e3}})
    cos, sin = LlamaRotaryEmbedding(config)(torch.ones(1), torch.arange(16)[None])
    tables = found.buffers(16)
    torch.testing.assert_close(tables["draft_cos"], cos[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(tables["draft_sin"], sin[0], rtol=0, atol=1e-6)


def test_mixed_dtypes_are_widened(make: Any, teacher: Checkpoint, tmp_path: Path) -> None:
    def change(config: dict, held: dict) -> None:
        for key in held:
            if key.endswith(("q_proj.weight", "fc.weight")):
                held[key] = held[key].bfloat16()

    found, exact = opened(make, teacher, tmp_path, "SafeAILab", change), make.eagle3_tensors()
    assert found.dtype == torch.float32
    assert torch.equal(found.weight("fc.weight"), exact["fc.weight"].bfloat16().float())
    assert torch.equal(found.weight("block.qkv.weight")[64:96], exact["midlayer.self_attn.k_proj.weight"])


def test_shards(make: Any, teacher: Checkpoint, tmp_path: Path) -> None:
    whole_file = opened(make, teacher, tmp_path / "one", "SpecForge")
    folder, tensors = tmp_path / "two", make.eagle3_tensors()
    make.save(folder, make.eagle3_config("SpecForge"), {})
    (folder / "model.safetensors").unlink()
    placed = {key: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, key in enumerate(tensors)}
    for file in set(placed.values()):
        save_file({key: tensors[key] for key in tensors if placed[key] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    found = Eagle3Model.open(folder, teacher).checkpoint
    assert all(torch.equal(found.weight(name), whole_file.weight(name)) for name in whole_file.names())
    assert len(found.files) == 3 and torch.equal(found.ids, whole_file.ids)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no such file; fetch the whole checkpoint"):
        Eagle3Model.open(folder, teacher)


def tied(config: dict, held: dict) -> None:
    config["tie_word_embeddings"] = True
    held["embed_tokens.weight"] = torch.ones(101, 64)


QK = {"qk": True}
REFUSED = [
    ("SafeAILab", fields(architectures=["Eagle3DeepseekV3ForCausalLM"]), {}, r"latent attention \(MLA\), which is not"),
    ("SpecForge", fields(architectures=["LlamaForCausalLMEagle3Deep"]), {}, "Megatron export of several layers"),
    ("ModelOpt", nested(use_last_layernorm=False), {}, "use_last_layernorm is False; expected true: the other network"),
    ("ModelOpt", nested(use_mtp_layernorm=True), {}, "use_mtp_layernorm is True; expected false"),
    ("ModelOpt", nested(use_input_layernorm_in_first_layer=False), {}, "in_first_layer is False; expected true"),
    ("ModelOpt", nested(next_layer_regular=False), {}, "next_layer_regular is False; expected true"),
    ("ModelOpt", nested(parallel_draft_step=4), {}, "parallel_draft_step is 4; expected 1; parallel heads"),
    ("ModelOpt", without("d2t"), {}, r"d2t is missing; expected I64 \[40\]"),
    ("ModelOpt", nested(**{IDS: [1, 3, 8]}), {}, r"entering layers \[2, 4, 9\]; expected ascending ids from 0 to 8"),
    ("AngelSlim", nested(**{IDS: [2, 4, 5]}), {}, r"may mean states entering or leaving .* \[1, 3, 4\] here"),
    ("Automodel", fields(num_aux_hidden_states=5), {}, "num_aux_hidden_states is 5; expected 3, as many as there are"),
    ("DeepSpec", without("target_layer_ids"), MANY | QK, "target_layer_ids is None; expected the layers that .* leave"),
    ("DeepSpec", fields(num_hidden_layers=2), MANY | QK | {"layers": 2}, "layers is 2; expected 1; a deeper"),
    ("DeepSpec", deepspec, MANY, "missing, first layers.0.self_attn.q_norm.weight"),
    ("SpecForge", fields(), QK, "does not explain: midlayer.self_attn.k_norm.weight"),
    ("speculators", inner(layer_types=["sliding_attention"]), {}, "sliding_window is None; expected a whole number"),
    ("speculators", inner(layer_types=["sliding_attention"], sliding_window=2), {}, "is 2; expected 64 or more"),
    (
        "speculators",
        inner(layer_types=["sliding_attention", "full_attention"], sliding_window=2048),
        {},
        "layer_types is .* expected 'full_attention' in every layer, or 'sliding_attention' in every layer",
    ),
    (
        "speculators",
        inner(layer_types=["sliding_attention"], sliding_window=2048, use_sliding_window=False),
        {},
        "use_sliding_window is False; expected true with layer_types that slide",
    ),
    ("speculators", inner(use_sliding_window=True), {}, "use_sliding_window is True; expected false, or layer_types"),
    ("speculators", inner(sliding_window=2048), {}, "sliding_window is 2048; expected null, or layer_types that say"),
    ("SpecForge", tensor(t2d=torch.arange(101)), {}, "t2d runs from 0 to 100; expected 0 and 1 alone"),
    ("SpecForge", fields(vocab_size=150), {}, "vocab_size is 150; expected 101 as the teacher has, maybe padded"),
    ("SpecForge", tensor(d2t=torch.ones(101).long()), {"draft": 101}, "d2t maps ids where the draft vocabulary is the"),
    (
        "AngelSlim",
        tied,
        {"draft": 101},
        "tie_word_embeddings is True; expected false, or no embedding in the file",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "change", "shape", "message"), REFUSED, ids=[message[:40] for *_, message in REFUSED]
)
def test_refused(
    make: Any, teacher: Checkpoint, tmp_path: Path, layout: str, change: Callable, shape: dict, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        opened(make, teacher, tmp_path, layout, change, **shape)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
