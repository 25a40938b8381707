"""P-EAGLE, DFlash and FastEagle with a cell, from folder to tokens: built for both targets, checked, equal to plain."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.ge.graph import Graph
from draftwood.compiler.ge.proofs import prove_in_place
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding, Options
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.policy import policy_for
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.tools.cli import main
from draftwood.tools.comparison.compare import Pair, compare_gear
from draftwood.tools.reference.eager import EagerEngine
from draftwood.tools.reference.ge import GeEngine
from draftwood.trees import Topology

TREES = (("plain", Topology.plain()), ("backbone", Topology.backbone(3, 2)))
MASK = 299


def small_block(random: torch.Generator, at: str, width: int, scale: float = 0.05) -> dict[str, torch.Tensor]:
    rows = {"q": 64, "k": 32, "v": 32}
    made = {f"self_attn.{side}_proj.weight": torch.randn(n, width, generator=random) for side, n in rows.items()}
    made |= {f"mlp.{side}_proj.weight": torch.randn(96, 64, generator=random) for side in ("gate", "up")}
    made["self_attn.o_proj.weight"] = torch.randn(64, 64, generator=random)
    made["mlp.down_proj.weight"] = torch.randn(64, 96, generator=random)
    norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), 64) | dict.fromkeys(
        ("self_attn.q_norm", "self_attn.k_norm"), 16
    )
    ones = {f"{at}.{name}.weight": torch.ones(size) for name, size in norms.items()}
    return {f"{at}.{name}": tensor * scale for name, tensor in made.items()} | ones


def save_peagle(folder: Path, sizes: dict) -> None:
    """Two layers, Qwen3's; the root's row often proposes the token before it again."""
    random = torch.Generator().manual_seed(2)
    tensors = small_block(random, "layers.0", 128) | small_block(random, "layers.1", 64)
    tensors |= {"layers.0.hidden_norm.weight": torch.ones(64), "norm.weight": torch.ones(64)}
    tensors["fc.weight"] = torch.cat((torch.eye(64), torch.randn(64, 128, generator=random) * 0.02), 1)
    tensors["mask_hidden"] = torch.randn(1, 1, 192, generator=random)
    own = {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"], "mask_token_id": MASK}
    block = sizes | {"num_hidden_layers": 2, "model_type": "qwen3"}
    rest = {"draft_vocab_size": 300, "num_depths": 3, "aux_layer_ids": [0, 1, 2], "transformer_layer_config": block}
    (folder / "config.json").write_text(json.dumps(own | rest))
    save_file(tensors, folder / "model.safetensors")


def save_dflash(folder: Path, sizes: dict) -> None:
    """Two layers over three states; the root's row often proposes the root again."""
    random = torch.Generator().manual_seed(3)
    tensors = small_block(random, "layers.0", 64, 0.1) | small_block(random, "layers.1", 64, 0.1)
    tensors |= {"hidden_norm.weight": torch.ones(64), "norm.weight": torch.ones(64)}
    tensors["fc.weight"] = torch.randn(64, 192, generator=random) * 0.1
    own = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2, "block_size": 3}
    nested = {"dflash_config": {"mask_token_id": MASK, "shift_label": True}, "aux_layer_ids": [0, 1, 2]}
    (folder / "config.json").write_text(json.dumps(sizes | own | nested))
    save_file(tensors, folder / "model.safetensors")


