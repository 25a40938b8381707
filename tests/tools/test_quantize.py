"""``draftwood quantize``: its files are read here and by others' rules, and its figures are right."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.checkpoints.int8 import rounded
from draftwood.compiler.quantisation.blocks import Blocks
from draftwood.compiler.quantisation.rounding import migrated
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.conversion import in_precision
from draftwood.runtime.bundle import Bundle
from draftwood.tests.packed_checkpoints import save_packed
from draftwood.tools import cli
from draftwood.tools.comparison.check import check, sample_prompts
from draftwood.trees import Topology


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    words = ["the", "cat", "sat", "on", "the", "mat", "and", "the", "hat"]
    rows = [{"text": " ".join(words[i % 4 :] + words[: i % 5] + words)} for i in range(8)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def quantize(
    tiny_teacher: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[Path, dict]]:
    def run(*more: str, model: Path = tiny_teacher) -> tuple[Path, dict]:
        out = tmp_path / "out"
        given = [str(model), str(texts), "--out", str(out), "--json", *more]
        code = cli.main(["quantize", *given])
        captured = capsys.readouterr()
        return out, json.loads(captured.out) if code == 0 else {"error": captured.err, "code": code}

    return run


@pytest.mark.parametrize("words", [("--head",), ("--layout", "msmodelslim")])
def test_options_of_what_is_written_need_a_folder(
    texts: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["quantize", "demo", str(texts), *words]) == 2
    assert "expected them with --out" in capsys.readouterr().err


def test_a_checkpoint_with_its_report(quantize: Callable, tiny_teacher: Path) -> None:
    out, said = quantize("--head")
    made, original = Checkpoint.open(out), Checkpoint.open(tiny_teacher)
    assert said["quantised"] == len(made.config.quantised) == 9
    assert json.loads((out / "quantisation.json").read_text()) == said["difference"]
    assert said["difference"]["texts"] == 2 and 0 < said["difference"]["errors"][0] < 0.05
    for name in ("layers.0.o.weight", "lm_head.weight"):  # no norm before them: migrated into nothing
        got, want = made.matrix(name), original.matrix(name)
        assert (got - want).abs().max() <= want.abs().amax() / 127 / 2 * 1.001
    assert (out / "tokenizer.json").is_file() and made.digest() != original.digest()


@pytest.fixture
def uneven_teacher(tiny_teacher: Path, tmp_path: Path) -> Path:
    """The tiny teacher with three columns of large rows after its first norm."""
    folder = shutil.copytree(tiny_teacher, tmp_path / "uneven")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.input_layernorm.weight"][:3] = torch.tensor([60.0, 300.0, 0.01])
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_norms_and_weights_have_the_same_product(quantize: Callable, uneven_teacher: Path) -> None:
    out, _ = quantize(model=uneven_teacher)
    made, original = Checkpoint.open(out), Checkpoint.open(uneven_teacher)
    factor = original.weight("layers.0.attn_norm.weight") / made.weight("layers.0.attn_norm.weight")
    assert torch.equal(factor.log2(), factor.log2().round()) and factor[1] >= 4
    want = original.matrix("layers.0.qkv.weight") * factor
    # Half a step of the output's scale.
    steps = want.abs().amax(1, keepdim=True) / 127
    assert ((made.matrix("layers.0.qkv.weight") - want).abs() <= steps / 2 * 1.001).all()


def test_msmodelslims_layout_has_the_same_numbers(quantize: Callable, tmp_path: Path) -> None:
    out, _ = quantize()
    one = {name: Checkpoint.open(out).weight(name) for name in Checkpoint.open(out).names()}
    out.rename(tmp_path / "first")
    out, said = quantize("--layout", "msmodelslim")
    other, kinds = Checkpoint.open(out), json.loads((out / "quant_model_description.json").read_text())
    assert said["layout"] == "msmodelslim" and all(torch.equal(other.weight(name), one[name]) for name in one)
    stored = load_file(out / "quant_model_weights.safetensors")
    assert kinds.pop("model_quant_type") == "W8A8_DYNAMIC" and kinds.pop("version") and kinds.keys() == stored.keys()
    offset = "model.layers.0.mlp.up_proj.weight_offset"
    assert kinds[offset] == "W8A8_DYNAMIC" and not stored[offset].any() and kinds["lm_head.weight"] == "FLOAT"


@pytest.mark.parametrize("layout", ["compressed-tensors", "msmodelslim"])
def test_a_mixtures_attention_is_quantised_and_its_experts_are_not(
    quantize: Callable, save_tiny: Callable[..., Path], tmp_path: Path, layout: str
) -> None:
    (tmp_path / "moe").mkdir()
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [1]}
    own = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    teacher = save_tiny(tmp_path / "moe", **own, **sizes)
    out, said = quantize("--layout", layout, model=teacher)
    made, original = Checkpoint.open(out), Checkpoint.open(teacher)
    assert made.config.quantised == (
        "layers.0.qkv", "layers.0.o", "layers.1.qkv", "layers.1.o", "layers.1.gate_up", "layers.1.down"
    )  # fmt: skip
    for name in ("layers.0.experts.gate_up", "layers.0.experts.down", "layers.0.router.weight"):
        assert torch.equal(made.weight(name), original.weight(name))
    assert 0 < said["difference"]["errors"][0] < 0.05
    trees = (("plain", Topology.plain()),)
    build(BuildRequest(model=out, drafter=None, trees=trees, slots=(128,), prefill_rows=(8,)), tmp_path / "bundle")
    bundle = Bundle.open(tmp_path / "bundle")
    assert check(bundle, list(sample_prompts(bundle, None, 1)))["ok"]


def test_the_scores_are_those_of_the_whole_network(
    tiny_teacher: Path, quantised_teacher: Path, load_scores: Callable
) -> None:
    """Block by block, and the output matrix in pieces, against one pass of all."""
    ids = torch.randint(3, 300, (20,), generator=torch.Generator().manual_seed(0))
    plain, eight = Checkpoint.open(tiny_teacher), Checkpoint.open(quantised_teacher)
    for teacher, allowed in ((plain, 1e-5), (eight, 1e-5), (in_precision(eight, "nbits"), 1e-5)):
        blocks = Blocks(teacher, [ids])
        *_, (_, states) = blocks.run()
        chosen, best = blocks.scores(states)
        logits = load_scores(teacher, ids)[:-1]
        assert torch.equal(best, logits.argmax(-1))
        # fp32 in another order of sums, of values of order 1.
        want = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        assert (chosen - want).abs().max() < allowed


@pytest.fixture
def load_scores() -> Callable[[Checkpoint, torch.Tensor], torch.Tensor]:
    """Logits of a text in one pass of the whole decoder, as the reference engine runs it."""
    from draftwood.compiler.teachers.registry import family_of, make_decoder

    def run(found: Checkpoint, ids: torch.Tensor) -> torch.Tensor:
        rows = len(ids)
        decoder = make_decoder(found.config, rows)
        tables = family_of(found.config).tables(found.config, rows).items()
        weights = {name: found.weight(name) for name in found.names()}
        decoder.load_state_dict(weights | {name: torch.from_numpy(table) for name, table in tables})
        order, zero = torch.arange(rows), torch.zeros(1, dtype=torch.int64)
        config = found.config
        caches = [torch.zeros(config.kv_heads * (rows + 1), config.head_dim) for _ in range(2 * config.layers)]
        branch = torch.zeros(config.layers, 2, 1, config.kv_heads, config.head_dim)
        seen = order[None] <= order[:, None]
        path = torch.zeros(0, dtype=torch.int64)
        with torch.no_grad():
            return decoder.step(ids, order, seen, zero, zero, path, branch, caches, form="eager").logits_RV

    return run


def test_rounding_takes_the_nearest_step() -> None:
    weight = torch.randn(9, 40, generator=torch.Generator().manual_seed(0))
    whole, scale = rounded(weight)
    assert whole.abs().amax(1).eq(127).all() and (whole * scale - weight).abs().le(scale / 2 * 1.0001).all()
    assert rounded(torch.zeros(2, 3))[0].tolist() == [[0, 0, 0]] * 2


def test_an_outlier_is_migrated_where_it_pays() -> None:
    random = torch.Generator().manual_seed(1)
    rows, weight = torch.randn(50, 64, generator=random), torch.randn(32, 64, generator=random)
    rows[:, 5] *= 300
    factor = migrated([rows], weight)
    assert factor[5] >= 8 * factor.median() and torch.equal(factor.log2(), factor.log2().round())


def test_what_is_quantised_is_not_quantised_again(quantize: Callable, quantised_teacher: Path) -> None:
    out, found = quantize(model=quantised_teacher)
    assert "is quantised already; name the original" in found["error"] and not out.exists()


def test_a_line_without_text_is_named(quantize: Callable, texts: Path) -> None:
    good = texts.read_text()
    texts.write_text(good + '\n{"words": 3}')
    out, found = quantize()
    texts.write_text(good)
    assert "line 9: expected" in found["error"] and not out.exists() and math.isfinite(found["code"])


def test_inspect_says_that_a_teacher_is_quantised(
    quantised_teacher: Path, tiny_teacher: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", str(quantised_teacher)]) == 0
    assert "quantised    W8A8, 9 linear layers" in capsys.readouterr().out
    assert cli.main(["inspect", str(tiny_teacher)]) == 0 and "quantised" not in capsys.readouterr().out


def test_four_bits_become_eight_and_are_compared_with_their_exact_product(
    quantize: Callable, tiny_teacher: Path, tmp_path: Path
) -> None:
    save_packed(tiny_teacher, tmp_path / "packed", "awq")
    out, found = quantize("--layout", "msmodelslim", model=tmp_path / "packed")
    exact, made = Checkpoint.open(tmp_path / "packed"), Checkpoint.open(out)
    assert len(made.config.quantised) == 8 and not made.packed and 0 < found["difference"]["errors"][-1] < 0.1
    kept = found["difference"]["nbits"]
    assert 0 < kept["errors"][-1] < found["difference"]["errors"][-1] and kept["agreement"] > 0.8
    want, got = (opened.matrix("layers.1.down.weight") for opened in (exact, made))
    assert 0 < float((got - want).abs().max()) < float(want.abs().max()) / 127


def test_without_a_folder_precisions_are_compared_and_nothing_is_written(
    tiny_teacher: Path, quantised_teacher: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_packed(tiny_teacher, tmp_path / "packed", "awq")
    # Four bits of random weights err by 0.07 a layer. All texts are one, joined.
    plain = (tiny_teacher, ["nbits", "w8a8", "nbits8"])
    for model, names in ((tmp_path / "packed", ["nbits", "w8a8"]), (quantised_teacher, ["nbits"]), plain):
        assert cli.main(["quantize", str(model), str(texts), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert list(found) == names and all(one["texts"] == 1 and 0 < one["errors"][-1] < 0.4 for one in found.values())
    assert found["nbits8"]["errors"][-1] < found["nbits"]["errors"][-1]
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]
