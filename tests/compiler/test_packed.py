"""Four-bit checkpoints as people publish them are read number by number, and refused where these are unclear."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.checkpoints.packing import packing_of
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.conversion import in_precision
from draftwood.errors import CheckpointError
from draftwood.tests.packed_checkpoints import LAYOUTS, Numbers, save_packed

DOWN = "model.layers.1.mlp.down_proj"
CASES = [
    *((layout, {}) for layout in LAYOUTS),
    *((layout, {"symmetric": True}) for layout in LAYOUTS),
    *((layout, {"group": -1}) for layout in ("awq", "gptq", "compressed-tensors")),
    ("gptq", {"bits": 8, "symmetric": True}),
    ("gptq_v2", {"bits": 8}),
    ("compressed-tensors", {"bits": 8, "group": -1, "symmetric": True, "dtype": torch.bfloat16}),
    ("compressed-tensors", {"dtype": torch.bfloat16}),
    ("auto_round", {"dtype": torch.bfloat16}),
]
IDS = [f"{layout}-{'-'.join(map(str, asked.values()))}" for layout, asked in CASES]


@pytest.mark.parametrize(("layout", "asked"), CASES, ids=IDS)
def test_every_matrix_is_the_exact_product_of_its_numbers(
    tiny_teacher: Path, tmp_path: Path, layout: str, asked: dict
) -> None:
    numbers = save_packed(tiny_teacher, tmp_path / "packed", layout, **asked)
    opened = Checkpoint.open(tmp_path / "packed")
    assert set(opened.packed) == {f"{module}.weight" for module in numbers} and len(numbers) == 14
    for module, found in numbers.items():
        assert torch.equal(opened.tensor(f"{module}.weight").double(), found.exact), module
    sides = [numbers[f"model.layers.0.self_attn.{side}_proj"].exact for side in "qkv"]
    assert torch.equal(opened.weight("layers.0.qkv.weight").double(), torch.cat(sides))
    kind = str(asked.get("dtype", torch.float16)).removeprefix("torch.")
    assert opened.config.dtype == kind and not opened.config.quantised and opened.weight("norm.weight").dim() == 1


def test_experts_are_packed_one_by_one(save_llama: Callable, tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    save_llama(tmp_path / "plain", family="Qwen3Moe", **sizes)
    numbers = save_packed(tmp_path / "plain", tmp_path / "packed", "gptq")
    opened = Checkpoint.open(tmp_path / "packed")
    halves = [numbers[f"model.layers.1.mlp.experts.3.{side}_proj"].exact for side in ("gate", "up")]
    assert torch.equal(opened.weight("layers.1.experts.gate_up")[3].double(), torch.cat(halves))
    assert "model.layers.0.mlp.gate.weight" not in opened.packed


def changed(folder: Path, **said: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= said
    (folder / "config.json").write_text(json.dumps(config))


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_symmetric_gptq_is_read_by_its_zeros_whatever_it_calls_itself(tiny_teacher: Path, tmp_path: Path) -> None:
    for layout, claimed in (("gptq", "gptq_v2"), ("gptq_v2", "gptq")):
        numbers = save_packed(tiny_teacher, tmp_path / layout, layout, symmetric=True)
        for other in ({}, {".*v_proj": {"sym": False}}):
            changed(tmp_path / layout, checkpoint_format=claimed, dynamic=other)
            opened = Checkpoint.open(tmp_path / layout)
            assert torch.equal(opened.tensor(f"{DOWN}.weight").double(), numbers[DOWN].exact)


def test_descriptions_in_files_of_their_own(tiny_teacher: Path, tmp_path: Path) -> None:
    for layout, file, said in (
        ("gptq", "quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False, "sym": False}),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}),
    ):
        folder = tmp_path / layout
        numbers = save_packed(tiny_teacher, folder, layout)
        before = Checkpoint.open(folder).digest()
        config = json.loads((folder / "config.json").read_text())
        del config["quantization_config"]
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=r"has dtype I32, but config\.json describes no quantisation"):
            Checkpoint.open(folder)
        (folder / file).write_text(json.dumps(said))
        opened = Checkpoint.open(folder)
        assert torch.equal(opened.tensor(f"{DOWN}.weight").double(), numbers[DOWN].exact) and opened.digest() != before


def test_matrices_that_differ_from_the_rest(tiny_teacher: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    numbers = save_packed(tiny_teacher, folder, "gptq_v2")
    save_packed(tiny_teacher, tmp_path / "wide", "gptq_v2", bits=8, group=-1)
    other = load_file(tmp_path / "wide/model.safetensors")

    def swap(tensors: dict[str, Tensor]) -> None:
        tensors.update({name: value for name, value in other.items() if "v_proj" in name})
        plain = load_file(tiny_teacher / "model.safetensors")[f"{DOWN}.weight"]
        for name in [name for name in tensors if name.startswith(DOWN)]:
            del tensors[name]
        tensors[f"{DOWN}.weight"] = plain.half()

    rewritten(folder, swap)
    changed(folder, dynamic={".*v_proj": {"bits": 8, "group_size": -1}, "-:.*1.*down_proj": {}})
    opened = Checkpoint.open(folder)
    name = "model.layers.0.self_attn.{}_proj.weight"
    assert (opened.packed[name.format("v")].bits, opened.packed[name.format("v")].groups) == (8, 1)
    assert torch.equal(opened.tensor(name.format("q")).double(), numbers[name.format("q")[:-7]].exact)
    assert f"{DOWN}.weight" not in opened.packed and opened.tensor(f"{DOWN}.weight").dtype == torch.float16


def test_matrices_of_auto_rounds_awq_may_have_groups_of_their_own(tiny_teacher: Path, tmp_path: Path) -> None:
    folder, layout, module = tmp_path / "mixed", "auto_round:auto_awq", "model.layers.0.self_attn.v_proj"
    numbers = save_packed(tiny_teacher, folder, layout)
    other = save_packed(tiny_teacher, tmp_path / "wide", layout, group=-1)
    wide = load_file(tmp_path / "wide/model.safetensors")
    rewritten(folder, lambda tensors: tensors.update({n: value for n, value in wide.items() if module in n}))
    changed(folder, extra_config={module: {"group_size": -1}, "lm_head": {"bits": 16, "data_type": "float"}})
    opened = Checkpoint.open(folder)
    for name, of in ((module, other), (DOWN, numbers)):
        assert torch.equal(opened.tensor(f"{name}.weight").double(), of[name].exact)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_description_alone_tells_whether_a_packed_layer_has_zeros(
    tiny_teacher: Path, tmp_path: Path, layout: str, symmetric: bool
) -> None:
    save_packed(tiny_teacher, tmp_path / "packed", layout, symmetric=symmetric)
    forms = [
        in_precision(of(tmp_path / "packed"), "nbits").config.packed for of in (Checkpoint.open, Checkpoint.describe)
    ]
    assert forms[0] == forms[1] and len(forms[0]) == 9


# As these are published, with the fields that say nothing of the numbers.
PUBLISHED = {
    "qwen2.5-gptq-int4": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "dataset": None}
        | {"damp_percent": 0.01, "exllama_config": {"version": 1}, "modules_in_block_to_quantize": None},
        ("GPTQ v1", (4,), (128,), (True,)),
    ),
    "gptqmodel": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False, "lm_head": False}
        | {"checkpoint_format": "gptq_v2", "pack_dtype": "int32", "dynamic": {r"+:.*\.18\..*": {"bits": 8}}},
        ("GPTQ v2", (4, 8), (32,), (False,)),
    ),
    "qwen3-awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
        | {"backend": "autoawq", "modules_to_not_convert": None},
        ("AWQ gemm", (4,), (128,), (False, True)),
    ),
    # As transformers 5 writes it again, and as gptqmodel does: a backend is a kernel.
    "transformers-awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
        | {"backend": "auto", "format": "gemm", "desc_act": False, "sym": True},
        ("AWQ gemm", (4,), (128,), (False, True)),
    ),
    "gptqmodel-awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "checkpoint_format": "gemm", "format": "gemm"},
        ("AWQ gemm", (4,), (128,), (False, True)),
    ),
    "auto-round-awq": (
        {"quant_method": "auto-round", "backend": "auto_round:auto_awq", "bits": 4, "group_size": 128},
        ("AWQ gemm", (4,), (128,), (False, True)),
    ),
    "auto-round": (
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 128}
        | {"sym": True, "data_type": "int", "iters": 0, "autoround_version": "0.14.2"}
        | {"extra_config": {"lm_head": {"bits": 16, "data_type": "float"}, "a": {"bits": 8, "group_size": None}}},
        ("AutoRound (auto_round:auto_gptq)", (4, 8), (128,), (True,)),
    ),
    "llm-compressor-w4a16": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
        | {"kv_cache_scheme": None, "quantization_status": "compressed", "global_compression_ratio": 1.9}
        | {
            "config_groups": {
                "group_0": {"input_activations": None, "output_activations": None, "targets": ["Linear"]}
                | {
                    "weights": {"num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": True, "type": "int"}
                    | {"actorder": "weight", "block_structure": None, "dynamic": False, "observer_kwargs": {}}
                }
            }
        },
        ("compressed-tensors pack-quantized", (4,), (128,), (True,)),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_descriptions_as_they_are_published(name: str, key: str, tmp_path: Path) -> None:
    said, want = PUBLISHED[name]
    packing = packing_of(Fields(tmp_path / "config.json", {key: said}))
    assert packing is not None and (packing.title, packing.bits, packing.groups, packing.symmetric) == want


def test_a_description_of_sparsity_alone_is_none(tmp_path: Path) -> None:
    said = {"compression_config": {"sparsity_config": {"format": "dense", "global_sparsity": 0.1}}}
    assert packing_of(Fields(tmp_path / "config.json", said)) is None


REFUSED = [
    ({"quant_method": "bitsandbytes"}, "is of 'bitsandbytes', a codebook of 16 numbers.*; expected AWQ gemm, GPTQ"),
    ({"quant_method": "torchao"}, "is of 'torchao', subclasses of tensors"),
    ({"quant_method": "mxfp4"}, "is of 'mxfp4', floating point of 4 bits"),
    ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized', floating"),
    ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "is of 'marlin-24', the order of one GPU kernel"),
    ({"checkpoint_format": "marlin"}, "is of 'marlin', the order of one GPU kernel"),
    ({"is_marlin_format": True}, "is of 'marlin'"),
    ({"checkpoint_format": "bitblas"}, "is of 'bitblas'"),
    ({"pack_dtype": "int16"}, "pack_dtype is 'int16'; expected 'int32'; take"),
    ({"bits": 3}, "bits is 3; expected 4 or 8"),
    ({"group_size": 0}, "group_size is 0; expected inputs of a group, or -1"),
    ({"group_size": 48}, "64 inputs do not divide into words and groups"),
    ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv'; expected 'gemm'"),
    ({"quant_method": "awq", "checkpoint_format": "gemv_fast"}, "checkpoint_format is 'gemv_fast'; expected 'gemm'"),
    ({"quant_method": "awq", "version": "gemm", "backend": "llm-awq"}, "backend is 'llm-awq'; expected 'gemm'"),
    ({"quant_method": "auto-round", "packing_format": "auto_round:marlin"}, "is of 'marlin'"),
    ({"quant_method": "auto-round", "packing_format": "fake"}, "packing_format is 'fake'; expected 'auto_round:auto_g"),
    ({"quant_method": "auto-round", "act_bits": 8}, "act_bits is 8; expected weights in int"),
    ({"quant_method": "auto-round", "extra_config": {"a": {"act_bits": 8}}}, "act_bits is 8; expected weights in int"),
    ({"quant_method": "auto-round", "extra_config": {"a": {"data_type": "mx_fp"}}}, "data_type is 'mx_fp'; expected"),
    ({"rotation": "hadamard"}, "rotation is 'hadamard'; expected null, since rows are rotated"),
    ({"quant_method": "auto-round", "rotation_config": {"block_size": 32}}, "rotation_config is .*; expected null"),
    ({"sym": "yes"}, "sym is 'yes'; expected true or false"),
    ({"dynamic": [3]}, "dynamic is \\[3\\]; expected an object"),
]


@pytest.mark.parametrize(("said", "message"), REFUSED, ids=[str(sorted(said.items())) for said, _ in REFUSED])
def test_what_has_no_form_here_is_refused_by_its_name(
    tiny_teacher: Path, tmp_path: Path, said: dict, message: str
) -> None:
    save_packed(tiny_teacher, tmp_path / "packed", "gptq")
    changed(tmp_path / "packed", **said)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(tmp_path / "packed")
    assert "\n" not in str(caught.value)


def full(name: str, value: float) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors[f"{DOWN}.{name}"].fill_(value)


def moved(tensors: dict[str, Tensor]) -> None:
    tensors[f"{DOWN}.g_idx"] = tensors[f"{DOWN}.g_idx"].flip(0).contiguous()


def as_other(name: str, dtype: torch.dtype) -> Callable[[dict[str, Tensor]], object]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{DOWN}.{name}"] = tensors[f"{DOWN}.{name}"].to(dtype)

    return change


WRONG = [
    ("gptq", {}, full("qzeros", -1), "qzeros: holds 15 in GPTQ v1, which stores zeros less one"),
    ("gptq", {"symmetric": True}, full("qzeros", 0x66666666), "qzeros: holds 6 to 6; expected 7 .v1. or 8 .v2. every"),
    ("gptq", {}, moved, "g_idx: groups inputs out of their order; expected 32 consecutive ones"),
    ("gptq", {}, lambda t: t.update({f"{DOWN}.bias": torch.ones(64)}), "bias: is not all zeros"),
    ("awq", {}, lambda t: t.update({f"{DOWN}.bias": torch.ones(64)}), "bias: is not all zeros"),
    ("awq", {}, as_other("qweight", torch.int64), "qweight has dtype I64; expected I32 of AWQ gemm"),
    ("awq", {}, lambda t: t.pop(f"{DOWN}.qzeros"), "1 tensors missing, first .*qzeros"),
    ("awq", {}, lambda t: t.update({f"{DOWN}.weight": torch.ones(64, 96).half()}), "config.json does not explain"),
    ("awq", {"group": -1}, as_other("scales", torch.int8), "scales has dtype I8; expected F32 or BF16 or F16"),
    (
        "compressed-tensors",
        {"dtype": torch.bfloat16},
        full("weight_scale", 3e38),
        r"down_proj: a scale of .*e\+38; expected",
    ),
    ("compressed-tensors", {}, full("weight_shape", 9), "weight_shape: holds .9, 9.; expected .64, 96."),
    ("compressed-tensors", {}, lambda t: t.pop(f"{DOWN}.weight_zero_point"), "contradicts .*, which says asymmetric"),
]


@pytest.mark.parametrize(("layout", "asked", "change", "message"), WRONG, ids=[case[3] for case in WRONG])
def test_numbers_that_are_unclear_are_refused(
    tiny_teacher: Path, tmp_path: Path, layout: str, asked: dict, change: Callable, message: str
) -> None:
    folder = tmp_path / "packed"
    save_packed(tiny_teacher, folder, layout, **asked)
    rewritten(folder, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        [opened.weight(name) for opened in (Checkpoint.open(folder),) for name in opened.names()]
    assert "\n" not in str(caught.value)


def test_zeros_that_a_family_does_not_have_are_left_out(tiny_teacher: Path, tmp_path: Path) -> None:
    numbers: dict[str, Numbers] = save_packed(tiny_teacher, tmp_path / "packed", "gptq")
    rewritten(tmp_path / "packed", lambda t: t.update({f"{DOWN}.bias": torch.zeros(64).half()}))
    opened = Checkpoint.open(tmp_path / "packed")
    assert torch.equal(opened.tensor(f"{DOWN}.weight").double(), numbers[DOWN].exact)
