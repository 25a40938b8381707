"""P-EAGLE against its equations, in its writers' layouts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftwood.compiler.drafters.common.steps import ExtendStep, LevelStep
from draftwood.compiler.drafters.kind import PEAGLE
from draftwood.compiler.drafters.peagle.model import PEagleModel
from draftwood.compiler.drafters.peagle.network import PEagle
from draftwood.compiler.drafters.registry import kind_of
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.errors import CheckpointError

MASK = 99
# fp32 against float64 through two blocks.
CLOSE = 1e-4
PROPOSED = {"algorithm": "peagle", "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}]}
SPECULATORS = {
    "speculators_model_type": "peagle",
    "architectures": ["PEagleSpeculator"],
    "mask_token_id": MASK,
    "speculators_config": PROPOSED,
}
# Layout, fields of its own, shape of the tensors, tokens a pass.
WRITERS: dict[str, tuple[str, dict, dict, int]] = {
    "speculators": ("speculators", SPECULATORS, {"layers": 2}, 4),
    "speculators-qwen3": ("speculators", SPECULATORS, {"layers": 2, "qk": True}, 4),
    "SpecForge": ("SpecForge", {"architectures": ["PEagleDraftModel"], "mask_token_id": MASK}, {"layers": 2}, 8),
    "Automodel": ("Automodel", {"parallel_drafting": True, "num_depths": 3, "mask_token_id": MASK}, {"layers": 2}, 3),
    "Amazon": ("SpecForge", {"ptd_token_id": MASK}, {"layers": 4, "draft": 101}, 8),
    "one": ("Automodel", {"parallel_drafting": True, "num_depths": 1, "mask_token_id": MASK}, {}, 1),
}


def save(make: Any, folder: Path, layout: str, own: dict, shape: dict, extra: dict | None = None) -> dict:
    at = "midlayer" if layout == "SpecForge" else "layers.0"
    kind = {"model_type": "qwen3"} if "qk" in shape else {}
    config = make.eagle3_config(layout, shape.get("draft", 40), num_hidden_layers=shape.get("layers", 1), **kind) | own
    random = torch.Generator().manual_seed(29)
    tensors = make.eagle3_tensors(at, **shape) | {"mask_hidden": torch.randn(1, 1, 192, generator=random)}
    outside = ("lm_head.weight", "d2t", "t2d", "mask_hidden")
    before = "model." if layout == "Automodel" else ""
    make.save(folder, config, {k if k in outside else before + k: t for k, t in (tensors | (extra or {})).items()})
    return tensors


@pytest.fixture(scope="module", params=WRITERS)
def written(
    request: pytest.FixtureRequest,
    make: Any,
    tmp_path_factory: pytest.TempPathFactory,
    teacher: Checkpoint,
    load: Callable,
) -> tuple[PEagle, Any, int]:
    """The network, its oracle, and the tokens of a pass."""
    layout, own, shape, levels = WRITERS[request.param]
    folder = tmp_path_factory.mktemp("peagle")
    tensors = save(make, folder, layout, own, shape)
    assert kind_of(folder) is PEAGLE
    embed = teacher.weight("embed.weight").double().numpy()
    at = "midlayer" if layout == "SpecForge" else "layers.0"
    mask = tensors["mask_hidden"].flatten().double().numpy()
    oracle = make.oracle(tensors, at, embed=embed, layers=shape.get("layers", 1), mask=mask)
    return load(PEagle, PEagleModel.open(folder, teacher).checkpoint), oracle, levels


def silent(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The arguments of a draft step: the inputs, with no noise after the fourth, for every level and token."""
    return [*inputs[:4], torch.zeros(1, 1), *inputs[4:]]


@pytest.mark.parametrize("form", ["fused", "eager", "cpu"])
def test_candidates(written: tuple, decoder: Decoder, warm: Callable, text: tuple, form: str) -> None:
    drafter, oracle, levels = written
    inputs = warm(ExtendStep(drafter, decoder, form), 2 * drafter.config.block.layers)
    ids, scores, *_ = LevelStep(drafter, decoder, 6, form)(*silent(inputs))
    assert ids.shape == (levels, 6) == scores.shape and ids.dtype == torch.int64
    for level in range(levels):
        wanted = oracle.ranked(*text, [MASK] * level, 6)
        assert ids[level].tolist() == [token for token, _ in wanted]
        np.testing.assert_allclose(scores[level], [score for _, score in wanted], rtol=0, atol=CLOSE)


def test_mask_rows_leave_no_trace(written: tuple, decoder: Decoder, warm: Callable) -> None:
    drafter, layers = written[0], written[0].config.block.layers
    inputs = warm(ExtendStep(drafter, decoder, "fused"), 2 * layers)
    _, _, *caches = LevelStep(drafter, decoder, 6)(*silent(inputs))
    for before, after in zip(inputs[4:], caches, strict=True):
        changed = (before != after).view(2, 32, 16).any(-1)
        assert changed[:, 8:11].all() and not changed[:, :8].any() and not changed[:, 11:31].any()


REFUSED = [
    ({"mask_token_id": None}, {}, "mask_token_id is None; expected the id of the mask token; if the writer left it"),
    ({"mask_token_id": 101}, {}, "mask_token_id is 101; expected an id of the teacher, below 101"),
    ({"ptd_token_id": 3}, {}, "expected the same id in every place that names the mask token, not 3 and 99"),
    ({"dflash_config": {"mask_token_id": 3}}, {}, "in every place that names the mask token, not 3 and 99"),
    ({"num_depths": 0}, {}, "num_depths is 0; expected 1 to 64"),
    (
        {"speculators_model_type": "eagle3", "ptd_token_id": MASK},
        {},
        "speculators_model_type is 'eagle3'; expected",
    ),
    ({}, {"mask_hidden": torch.ones(1, 1, 64)}, r"mask_hidden has shape \[1, 1, 64\]; expected \[1, 1, 192\]"),
]


@pytest.mark.parametrize(("own", "extra", "message"), REFUSED, ids=[message[:30] for *_, message in REFUSED])
def test_refused(make: Any, teacher: Checkpoint, tmp_path: Path, own: dict, extra: dict, message: str) -> None:
    save(make, tmp_path, "speculators", SPECULATORS | own, {}, extra)
    with pytest.raises(CheckpointError, match=message) as caught:
        PEAGLE.model.open(tmp_path, teacher)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
