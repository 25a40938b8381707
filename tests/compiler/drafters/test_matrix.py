"""Families x kinds x targets: every cell of docs/drafters.md's table is built as a bundle and compared with eager.

In ONNX the text with a tree is the text without; for the NPU every graph is proved, checked and interpreted.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.environment import torch_npu_installed
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.options import Options
from draftwood.runtime.policy import FixedTree
from draftwood.tools.comparison.compare import Pair, compare_gear
from draftwood.tools.reference.eager import EagerEngine
from draftwood.tools.reference.ge import GeEngine
from draftwood.trees import Topology

TREES = (("plain", Topology.plain()), ("backbone", Topology.backbone(2, 2)))
FAMILIES: dict[str, dict] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Qwen3Moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "Mistral": {"sliding_window": None},
    "Mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "Glm4": {"head_dim": 16, "pad_token_id": 0},
    "PanguEmbedded": {},
}
KINDS = ("medusa", "eagle3", "peagle", "dflash", "dspark", "fasteagle")
# A build takes a while; the usual run has one, for an NPU. In ONNX test_family_bundles has Qwen3-MoE with Medusa heads,
# and the shared bundles have a Llama with drafters of three kinds.
QUICK = {("Glm4", "medusa", "ge")}
CELLS = [
    pytest.param(family, kind, target, marks=[] if (family, kind, target) in QUICK else pytest.mark.slow)
    for family in FAMILIES
    for kind in KINDS
    for target in ("onnx", "ge")
]

INT8_CELLS = [(kind, target) for kind in KINDS for target in ("onnx", "ge")]


def save_drafter(make: Any, folder: Path, kind: str) -> None:
    """One that reads the states entering layers 0, 1 and 2 of a teacher of two layers."""
    read = {"aux_layer_ids": [0, 1, 2], "target_hidden_size": 64}
    block, mask = make.sizes, torch.randn(1, 1, 192, generator=torch.Generator().manual_seed(1))
    qwen3 = {**block, "model_type": "qwen3", "num_hidden_layers": 2, "block_size": 3}
    cascade = {**block, "architectures": ["FastEagleDrafter"], "model_type": "fasteagle", "num_hidden_layers": 2}
    folders: dict[str, tuple[dict, dict]] = {
        "eagle3": (make.eagle3_config("SafeAILab"), make.eagle3_tensors()),
        "peagle": (
            {
                "speculators_model_type": "peagle",
                "architectures": ["PEagleSpeculator"],
                "mask_token_id": 100,
                "draft_vocab_size": 40,
                "num_depths": 3,
                "transformer_layer_config": block,
            },
            make.eagle3_tensors("layers.0") | {"mask_hidden": mask},
        ),
        "dflash": (
            qwen3
            | {
                "architectures": ["DFlashDraftModel"],
                "dflash_config": {"mask_token_id": 100, "shift_label": True},
            },
            make.dflash_tensors(2, 3),
        ),
        "dspark": (
            qwen3
            | {
                "architectures": ["Qwen3DSparkModel"],
                "mask_token_id": 100,
                "markov_rank": 12,
                "markov_head_type": "rnn",
                "enable_confidence_head": True,
            },
            make.dflash_tensors(2, 3) | make.sequential_head(12, "rnn"),
        ),
        "fasteagle": (cascade | {"draft_vocab_size": 40}, make.fasteagle_tensors(2)),
    }
    fields, tensors = folders[kind]
    make.save(folder, fields | read, tensors)


@pytest.fixture
def built(tmp_path: Path, make: Any, save_llama: Callable, save_pangu: Callable, save_medusa: Callable) -> Callable:
    def of(family: str, kind: str, target: str, int8_drafter: bool = False) -> Bundle:
        if target == "ge" and not torch_npu_installed():
            pytest.skip("needs the torch_npu package, which holds torchair's converters")
        teacher, drafter = tmp_path / "teacher", tmp_path / "drafter"
        teacher.mkdir()
        drafter.mkdir()
        if family == "PanguEmbedded":
            save_pangu(teacher)
        else:
            save_llama(teacher, family=family, **FAMILIES[family])
        if kind == "medusa":
            save_medusa(drafter, heads=2, tied=True)
        else:
            save_drafter(make, drafter, kind)
        asked = BuildRequest(
            model=teacher,
            drafter=drafter,
            trees=TREES,
            slots=(128,),
            prefill_rows=(8,) if target == "ge" else (),  # what is compared with eager PyTorch
            targets=(target,),
            int8_drafter=int8_drafter,
        )
        build(asked, tmp_path / "bundle")
        return Bundle.open(tmp_path / "bundle")

    return of


@pytest.mark.parametrize(("family", "kind", "target"), CELLS)
def test_a_family_with_a_drafter(built: Callable, family: str, kind: str, target: str) -> None:
    bundle = built(family, kind, target)
    assert bundle.manifest.drafter is not None and bundle.manifest.drafter.kind == kind
    hold(bundle, target, 3e-2)  # bf16, as `check` allows


@pytest.mark.slow  # the usual run has one of test_quantised
@pytest.mark.parametrize(("kind", "target"), INT8_CELLS)
def test_a_drafter_in_int8(built: Callable, kind: str, target: str) -> None:
    bundle = built("Llama", kind, target, int8_drafter=True)
    assert bundle.manifest.int8 and not bundle.manifest.quantised
    hold(bundle, target, 5e-2)  # as `check` allows of W8A8


def hold(bundle: Bundle, target: str, tolerance: float) -> None:
    """Text with a tree is text without; or every graph of the NPU equals eager PyTorch."""
    if target == "onnx":
        engine, options = CpuEngine(bundle), Options(max_new_tokens=24, ignore_eos=True)
        gears = [FixedTree(bundle, gear) for gear in ("plain-kv128", "backbone-kv128")]
        plain, tree = (Decoding(engine, [5, 9, 17], options, policy).run() for policy in gears)
        assert tree.token_ids == plain.token_ids and len(plain.token_ids) == 24
        return
    pair = Pair("ge", EagerEngine(bundle, npu=True), GeEngine(bundle), tolerance)
    for gear in bundle.manifest.gears:
        found = list(compare_gear(pair, gear, np.arange(20, dtype=np.int64)))
        assert found and [one for one in found if not one.ok] == []


def test_the_table_is_these_cells() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs/drafters.md").read_text()
    head = re.search(r"^\| family \| (.*) \|$", text, re.M)
    assert head is not None and tuple(head[1].split(" | ")) == KINDS
    rows = re.findall(r"^\| `(\w+)ForCausalLM` \| (.*) \|$", text, re.M)
    assert {name: cells.split(" | ") for name, cells in rows} == {name: ["onnx, ge"] * len(KINDS) for name in FAMILIES}
