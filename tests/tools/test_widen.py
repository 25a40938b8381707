"""Widened teachers and drafters compute what the small ones compute."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.bundle.sources import Sources
from draftwood.compiler.drafters.medusa.checkpoint import MedusaCheckpoint
from draftwood.compiler.drafters.model import ANY_LENGTH
from draftwood.compiler.drafters.registry import open_drafter
from draftwood.compiler.steps.step import StepSizes
from draftwood.compiler.targets.modules import load_modules
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.errors import RequestError
from draftwood.tools import demo
from draftwood.tools.demo.widen import widen, widen_drafter
from draftwood.trees import Topology

SIZES = {"hidden": 32, "intermediate": 48, "layers": 2, "heads": 4, "kv_heads": 2}
# Sums run in another order and gains are rounded once; logits are of order 1.
TOLERANCE = 1e-5

SHAPES = [
    pytest.param({"hidden": 128}, id="hidden by 4"),
    pytest.param({"hidden": 56}, id="hidden by 1.75"),
    pytest.param({"intermediate": 100}, id="intermediate"),
    pytest.param({"layers": 5}, id="layers"),
    pytest.param({"heads": 8}, id="larger groups"),
    pytest.param({"heads": 8, "kv_heads": 4}, id="more key heads"),
    pytest.param({"heads": 16, "kv_heads": 4, "hidden": 96, "intermediate": 64, "layers": 3}, id="all"),
]


def save_teacher(
    folder: Path, configs: type = LlamaConfig, models: type = LlamaForCausalLM, **fields: object
) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = configs(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, **fields,
    )  # fmt: skip
    model = models(config).eval()
    for name, parameter in model.named_parameters():
        # Large enough for every part to matter; biases and gains start out as 0 and 1.
        scale = 0.3 if parameter.ndim == 1 else parameter.shape[1] ** -0.5
        parameter.data = torch.randn(parameter.shape) * scale + (1.0 if name.endswith("norm.weight") else 0.0)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def outputs(model: LlamaForCausalLM) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.arange(40)[None] % 61
    hidden = model.model(ids).last_hidden_state
    return hidden, model.lm_head(hidden)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": True, "attention_bias": True}], ids=["plain", "biased"])
def test_logits_are_kept(tmp_path: Path, shape: dict, fields: dict) -> None:
    small = save_teacher(tmp_path / "small", **fields)
    wide = widen(tmp_path / "small", tmp_path / "wide", **shape)
    model, report = LlamaForCausalLM.from_pretrained(tmp_path / "wide", output_loading_info=True)
    assert not any(report.values())
    assert Checkpoint.open(tmp_path / "wide").config == wide
    assert {name: getattr(wide, name) for name in SIZES} == SIZES | shape
    (hidden, logits), (wide_hidden, wide_logits) = outputs(small), outputs(model.eval())
    assert (logits - wide_logits).abs().max() <= TOLERANCE * logits.abs().max()
    assert (hidden - wide_hidden[..., :32]).abs().max() <= TOLERANCE * hidden.abs().max()
    assert not wide_hidden[..., 32:].any()


def test_gain_and_eps_both_matter(tmp_path: Path) -> None:
    small = save_teacher(tmp_path / "small", rms_norm_eps=0.1)
    widen(tmp_path / "small", tmp_path / "wide", hidden=96)
    config = tmp_path / "wide" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 0.1}))
    wrong = outputs(LlamaForCausalLM.from_pretrained(tmp_path / "wide"))[1]
    assert (outputs(small)[1] - wrong).abs().max() > 1e-2


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_kept_where_heads_are_normed(tmp_path: Path, shape: dict) -> None:
    """Heads are normed with the same eps, here large enough to show in the logits."""
    small = save_teacher(tmp_path / "small", Qwen3Config, Qwen3ForCausalLM, rms_norm_eps=0.1)
    wide = widen(tmp_path / "small", tmp_path / "wide", **shape)
    model, report = Qwen3ForCausalLM.from_pretrained(tmp_path / "wide", output_loading_info=True)
    assert not any(report.values())
    assert wide.qk_norm and Checkpoint.open(tmp_path / "wide").config == wide
    logits, wide_logits = outputs(small)[1], outputs(model.eval())[1]
    assert (logits - wide_logits).abs().max() <= TOLERANCE * logits.abs().max()


def test_new_rows_are_not_zero(tmp_path: Path) -> None:
    save_teacher(tmp_path / "small")
    widen(tmp_path / "small", tmp_path / "wide", heads=8, intermediate=64, layers=3)
    tensors = load_file(tmp_path / "wide" / "model.safetensors")
    assert tensors["model.layers.0.self_attn.q_proj.weight"].any(1).all()
    assert tensors["model.layers.2.mlp.gate_proj.weight"].any(1).all()
    assert not tensors["model.layers.2.mlp.down_proj.weight"].any()


def test_equal_seeds_give_equal_files(tmp_path: Path) -> None:
    save_teacher(tmp_path / "small")
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        widen(tmp_path / "small", tmp_path / name, heads=8, seed=seed)
    a, b, c = (Checkpoint.open(tmp_path / name).digest() for name in "abc")
    assert a == b != c


def test_dtype_and_other_files(tmp_path: Path) -> None:
    save_teacher(tmp_path / "small")
    (tmp_path / "small" / "tokenizer.json").write_text("{}")
    widen(tmp_path / "small", tmp_path / "wide", hidden=64, dtype="bfloat16")
    assert Checkpoint.open(tmp_path / "wide").dtype == torch.bfloat16
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "wide" / "tokenizer.json").is_file()
    assert (tmp_path / "wide" / "generation_config.json").is_file()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"hidden": 16}, "hidden is 16; expected at least the source's 32"),
        ({"heads": 6, "kv_heads": 4}, "heads is 6 for 4 kv_heads"),
        ({"kv_heads": 4}, "heads is 4 for 4 kv_heads; expected a multiple, at least 2"),
        ({"hidden": 36, "heads": 8}, "hidden is 36; expected a multiple of heads"),
    ],
)
def test_sizes_refused(tmp_path: Path, shape: dict, message: str) -> None:
    save_teacher(tmp_path / "small")
    with pytest.raises(RequestError, match=message):
        widen(tmp_path / "small", tmp_path / "wide", **shape)
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_target_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_teacher(tmp_path / "small")
    with pytest.raises(RequestError, match="exists already; expected a new folder"):
        widen(tmp_path / "small", tmp_path / "small", hidden=64)

    def full_disk(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("draftwood.tools.demo.widen.save_file", full_disk)
    with pytest.raises(RequestError, match="no space left"):
        widen(tmp_path / "small", tmp_path / "wide", hidden=64)
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def save_heads(folder: Path, tied: bool, heads: int = 3, blocks: int = 2) -> None:
    tensors = {}
    for i in range(heads):
        for j in range(blocks):
            tensors |= {
                f"{i}.{j}.linear.weight": torch.randn(32, 32),
                f"{i}.{j}.linear.bias": torch.randn(32),
            }
        tensors |= {} if tied else {f"{i}.{blocks}.weight": torch.randn(61, 32)}
    folder.mkdir()
    save_file(tensors, folder / "medusa_lm_head.safetensors")


def head_outputs(heads: MedusaCheckpoint, hidden: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    logits = []
    for i in range(heads.config.heads):
        x = hidden
        for j in range(heads.config.blocks):
            at = f"heads.{i}.blocks.{j}"
            x = x + F.silu(F.linear(x, heads.weight(f"{at}.weight"), heads.weight(f"{at}.bias")))
        logits.append(F.linear(x, output if heads.config.tied else heads.weight(f"heads.{i}.out.weight")))
    return torch.stack(logits)


@pytest.mark.parametrize("tied", [False, True], ids=["own output", "tied"])
@pytest.mark.parametrize("hidden", [128, 56])
def test_medusa_logits_are_kept(tmp_path: Path, tied: bool, hidden: int) -> None:
    small = save_teacher(tmp_path / "small")
    save_heads(tmp_path / "heads", tied)
    before = Checkpoint.open(tmp_path / "small").config
    wide = widen(tmp_path / "small", tmp_path / "wide", hidden=hidden)
    widen_drafter(tmp_path / "heads", tmp_path / "wide_heads", tmp_path / "small", wide)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "wide").eval()
    opened = MedusaCheckpoint.open(tmp_path / "heads", before)
    widened = MedusaCheckpoint.open(tmp_path / "wide_heads", wide)
    assert widened.config == opened.config and opened.config.tied == tied
    expected = head_outputs(opened, outputs(small)[0], small.lm_head.weight)
    got = head_outputs(widened, outputs(model)[0], model.lm_head.weight)
    assert (expected - got).abs().max() <= TOLERANCE * expected.abs().max()


DRAFT_KINDS = ["eagle3", "fasteagle"]
WIDE = {"hidden": 96, "intermediate": 128, "layers": 5, "heads": 12, "kv_heads": 4}
# The pairs that are shipped, so that ranks and probabilities are those of trained drafters; FastEagle's layers are
# narrower than the teacher's, and stay so.
DEMO_WIDE = {"hidden": 512, "intermediate": 1408, "layers": 9, "heads": 8, "kv_heads": 4}
CONTEXT = torch.arange(7, 2007, 97)
BACKBONE = Topology.backbone(3, 4)
BIASES = {"q": 256, "k": 128, "v": 128, "o": 256}


@torch.no_grad()
def draft(teacher: Path, drafter: Path, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What eager PyTorch drafts behind a context, in fp32: tokens and log-probabilities, levels or tree rows."""
    trees = (("plain", Topology.plain()), ("tree", BACKBONE))
    sources = Sources.open(BuildRequest(model=teacher, drafter=drafter, trees=trees, slots=(128,)))
    weights = {entry.name: entry.read() for entry in sources.weights(128)}
    floats = {name: w.float() if w.is_floating_point() else w for name, w in weights.items()}
    config, drafter_kind = sources.teacher.config, sources.draft_model
    decoder, module = load_modules(floats, config, drafter_kind)
    rows, text = len(context), torch.arange(len(context))
    caches = [torch.zeros(config.kv_heads * 128, config.head_dim) for _ in range(2 * config.layers)]
    branch = torch.zeros(config.layers, 2, 1, config.kv_heads, config.head_dim)
    zero = torch.zeros(1, dtype=torch.int64)
    visible = text[None] <= text[:, None]
    step = decoder.step(context, text, visible, zero, zero, zero, branch, caches, form="eager")
    block = module.config.block
    own = [torch.zeros(1, block.kv_heads, 128, block.head_dim) for _ in range(2 * block.layers)]
    after = torch.cat((context[1:], step.choice_R[-1:]))
    inputs = after, step.features_RF, torch.tensor([rows]), torch.tensor([rows])
    made = drafter_kind.steps((decoder, module), trees, StepSizes(branch_rows=8, path_rows=rows), ANY_LENGTH)
    silence = next(spec for spec in made[-1].signature.inputs if spec.name == "noise")
    return made[-1].module(*inputs, torch.zeros(silence.shape), *own)[:2]