def save_cell(folder: Path, sizes: dict) -> None:
    """A FastEagle cascade of three levels and a cell that often propose the token before them again."""
    random = torch.Generator().manual_seed(4)
    tensors = {"norm.weight": torch.ones(64), "fc.weight": torch.randn(64, 192, generator=random) * 0.1}
    tensors["proj.weight"] = torch.cat((torch.eye(64) * 0.05, torch.eye(64)), 1)
    for i in range(3):
        own = small_block(random, f"layers.{i}", 64)
        tensors |= {name: tensor for name, tensor in own.items() if "q_norm" not in name and "k_norm" not in name}
    shapes = {"state.weight": (48, 16), "token.weight": (48, 64), "level.weight": (48, 64), "level.bias": (48,)}
    for name, shape in (shapes | {"out.weight": (64, 16)}).items():
        tensors[f"cell.{name}"] = torch.randn(shape, generator=random) * 0.3
    own = {"architectures": ["FastEagleDrafter"], "model_type": "fasteagle", "num_hidden_layers": 3}
    own |= {"cell_size": 16, "cell_shortlist": 40, "aux_layer_ids": [0, 1, 2], "target_hidden_size": 64}
    (folder / "config.json").write_text(json.dumps(sizes | own))
    save_file(tensors, folder / "model.safetensors")


def built(folder: Path, save: Callable, tiny_teacher: Path, target: str) -> Bundle:
    (folder / "drafter").mkdir()
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    config = json.loads((tiny_teacher / "config.json").read_text())
    save(folder / "drafter", {name: config[name] for name in (*names, "rms_norm_eps", "rope_theta")})
    asked = BuildRequest(
        model=tiny_teacher,
        drafter=folder / "drafter",
        trees=TREES,
        slots=(128,),
        prefill_rows=(8,),
        targets=(target,),
    )
    build(asked, folder / "bundle")
    return Bundle.open(folder / "bundle")


# P-EAGLE's graphs are EAGLE-3's and one more pass; a bundle takes a while.
BUILT = [
    pytest.param(save_peagle, id="peagle", marks=pytest.mark.slow),
    pytest.param(save_dflash, id="dflash"),
    pytest.param(save_cell, id="cell"),
]


@pytest.fixture(scope="module", params=BUILT)
def bundle(request: pytest.FixtureRequest, tiny_teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return built(tmp_path_factory.mktemp("one-pass"), request.param, tiny_teacher, "onnx")


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=3)], ids=["greedy", "sampled"])
def test_speculation_changes_no_token(bundle: Bundle, sampling: Sampling) -> None:
    engine, options = CpuEngine(bundle), Options(max_new_tokens=60, ignore_eos=True, sampling=sampling)
    gears = [policy_for(bundle, gear) for gear in ("plain-kv128", "backbone-kv128")]
    plain, tree = (Decoding(engine, [5, 9, 200], options, policy).run() for policy in gears)
    assert tree.token_ids == plain.token_ids
    assert tree.steps < plain.steps or sampling.temperature  # drafts hit, else the equality shows little


def test_checked_against_eager_with_faults(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(bundle.folder)]) == 0, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("save", [save_peagle, save_dflash, save_cell], ids=["peagle", "dflash", "cell"])
def test_npu_graphs_write_in_place_and_equal_eager(save: Callable, tiny_teacher: Path, tmp_path: Path) -> None:
    bundle = built(tmp_path, save, tiny_teacher, "ge")
    npu, drafter = bundle.manifest.graph_set("ge"), bundle.manifest.drafter
    assert npu is not None and drafter is not None and drafter.levels == 3
    for signature in npu.graphs:
        if signature.kind in ("extend", "draft"):
            proof = prove_in_place(Graph.load(bundle.folder / signature.file), signature)
            assert len(proof) == 2 * drafter.layers == len(signature.caches) and all(one.readers for one in proof)
    pair = Pair("ge", EagerEngine(bundle, npu=True), GeEngine(bundle), 3e-2)  # bf16, as `check` allows
    for gear in bundle.manifest.gears:
        found = list(compare_gear(pair, gear, np.arange(40, dtype=np.int64)))
        assert [one for one in found if not one.ok] == []


def test_the_folder_is_what_was_built(bundle: Bundle, tiny_teacher: Path) -> None:
    from draftwood.compiler.drafters.registry import drafter_of, open_drafter

    opened = open_drafter(bundle.folder.parent / "drafter", Checkpoint.open(tiny_teacher))
    assert bundle.manifest.drafter is not None
    assert drafter_of(bundle.manifest.drafter) == opened.model
    assert bundle.manifest.drafter.digest == opened.digest()
