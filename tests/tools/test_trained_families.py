"""From a teacher of any family to a bundle with a drafter that was trained for it: the whole line, at tiny size."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.options import Options
from draftwood.runtime.policy import FixedTree, widest_gear
from draftwood.tools.comparison.check import check, sample_prompts
from draftwood.tools.measure.calibrate import count_all, jobs
from draftwood.tools.prompts import read_prompts
from draftwood.tools.training.distill import distill
from draftwood.tools.training.trainer import train
from draftwood.trees import Topology
from draftwood.trees.calibration import Calibration

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
FAMILIES = {
    "pangu": {"architectures": ["PanguEmbeddedForCausalLM"], "model_type": "PanguEmbedded", "bias": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "qwen3-moe": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"} | MIXTURE,
    "mixtral": {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4},
    "glm4": {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4"},
}
SLOW = pytest.mark.slow
CASES = [
    ("pangu", "medusa"),
    *(pytest.param(*case, marks=SLOW) for case in [
        ("qwen3-moe", "eagle3"),
        ("qwen3", "medusa"), ("qwen3", "eagle3"), ("qwen3-moe", "medusa"), ("qwen3-moe", "dspark"), ("glm4", "eagle3"),
        ("mixtral", "medusa"), ("mixtral", "eagle3"), ("mixtral", "fasteagle"), ("pangu", "fasteagle"),
        ("pangu", "eagle3"), ("pangu", "dspark"),
    ]),
]  # fmt: skip
ROWS = [{"id": f"text/{i}", "text": f"the {word} sat on the mat"} for i, word in enumerate(["cat", "hat", "rat"] * 20)]
TREES = (("plain", Topology.plain()), ("tree", Topology.from_paths([(0,), (1,), (0, 0), (0, 1)])))
NEW = 24


@pytest.fixture(scope="module")
def begun(
    tmp_path_factory: pytest.TempPathFactory, save_tiny: Callable[..., Path]
) -> Callable[[str], tuple[Path, Path]]:
    """A family's teacher and the texts that it has written, made once."""
    made: dict[str, tuple[Path, Path]] = {}

    def make(family: str) -> tuple[Path, Path]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            teacher = save_tiny(folder, num_hidden_layers=3, **FAMILIES[family])
            tensors = load_file(teacher / "model.safetensors")
            tensors["lm_head.weight"] *= 6  # or there is little to learn: nearly all tokens are as likely
            save_file(tensors, teacher / "model.safetensors")
            distill(teacher, ROWS, folder / "texts", rows=120, shard_rows=60, new_tokens=16, batch=60)
            made[family] = teacher, folder / "texts"
        return made[family]

    return make


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_a_teacher_of_any_family_gets_its_drafter(
    family: str, kind: str, begun: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    """Its loss falls; it is built and checked against eager PyTorch; texts are those of plain decoding, sooner."""
    teacher, texts = begun(family)
    settings: dict[str, Any] = {"steps": 60, "batch": 16, "log_every": 5, "levels": 2, "learning_rate": 1e-2}
    train(kind, teacher, texts, tmp_path / "drafter", **settings)
    records = [json.loads(line) for line in (tmp_path / "drafter" / "log.jsonl").read_text().splitlines()]
    nats = [sum(record["nats"]) for record in records if "of" in record]
    assert nats[-1] < 0.6 * nats[0]
    request = BuildRequest(model=teacher, drafter=tmp_path / "drafter", trees=TREES, slots=(128,), prefill_rows=(16,))
    build(request, tmp_path / "bundle")
    bundle = Bundle.open(tmp_path / "bundle")
    assert check(bundle, list(sample_prompts(bundle, None, 1)))["ok"]
    engine, options = CpuEngine(bundle), Options(max_new_tokens=NEW, ignore_eos=True)
    prompts = [bundle.tokenizer.encode(text) for text in ("the cat sat", "on the mat", "a hat and a rat")]
    steps = {}
    for gear in (None, widest_gear(bundle)):
        results = [
            Decoding(engine, ids, options, FixedTree(bundle, gear) if gear else FixedTree(bundle)).run()
            for ids in prompts
        ]
        steps[gear] = [result.token_ids for result in results], sum(result.steps for result in results)
    (plain, most), (found, fewer) = steps.values()
    assert found == plain and fewer < 0.9 * most


def test_its_answers_are_counted(begun: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    """``calibrate MODEL --drafter``, for openPangu."""
    teacher, texts = begun("pangu")
    train("medusa", teacher, texts, tmp_path / "heads", steps=4, batch=16, levels=2)
    (tmp_path / "prompts.jsonl").write_text(
        '{"id": "a", "prompt": "the cat sat"}\n{"id": "b", "prompt": "on the mat"}\n'
    )
    counted = Calibration()
    for temperature in (0.0, 0.8):
        work = jobs(read_prompts(tmp_path / "prompts.jsonl"), teacher, tmp_path / "heads",
                    temperatures=(temperature,), max_new_tokens=8)  # fmt: skip
        list(count_all(work, counted, None))
    assert counted.contexts.total > 4 and counted.contexts.depth <= 2