def assert_drafts_are_kept(folder: Path, teacher: Path, drafter: Path, shape: dict, vocabulary: int) -> None:
    wide = widen(teacher, folder / "wide", **shape, dtype="float32")
    widen_drafter(drafter, folder / "wide_drafter", teacher, wide, dtype="float32")
    pairs = (drafter, teacher), (folder / "wide_drafter", folder / "wide")
    small, block = (open_drafter(d, Checkpoint.open(t)).model.config.block for d, t in pairs)
    # Too small for the drafts to show it.
    assert block.rms_norm_eps == pytest.approx(small.rms_norm_eps * small.hidden / wide.hidden)
    # A block stands to the widened teacher's as it stood to the teacher's.
    given = Checkpoint.open(teacher).config
    for name in ("hidden", "intermediate", "heads", "kv_heads"):
        assert getattr(block, name) * getattr(given, name) == getattr(wide, name) * getattr(small, name), name
    for start in (3, 8, 21):
        context = CONTEXT[:start] % vocabulary
        tokens, scores = draft(teacher, drafter, context)
        wide_tokens, wide_scores = draft(folder / "wide", folder / "wide_drafter", context)
        assert torch.equal(tokens, wide_tokens)
        # fp32 sums in another order through up to 9 layers; logits are of order 10.
        assert (scores - wide_scores).abs().max() <= 1e-3


