"""EAGLE-3 checkpoints: three layouts, two containers, and a linter that names the field that does not fit."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftwood.compiler.drafters.eagle3.model import Eagle3Model
from draftwood.compiler.drafters.eagle3.network import Eagle3
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.errors import CheckpointError

LAYOUTS = ("SafeAILab", "SpecForge", "speculators")
IDS = "eagle_aux_hidden_state_layer_ids"


def block_at(layout: str) -> str:
    return "layers.0" if layout == "speculators" else "midlayer"


def save(make: Any, folder: Path, layout: str, change: Callable = lambda config, tensors: None, **options) -> Path:
    config, tensors = make.eagle3_config(layout), make.eagle3_tensors(block_at(layout))
    change(config, tensors)
    return make.save(folder, config, tensors, **options)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_opened(make: Any, teacher: Checkpoint, tmp_path: Path, layout: str, file: str) -> None:
    save(make, tmp_path, layout, file=file)
    tensors, at = make.eagle3_tensors(block_at(layout)), block_at(layout)
    for path in (tmp_path, tmp_path / file):
        opened = Eagle3Model.open(path, teacher).checkpoint
        config = opened.config
        assert config.aux_layers == (2, 4, 5) and config.draft_vocabulary == 40 and config.mapped
        assert (config.feature_norm, config.norm_before_residual, config.norm_output) == ("none", False, False)
        assert not config.own_embedding and not config.tied_head and opened.dtype == torch.float32
        assert torch.equal(opened.ids, tensors["t2d"].nonzero().flatten())
        assert torch.equal(opened.weight("draft_head.weight"), tensors["lm_head.weight"])
        sides = [tensors[f"{at}.self_attn.{side}_proj.weight"] for side in "qkv"]
        assert torch.equal(opened.weight("block.qkv.weight"), torch.cat(sides))
        assert torch.equal(opened.weight("block.hidden_norm.weight"), tensors[f"{at}.hidden_norm.weight"])
    state = Eagle3(config, 8).state_dict()
    assert set(state) == {*opened.names(), *opened.buffers(8)}
    assert {name: opened.weight(name).shape for name in opened.names()} == {n: state[n].shape for n in opened.names()}


def nested(ids: list[int]) -> dict:
    return {"eagle_config": {IDS: ids, "use_aux_hidden_state": True}}


AUX = [
    pytest.param("SafeAILab", {}, (2, 4, 5), id="SafeAILab default"),
    pytest.param("SafeAILab", nested([1, 4, 7]), (1, 4, 7), id="SafeAILab entering"),
    pytest.param("SafeAILab", nested([0, 1, 8]), (0, 1, 8), id="embedding and last output"),
    pytest.param("SafeAILab", nested([1, 3, 4]) | {"aux_layer_ids": [1, 3, 4]}, (1, 3, 4), id="own field"),
    pytest.param("SpecForge", {}, (2, 4, 5), id="SpecForge default"),
    pytest.param("SpecForge", nested([1, 3, 4]), (2, 4, 5), id="SpecForge leaving"),
    pytest.param("SpecForge", nested([2, 4, 5]), (2, 4, 5), id="SpecForge entering"),
    pytest.param("SpecForge", {"aux_layer_ids": [1, 4, 6]}, (1, 4, 6), id="SpecForge own field"),
    pytest.param("speculators", {IDS: [1, 5, 6]}, (1, 5, 6), id="speculators entering"),
    pytest.param("speculators", {IDS: None}, (2, 4, 5), id="speculators default"),
]


@pytest.mark.parametrize(("layout", "fields", "wanted"), AUX)
def test_aux_layers_are_those_entered(
    make: Any, teacher: Checkpoint, tmp_path: Path, layout: str, fields: dict, wanted: tuple
) -> None:
    save(make, tmp_path, layout, lambda config, tensors: config.update(fields))
    assert Eagle3Model.open(tmp_path, teacher).checkpoint.config.aux_layers == wanted


@pytest.mark.parametrize("where", ["top", "nested", "both"])
def test_norm_before_fc_at_the_top_and_nested(make: Any, teacher: Checkpoint, tmp_path: Path, where: str) -> None:
    def change(config: dict, tensors: dict) -> None:
        tensors["input_norm.weight"] = torch.ones(192)
        config |= {"norm_before_fc": True} if where != "nested" else {}
        config |= {"eagle_config": {"norm_before_fc": True}} if where != "top" else {}

    save(make, tmp_path, "SafeAILab", change)
    assert Eagle3Model.open(tmp_path, teacher).checkpoint.config.feature_norm == "whole"


def test_a_missing_output_matrix_is_the_teachers(make: Any, teacher: Checkpoint, tmp_path: Path) -> None:
    save(make, tmp_path, "SafeAILab", lambda config, tensors: tensors.pop("lm_head.weight"))
    opened = Eagle3Model.open(tmp_path, teacher).checkpoint
    assert opened.config.tied_head and opened.config.has_head
    assert torch.equal(opened.weight("draft_head.weight"), teacher.weight("lm_head.weight")[opened.ids])


def test_of_a_tied_teacher_it_is_the_embedding(make: Any, save_llama: Callable, tmp_path: Path) -> None:
    (tmp_path / "teacher").mkdir()
    save_llama(tmp_path / "teacher", num_hidden_layers=8, tie_word_embeddings=True)
    tied = Checkpoint.open(tmp_path / "teacher")
    save(make, tmp_path, "SafeAILab", lambda config, tensors: tensors.pop("lm_head.weight"))
    opened = Eagle3Model.open(tmp_path, tied).checkpoint
    assert torch.equal(opened.weight("draft_head.weight"), tied.weight("embed.weight")[opened.ids])


def test_frequencies_of_older_exporters_are_ignored(make: Any, teacher: Checkpoint, tmp_path: Path) -> None:
    change = lambda config, tensors: tensors.update({"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(8)})  # noqa: E731
    save(make, tmp_path, "SafeAILab", change)
    assert "inv_freq" not in str(Eagle3Model.open(tmp_path, teacher).checkpoint.parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype(make: Any, teacher: Checkpoint, tmp_path: Path, dtype: torch.dtype) -> None:
    def change(config: dict, tensors: dict) -> None:
        tensors.update({key: t.to(dtype) for key, t in tensors.items() if t.is_floating_point()})

    save(make, tmp_path, "SafeAILab", change)
    assert Eagle3Model.open(tmp_path, teacher).checkpoint.dtype == dtype


def test_digest_covers_both_files(make: Any, teacher: Checkpoint, tmp_path: Path) -> None:
    digests = set()
    for change in (
        lambda config, tensors: None,
        lambda config, tensors: config.update(rms_norm_eps=1e-6),
        lambda config, tensors: tensors.update({"norm.weight": torch.zeros(64)}),
    ):
        save(make, tmp_path, "SafeAILab", change)
        digests.add(Eagle3Model.open(tmp_path, teacher).checkpoint.digest())
    assert len(digests) == 3


def fields(**values: object) -> Callable:
    return lambda config, tensors: config.update(values)


def without(*names: str) -> Callable:
    return lambda config, tensors: [part.pop(name) for name in names for part in (config, tensors) if name in part]


def tensors(**values: torch.Tensor) -> Callable:
    return lambda config, held: held.update({name.replace("__", "."): t for name, t in values.items()})


def nested_fields(**values: object) -> Callable:
    return lambda config, held: config.update(eagle_config=values)


def both(*changes: Callable) -> Callable:
    return lambda config, held: [change(config, held) for change in changes]


def d2t(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    return lambda config, held: held.update(d2t=change(held["d2t"]))


def put(index: int, value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda t: t.clone().index_fill(0, torch.tensor([index]), value)


INPUT_NORM = torch.ones(192)
REFUSED = [
    # Layout
    ("SafeAILab", fields(architectures=["Qwen3ForCausalLM"]), "architectures is .*; expected one of LlamaForCausalLM,"),
    ("SafeAILab", without("architectures"), "architectures is None; expected one of"),
    ("SafeAILab", fields(speculators_model_type="eagle3"), "speculators_model_type is 'eagle3'; expected no such"),
    ("speculators", fields(speculators_model_type="eagle"), "speculators_model_type is 'eagle'; expected eagle3"),
    ("SafeAILab", fields(model_type="gemma3"), "model_type is 'gemma3'; expected 'llama' or 'qwen3'"),
    ("speculators", fields(transformer_layer_config=3), "transformer_layer_config is 3; expected an object"),
    ("SafeAILab", fields(hidden_act="gelu"), "hidden_act is 'gelu'; expected 'silu'"),
    ("SafeAILab", fields(num_hidden_layers=2), "num_hidden_layers is 2; expected 1, as many as the file"),
    ("SafeAILab", fields(num_key_value_heads=3), "heads is 4; expected a multiple of kv_heads, 3"),
    # Teacher
    ("SafeAILab", fields(vocab_size=99), "vocab_size is 99; expected 101 as the teacher has"),
    ("SafeAILab", fields(target_hidden_size=32), "target_hidden_size is 32; expected 64, the teacher's hidden size"),
    ("speculators", fields(target_hidden_size=96), "target_hidden_size is 96; expected 64"),
    ("SafeAILab", fields(draft_vocab_size=102), "draft_vocab_size is 102; expected 1 to 101"),
    ("SafeAILab", fields(hidden_size=48), "hidden_size is 48; expected 64 .* lacks an embedding of its own"),
    # Aux layers
    ("SafeAILab", nested_fields(**{IDS: [2, 4]}), r"fc.weight has shape \[64, 192\]; expected \[64, 128\]"),
    ("SafeAILab", nested_fields(**{IDS: [2, 4, 9]}), r"\[2, 4, 9\]; expected ascending ids from 0 to 8"),
    ("SafeAILab", nested_fields(**{IDS: [-1, 4, 5]}), r"\[-1, 4, 5\]; expected ascending ids"),
    ("SafeAILab", nested_fields(**{IDS: [4, 2, 5]}), r"\[4, 2, 5\]; expected ascending ids"),
    ("SafeAILab", nested_fields(**{IDS: [1, 3, 4]}), r"may mean states entering or leaving .* \[2, 4, 5\] here; state"),
    ("speculators", fields(**{IDS: [1, 3, 4]}), "may mean states entering or leaving these layers"),
    (
        "SafeAILab",
        both(fields(**{IDS: [1, 4, 6]}), nested_fields(**{IDS: [2, 4, 6]})),
        r"\[1, 4, 6\]; expected the same as in eagle_config, \[2, 4, 6\]",
    ),
    ("SafeAILab", fields(aux_layer_ids=[2, 4, 40]), "aux_layer_ids gives .* expected ascending ids from 0 to 8"),
    ("SafeAILab", fields(aux_layer_ids="2"), "aux_layer_ids is '2'; expected a token id, a list"),
    ("SafeAILab", nested_fields(use_aux_hidden_state=False), "use_aux_hidden_state is false; expected true"),
    # Norms
    (
        "SafeAILab",
        both(fields(norm_before_fc=True), nested_fields(norm_before_fc=False), tensors(input_norm__weight=INPUT_NORM)),
        "norm_before_fc is True; expected the same as in eagle_config, False",
    ),
    ("SafeAILab", fields(norm_before_fc=True), "1 tensors missing, first input_norm.weight; .* shape \\[192\\]"),
    ("SafeAILab", tensors(input_norm__weight=INPUT_NORM), "does not explain: input_norm.weight; .* by its flag"),
    ("SpecForge", fields(fc_norm=True), r"3 tensors missing, first fc_norm.0.weight; .* shape \[64\]"),
    ("SpecForge", fields(fc_norm=True, norm_before_fc=True), "fc_norm is True; expected false with norm_before_fc"),
    ("SpecForge", fields(norm_before_fc="yes"), "norm_before_fc is 'yes'; expected true or false"),
    ("SpecForge", fields(norm_output=True), "norm_output is True; expected no such field in the SpecForge layout"),
    ("SpecForge", fields(norm_output=False), "norm_output is False; expected no such field in the SpecForge layout"),
    ("SafeAILab", nested_fields(norm_output=True), "norm_output is True; expected no such field in the SafeAILab"),
    ("speculators", without("norm_before_residual"), "norm_before_residual is None; expected true or false; readers"),
    # Vocabulary maps
    ("SafeAILab", without("d2t"), "d2t is missing; expected I64"),
    ("SafeAILab", d2t(lambda t: t + torch.arange(40)), "expected ids from 0 to 100; d2t must be an offset"),
    ("SafeAILab", d2t(lambda t: t - 5), "runs from -.* expected ids from 0 to 100"),
    ("SafeAILab", d2t(put(39, 0)), "t2d marks other ids"),
    ("SafeAILab", d2t(lambda t: torch.cat((t[:39], t[38:39] - 1))), "is 9. more than once; expected each id once"),
    ("SafeAILab", d2t(lambda t: t.float()), r"d2t is (F32|torch.float32) \[40\]; expected I64 \[40\]"),
    ("SafeAILab", d2t(lambda t: t[:39]), r"d2t is I64 \[39\]; expected I64 \[40\]"),
    ("SafeAILab", tensors(t2d=torch.ones(100, dtype=torch.bool)), r"t2d is BOOL \[100\]; expected BOOL \[101\]"),
    ("SafeAILab", tensors(t2d=torch.ones(101, dtype=torch.bool)), "t2d marks other ids than"),
    ("SafeAILab", fields(draft_vocab_size=41), r"lm_head.weight has shape \[40, 64\]; expected \[41, 64\]"),
    # Tensors
    ("SafeAILab", without("fc.weight"), "1 tensors missing, first fc.weight"),
    ("SafeAILab", tensors(fc__bias=torch.ones(64)), "does not explain: fc.bias"),
    ("SafeAILab", tensors(fc__weight=torch.ones(64, 128)), r"fc.weight has shape \[64, 128\]; expected \[64, 192\]"),
    ("SafeAILab", tensors(norm__weight=torch.ones(64, dtype=torch.int8)), "norm.weight has dtype (I8|torch.int8)"),
    (
        "SafeAILab",
        tensors(fc__weight=torch.ones(64, 192, dtype=torch.int8), fc__weight_scale=torch.ones(64, 1)),
        r"fc.weight has dtype (I8|torch.int8); expected one of F32.* build --int8-drafter rounds",
    ),
    ("SafeAILab", tensors(fc__qweight=torch.ones(8, 8, dtype=torch.int32)), r"fc.qweight has dtype I32; expected one"),
    ("SafeAILab", fields(attention_bias=True), "tensors missing, first midlayer.self_attn.q_proj.bias"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "change", "message"), REFUSED, ids=[message[:40] for *_, message in REFUSED])
def test_refused(make: Any, teacher: Checkpoint, tmp_path: Path, layout: str, change: Callable, message: str) -> None:
    save(make, tmp_path, layout, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        Eagle3Model.open(tmp_path, teacher)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_shallow_teacher_needs_its_layers_named(make: Any, save_llama: Callable, tmp_path: Path) -> None:
    (tmp_path / "teacher").mkdir()
    save_llama(tmp_path / "teacher")
    shallow = Checkpoint.open(tmp_path / "teacher")
    save(make, tmp_path, "SafeAILab")
    with pytest.raises(CheckpointError, match=r"left out gives .* \[2, 1, -1\]; .* 0 to 2 .* as aux_layer_ids"):
        Eagle3Model.open(tmp_path, shallow)
    save(make, tmp_path, "SafeAILab", fields(aux_layer_ids=[0, 1, 2]))
    assert Eagle3Model.open(tmp_path, shallow).checkpoint.config.aux_layers == (0, 1, 2)


class Payload:
    """Runs a command when an unrestricted pickle reader meets it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)


