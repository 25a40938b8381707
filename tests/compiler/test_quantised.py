"""A quantised checkpoint becomes a bundle whose speculative text is the plain text of that quantised teacher."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.checkpoints.scheme import quantised_modules
from draftwood.compiler.drafters.registry import open_drafter
from draftwood.compiler.targets.storage import FP32, PRECISIONS
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.errors import CheckpointError, RequestError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding
from draftwood.runtime.engines.bitwise import BitwiseEngine
from draftwood.runtime.engines.choice import default_engine, open_engine
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.engines.opening import Opening
from draftwood.runtime.engines.openvino import OpenVinoEngine
from draftwood.runtime.options import Options
from draftwood.runtime.policy import FixedTree
from draftwood.runtime.rounding import QUANTISED_TOLERANCE
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.tools.comparison import single
from draftwood.tools.comparison.check import check
from draftwood.tools.comparison.compare import Pair, compare_gear
from draftwood.tools.reference.eager import EagerEngine
from draftwood.trees import Topology, tensorize

PLAIN, CHAIN = ("plain", Topology.plain()), ("chain", Topology.chain(2))
RAGGED = ("ragged", Topology.from_paths(((0,), (1,), (0, 0), (0, 1), (1, 0))))
GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.8, seed=3)


def bundled(teacher: Path, drafter: Path | None, folder: Path) -> Bundle:
    trees = (PLAIN, CHAIN, RAGGED) if drafter else (PLAIN,)
    build(BuildRequest(model=teacher, drafter=drafter, trees=trees, slots=(128,), prefill_rows=(8,)), folder)
    return Bundle.open(folder)


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("eagle3", "fasteagle")]


@pytest.fixture(scope="module", params=["medusa", *SLOW])
def drafted(
    request: pytest.FixtureRequest,
    quantised_teacher: Path,
    tiny_heads: Path,
    tiny_drafters: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Bundle:
    drafter = {"medusa": tiny_heads, **tiny_drafters}[request.param]
    return bundled(quantised_teacher, drafter, tmp_path_factory.mktemp(request.param) / "bundle")


def text(engine: Engine, gear: str | None, sampling: Sampling, tokens: int = 40) -> tuple[int, ...]:
    options = Options(max_new_tokens=tokens, ignore_eos=True, sampling=sampling)
    policy = FixedTree(engine.bundle, gear)
    return Decoding(engine, [3, 5, 7], options, policy).run().token_ids


def test_trees_that_branch_are_decoded_bit_by_bit_unless_asked_otherwise(drafted: Bundle) -> None:
    engine = open_engine(drafted)
    assert default_engine(drafted) == "bitwise" and isinstance(engine, BitwiseEngine)
    for sampling in (GREEDY, SAMPLED):
        assert text(engine, "ragged-kv128", sampling, 60) == text(engine, None, sampling, 60)


def test_chains_need_no_such_step(quantised_teacher: Path, tiny_heads: Path, tmp_path: Path) -> None:
    asked = BuildRequest(model=quantised_teacher, drafter=tiny_heads, trees=(PLAIN, CHAIN), slots=(128,))
    build(asked, tmp_path / "bundle")
    bundle = Bundle.open(tmp_path / "bundle")
    assert default_engine(bundle) == "cpu" and "bitwise" not in {g.name for g in bundle.manifest.graphs_of("onnx")}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_speculative_text_is_plain_text(drafted: Bundle, sampling: Sampling) -> None:
    engine = CpuEngine(drafted)
    plain = text(engine, None, sampling)
    assert text(engine, "chain-kv128", sampling) == plain and text(engine, "ragged-kv128", sampling) == plain


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_speculative_text_through_openvino_is_its_plain_text(drafted: Bundle, sampling: Sampling) -> None:
    pytest.importorskip("openvino")
    engine = OpenVinoEngine(drafted, Opening(threads=1))
    plain = text(engine, "plain-kv128", sampling)
    assert text(engine, "chain-kv128", sampling) == plain and len(plain) == 40
    pair = Pair("openvino", EagerEngine(drafted), engine, QUANTISED_TOLERANCE)
    found = [one for gear in drafted.manifest.gears for one in compare_gear(pair, gear, np.arange(3, 30))]
    assert [one for one in found if not one.ok] == [] and {one.quantity for one in found} >= {"logits", "features"}


def test_check_holds_and_catches_every_fault(drafted: Bundle) -> None:
    report = check(drafted, [np.arange(3, 30)])
    assert all(c["ok"] for c in report["comparisons"]), [c for c in report["comparisons"] if not c["ok"]]
    # A wrong token, or a cascade's wrong state, moves the scores of a random drafter by less than the rounding of its
    # teacher's states may.
    assert drafted.manifest.drafter is not None
    allowed = {"token before the root in its place"}
    allowed |= {"teacher's states misplaced"} if drafted.manifest.drafter.kind == "fasteagle" else set()
    assert {c["fault"] for c in report["controls"] if not c["caught"]} <= allowed


def test_rows_of_a_chain_have_the_bits_of_plain_decoding(drafted: Bundle) -> None:
    engine, tokens = CpuEngine(drafted), np.arange(40, 46)
    one, other = engine.begin(128), engine.begin(128)
    for state in (one, other):
        engine.prefill(state, np.arange(3, 30))
    chain = single.verify(engine, other, tokens, tensorize(Topology.chain(5))).logits_RV.copy()
    for row, token in enumerate(tokens):
        alone = single.verify(engine, one, token[None], tensorize(Topology.plain()))
        one.commit([0])
        assert np.array_equal(alone.logits_RV[0], chain[row]), row


def test_a_bundle_holds_the_published_whole_numbers_and_no_other_copy(drafted: Bundle, quantised_teacher: Path) -> None:
    published = load_file(quantised_teacher / "model.safetensors")
    stored = load_file(drafted.folder / "onnx/weights.safetensors")
    sides = [published[f"model.layers.1.self_attn.{side}_proj.weight"] for side in "qkv"]
    scales = [published[f"model.layers.1.self_attn.{side}_proj.weight_scale"] for side in "qkv"]
    assert torch.equal(stored["layers.1.qkv.weight"], torch.cat(sides).t())
    assert torch.equal(stored["layers.1.qkv.weight_scale"], torch.cat(scales).flatten())
    layers = {name: value for name, value in stored.items() if name.startswith("layers.") and value.dim() == 2}
    assert {value.dtype for value in (*layers.values(), stored["lm_head.weight"])} == {torch.int8} and len(layers) == 8
    assert drafted.manifest.quantised and drafted.manifest.graph_sets[0].precision.name == "w8a8-fp32"
    graph = onnx.load(drafted.folder / "onnx/step.onnx", load_external_data=False).graph
    products = [node for node in graph.node if node.op_type == "MatMulIntegerToFloat"]
    # Each layer's four products and the head's read their own rows, rounded once.
    assert len(products) == 9 == sum(node.op_type == "QuantizeLinear" for node in graph.node)


def test_a_head_that_is_left_alone_is_left_alone(
    tiny_teacher: Path, save_quantised: Callable[..., Path], tmp_path: Path
) -> None:
    found = Checkpoint.open(save_quantised(tiny_teacher, tmp_path / "teacher", head=False))
    assert found.weight("lm_head.weight").dtype == torch.float32 and "lm_head" not in found.config.quantised
    assert found.config.quantised == tuple(f"layers.{i}.{n}" for i in (0, 1) for n in ("qkv", "o", "gate_up", "down"))


def in_msmodelslims_form(quantised: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Copies a folder of compressed-tensors, described as msModelSlim does, and returns the tensors of its files."""
    shutil.copytree(quantised, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    kinds = {name: "W8A8_DYNAMIC" if f"{name}_scale" in tensors else "FLOAT" for name in tensors}
    for name in [name for name in tensors if name.endswith("_scale")]:
        offset = name.replace("_scale", "_offset")
        tensors[offset], kinds[name], kinds[offset] = torch.zeros_like(tensors[name]), "W8A8_DYNAMIC", "W8A8_DYNAMIC"
    (folder / "quant_model_description.json").write_text(json.dumps({"model_quant_type": "W8A8_DYNAMIC", **kinds}))
    (folder / "model.safetensors").unlink()
    return tensors


def test_msmodelslim_is_read_as_it_is_published(quantised_teacher: Path, tmp_path: Path) -> None:
    tensors = in_msmodelslims_form(quantised_teacher, folder := tmp_path / "teacher")
    save_file(tensors, file := folder / "quant_model_weights.safetensors")
    one, other = Checkpoint.open(quantised_teacher), Checkpoint.open(folder)
    assert one.config == other.config and one.digest() != other.digest()
    assert all(torch.equal(one.weight(name), other.weight(name)) for name in one.names())
    offset = next(name for name in reversed(tensors) if name.endswith("_offset"))
    save_file(tensors | {offset: torch.ones_like(tensors[offset])}, file)
    with pytest.raises(CheckpointError, match="weight_offset is not all zeros; expected symmetric weights"):
        [Checkpoint.open(folder).weight(name) for name in other.names()]


def test_msmodelslims_shards_have_an_index_of_their_own_name_and_biases_in_fp32(
    save_llama: Callable, save_quantised: Callable[..., Path], tmp_path: Path
) -> None:
    save_llama(tmp_path / "plain", torch.bfloat16, family="Qwen2")
    quantised = save_quantised(tmp_path / "plain", tmp_path / "quantised")
    tensors = in_msmodelslims_form(quantised, folder := tmp_path / "teacher")
    tensors |= {name: value.float() for name, value in tensors.items() if name.endswith("proj.bias")}
    stem, names = "quant_model_weight_w8a8_dynamic", list(tensors)
    placed = {name: f"{stem}-0000{1 + at % 2}-of-00002.safetensors" for at, name in enumerate(names)}
    for file in set(placed.values()):
        save_file({name: tensors[name] for name in names if placed[name] == file}, folder / file)
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    one, other = Checkpoint.open(quantised), Checkpoint.open(folder)
    assert one.config == other.config and one.dtype == torch.bfloat16
    assert all(torch.equal(one.weight(name), other.weight(name).to(one.weight(name))) for name in one.names())
    (folder / "quant_model_weights.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=rf"has {stem}.* and quant_model_weights.*; expected one file"):
        Checkpoint.open(folder)


def test_a_drafter_for_a_teacher_with_rotated_states_is_warned_of(
    quantised_teacher: Path, tiny_heads: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """EAGLE-3 of the original had 0 % of its first tokens accepted next to msModelSlim's QuaRot (vllm-ascend 5974)."""
    tensors = in_msmodelslims_form(quantised_teacher, folder := tmp_path / "teacher")
    save_file(tensors, folder / "quant_model_weights.safetensors")
    open_drafter(tiny_heads, Checkpoint.open(folder))
    assert not recwarn
    path = folder / "quant_model_description.json"
    rotation = {"rotation_map": {"global_rotation": "optional/quarot.safetensors"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"optional": {"quarot": rotation}}))
    with pytest.warns(UserWarning, match=r"states are rotated \(QuaRot\); .* train one for this folder"):
        open_drafter(tiny_heads, Checkpoint.open(folder))


def test_a_description_as_llm_compressor_first_wrote_it_is_read(quantised_teacher: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(quantised_teacher, tmp_path / "teacher")
    config = json.loads((folder / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config") | {"quantization_status": "frozen"}
    (folder / "config.json").write_text(json.dumps(config))
    assert Checkpoint.open(folder).config == Checkpoint.open(quantised_teacher).config
    (folder / "quant_model_description.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"describes a quantisation, so does quant_model_description\.json"):
        Checkpoint.open(folder)


def test_eight_bits_that_nothing_describes_are_refused_as_such(quantised_teacher: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(quantised_teacher, tmp_path / "teacher")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"weight has dtype I8, but config\.json describes no quantisation"):
        Checkpoint.open(folder)
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: the quantisation is of 'modelopt'"):
        Checkpoint.open(folder)


GROUP = ("quantization_config", "config_groups", "group_0")
REFUSED = [
    (("quantization_config", "quant_method"), "gptq", "is of 'int-quantized'; expected AWQ gemm, GPTQ"),
    (("quantization_config", "quant_method"), "awq", "format is .int-quantized.; expected .gemm. of autoawq"),
    (("quantization_config", "quant_method"), "fp8", "is of 'fp8'"),
    (("quantization_config", "format"), "pack-quantized", "input_activations is .*; expected null with 'pack-quant"),
    (("quantization_config", "format"), "float-quantized", "is of 'float-quantized'"),
    (("quantization_config", "kv_cache_scheme"), {"num_bits": 8}, "kv_cache_scheme is .*; expected null; take"),
    (("quantization_config", "transform_config"), {"config_groups": {}}, "transform_config"),
    (
        ("quantization_config", "quantization_status"),
        "calibration",
        "quantization_status is 'calibration'; expected 'c",
    ),
    (("quantization_config", "config_groups"), {}, "config_groups is .*; expected at least one group"),
    (("quantization_config", "ignore"), ["re:("], "ignore holds no regular expression"),
    *(
        (("quantization_config", "ignore"), [f"re:{pattern}"], "regular expressions that repeat no group")
        for pattern in ("(.+)+Z", "(?x)(.+) +Z", ".?" * 40 + "Z", ".*" * 7 + "Z", "(.|.)" * 40 + "Z", "(a|b){1,9}{1,9}")
    ),
    (
        ("quantization_config", "ignore"),
        ["re:.*q_proj"],
        "q_proj is not quantised and .*k_proj is; expected both alike",
    ),
    (("quantization_config", "ignore"), ["re:.*"], "names none of the teacher's linear layers"),
    ((*GROUP, "weights", "num_bits"), 4, "weights.num_bits is 4; expected 8"),
    ((*GROUP, "weights", "strategy"), "tensor", "weights.strategy is 'tensor'; expected 'channel'"),
    ((*GROUP, "weights", "type"), "float", "weights.type is 'float'"),
    ((*GROUP, "input_activations", "dynamic"), False, "input_activations.dynamic is False; expected True"),
    ((*GROUP, "input_activations", "strategy"), "tensor", "input_activations.strategy is 'tensor'; expected 'token'"),
    ((*GROUP, "input_activations"), None, "input_activations.num_bits is None; expected 8"),
]


@pytest.mark.parametrize(("at", "value", "said"), REFUSED, ids=[f"{at[-1]}-{value}" for at, value, _ in REFUSED])
def test_another_scheme_is_refused_by_its_name(
    quantised_teacher: Path, tmp_path: Path, at: tuple[str, ...], value: object, said: str
) -> None:
    config = json.loads((quantised_teacher / "config.json").read_text())
    inner = config
    for name in at[:-1]:
        inner = inner[name]
    inner[at[-1]] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=said) as caught:
        Checkpoint.describe(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["W8A8", "W4A8_DYNAMIC", "W8A16"])
def test_another_kind_of_msmodelslim_is_refused(tiny_teacher: Path, tmp_path: Path, kind: str) -> None:
    shutil.copy(tiny_teacher / "config.json", tmp_path)
    said = {"model.layers.0.mlp.down_proj.weight": kind}
    (tmp_path / "quant_model_description.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match=f"down_proj.weight is '{kind}'; expected W8A8_DYNAMIC or FLOAT"):
        Checkpoint.describe(tmp_path)


def test_weights_of_another_type_than_described_are_refused(quantised_teacher: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(quantised_teacher, tmp_path / "teacher")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    save_file(tensors | {name: tensors[name].float()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name} has dtype F32; expected I8"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("quantised", [True, False])
def test_precision_and_teacher_have_to_agree(
    quantised_teacher: Path, tiny_teacher: Path, tmp_path: Path, quantised: bool
) -> None:
    model, precision = (quantised_teacher, FP32) if quantised else (tiny_teacher, PRECISIONS["w8a8-fp32"])
    asked = BuildRequest(model=model, drafter=None, trees=(PLAIN,), slots=(128,), precisions={"onnx": precision})
    with pytest.raises(RequestError, match=f"the teacher is {'' if quantised else 'not '}quantised"):
        build(asked, tmp_path / "out")


@pytest.mark.parametrize(
    "pattern",
    [r".*lm_head", r"^(?:model\.)?layers\.[0-9]+\..*", r".*layers.*(q|k|v|o|gate|up|down)_proj$", "(?!.*mlp).*"],
)
def test_patterns_that_people_write_are_taken(quantised_teacher: Path, tmp_path: Path, pattern: str) -> None:
    config = json.loads((quantised_teacher / "config.json").read_text())
    config["quantization_config"]["ignore"] = [f"re:{pattern}"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    chosen = quantised_modules(Fields(tmp_path / "config.json", config))
    assert chosen is not None
    for module in ("lm_head", "layers.0.mlp.up_proj", "model.layers.3.self_attn.q_proj"):
        assert chosen(module) != bool(re.match(pattern, module))