@pytest.mark.parametrize("kind", [*DRAFT_KINDS, "dspark"])
def test_demo_drafts_are_kept(tmp_path: Path, kind: str) -> None:
    assert_drafts_are_kept(tmp_path, demo.NAMES["demo"], demo.NAMES[f"demo-{kind}"], DEMO_WIDE, 8192)


@pytest.mark.parametrize("kind", DRAFT_KINDS)
def test_drafts_of_a_mapped_vocabulary_are_kept(
    tmp_path: Path, kind: str, tiny_teacher: Path, tiny_drafters: dict[str, Path]
) -> None:
    """A last state that leaves the teacher's last layer, and a draft vocabulary cut from the teacher's."""
    assert_drafts_are_kept(tmp_path, tiny_teacher, tiny_drafters[kind], WIDE, 300)


@pytest.mark.parametrize("head", ["rnn", "gated"])
def test_drafts_of_a_block_are_kept(
    tmp_path: Path, tiny_teacher: Path, save_one_pass: dict[str, Callable[[Path], None]], head: str
) -> None:
    """A DSpark, whose sequential head keeps its rank and reads a token and a level side by side, in either order."""
    drafter = tmp_path / "dspark"
    save_one_pass["dspark"](drafter)
    if head == "gated":
        config, tensors = (drafter / name for name in ("config.json", "model.safetensors"))
        config.write_text(json.dumps(json.loads(config.read_text()) | {"markov_head_type": "gated"}))
        held = {key: value for key, value in load_file(tensors).items() if "joint_proj" not in key}
        random = torch.Generator().manual_seed(6)
        held |= {"markov_head.gate_proj.weight": torch.randn(16, 80, generator=random) * 0.2}
        held |= {"markov_head.gate_proj.bias": torch.randn(16, generator=random) * 0.2}
        save_file(held, tensors)
    assert_drafts_are_kept(tmp_path, tiny_teacher, drafter, WIDE, 300)