def test_pickle_that_would_run_code_is_refused(make: Any, teacher: Checkpoint, tmp_path: Path) -> None:
    save(
        make,
        tmp_path,
        "SafeAILab",
        lambda config, held: held.update(x=Payload(tmp_path / "ran")),
        file="pytorch_model.bin",
    )
    with pytest.raises(CheckpointError, match="could run code"):
        Eagle3Model.open(tmp_path, teacher)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_truncated_file_refused(make: Any, teacher: Checkpoint, tmp_path: Path, file: str) -> None:
    save(make, tmp_path, "SafeAILab", file=file)
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:300])
    with pytest.raises(CheckpointError, match="not a whole"):
        Eagle3Model.open(tmp_path, teacher)


def test_shards_come_before_a_torch_file(make: Any, teacher: Checkpoint, tmp_path: Path) -> None:
    """As in transformers: a repository often keeps the file of an earlier version."""
    save(make, tmp_path, "SafeAILab")
    tensors = load_file(tmp_path / "model.safetensors")
    torch.save({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, tmp_path / "pytorch_model.bin")
    shard = "model-00001-of-00001.safetensors"
    (tmp_path / "model.safetensors").rename(tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, shard)}))
    opened = Eagle3Model.open(tmp_path, teacher).checkpoint
    assert torch.equal(opened.weight("draft_head.weight"), tensors["lm_head.weight"])


def test_nothing_there(make: Any, teacher: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"no EAGLE-3 drafter; expected a folder with model\.safetensors or .*, or shards"
    ):
        Eagle3Model.open(tmp_path, teacher)
    (tmp_path / "pytorch_model-00001-of-00002.bin").touch()
    with pytest.raises(CheckpointError, match=r"shards of safetensors; shards of torch files are not read: save them"):
        Eagle3Model.open(tmp_path, teacher)
    save(make, tmp_path, "SafeAILab")
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        Eagle3Model.open(tmp_path, teacher)