def test_a_dspark_of_another_layout_is_not_widened(
    tmp_path: Path, tiny_teacher: Path, save_one_pass: dict[str, Callable[[Path], None]]
) -> None:
    """Its fields and keys stand elsewhere: one line, and nothing is written."""
    save_one_pass["dspark"](tmp_path / "dspark")
    config = tmp_path / "dspark" / "config.json"
    own = {"architectures": ["DSparkDraftModel"], "dflash_config": {"shift_label": True}}
    config.write_text(json.dumps(json.loads(config.read_text()) | own))
    wide = replace(Checkpoint.open(tiny_teacher).config, hidden=96, heads=12, kv_heads=4)
    with pytest.raises(RequestError, match=r"DSparkDraftModel.*DeepSpec's layout alone.*draftwood export"):
        widen_drafter(tmp_path / "dspark", tmp_path / "wide", tiny_teacher, wide)
    assert not (tmp_path / "wide").exists()


def save_variant(folder: Path, layout: str) -> Path:
    """The shipped EAGLE-3 drafter in another layout, with the norms and matrices that it leaves out."""
    source = demo.NAMES["demo-eagle3"]
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    random = torch.Generator().manual_seed(5)
    names = {"SafeAILab": {"input_norm.weight": 768}, "speculators": {f"fc_norm.{i}.weight": 256 for i in range(3)}}
    tensors |= {name: (1 + torch.randn(n, generator=random) * 0.2).bfloat16() for name, n in names[layout].items()}
    for field in ("aux_layer_ids", "eagle_config"):  # the usual ids, which depend on the number of layers
        del config[field]
    if layout == "SafeAILab":
        config |= {"architectures": ["LlamaForCausalLM"], "norm_before_fc": True}
    else:
        embedding = load_file(demo.NAMES["demo"] / "model.safetensors")["model.embed_tokens.weight"]
        tensors |= {"embed_tokens.weight": embedding.flip(1), "lm_head.weight": embedding.roll(3, 0)[:8000].clone()}
        tensors |= {f"midlayer.self_attn.{side}_proj.bias": torch.randn(n).bfloat16() for side, n in BIASES.items()}
        tensors["d2t"] = torch.full((8000,), 100)
        tensors = {key.replace("midlayer.", "layers.0."): value.contiguous() for key, value in tensors.items()}
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": config | {"architectures": None, "attention_bias": True},
            "draft_vocab_size": 8000,
            "eagle_aux_hidden_state_layer_ids": [1, 3, 8],
            **dict.fromkeys(("fc_norm", "norm_before_residual", "norm_output"), True),
        }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("layout", ["SafeAILab", "speculators"])
def test_drafts_of_other_layouts_are_kept(tmp_path: Path, layout: str) -> None:
    drafter = save_variant(tmp_path / "drafter", layout)
    assert_drafts_are_kept(tmp_path, demo.NAMES["demo"], drafter, DEMO_WIDE, 8192)
    written = json.loads((tmp_path / "wide_drafter" / "config.json").read_text())
    assert written["aux_layer_ids"] == ([2, 4, 5] if layout == "SafeAILab" else [1, 3, 8])


def test_drafters_refused(tmp_path: Path, tiny_teacher: Path, tiny_drafters: dict[str, Path]) -> None:
    wide = replace(Checkpoint.open(tiny_teacher).config, hidden=96, heads=2, kv_heads=2)
    with pytest.raises(RequestError, match="heads is 2; expected at least the source's 4"):
        widen_drafter(tiny_drafters["eagle3"], tmp_path / "wide", tiny_teacher, wide)
    wide = replace(wide, heads=8)
    with pytest.raises(RequestError, match="exists already; expected a new folder"):
        widen_drafter(tiny_drafters["fasteagle"], tmp_path, tiny_teacher, wide)
    assert not list(tmp_path.iterdir())
