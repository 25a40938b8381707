"""DFlash against its equations, in its writers' layouts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftwood.compiler.drafters.common.steps import ExtendStep, LevelStep
from draftwood.compiler.drafters.dflash.model import DFlashModel
from draftwood.compiler.drafters.dflash.network import DFlash
from draftwood.compiler.drafters.kind import DFLASH
from draftwood.compiler.drafters.registry import kind_of
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.errors import CheckpointError

MASK, ROWS, LAYERS = 99, 4, 2
# fp32 against float64 through two blocks.
CLOSE = 1e-4


def zlab(make: Any, **nested: object) -> dict:
    own = {"mask_token_id": MASK, "target_layer_ids": [1, 3, 5]} | nested
    qwen3 = {"model_type": "qwen3", "num_hidden_layers": LAYERS, "layer_types": ["full_attention"] * LAYERS}
    window = {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 28}
    stated = {"architectures": ["DFlashDraftModel"], "block_size": ROWS, "num_target_layers": 8, "dflash_config": own}
    return make.sizes | qwen3 | window | stated


def speculators(make: Any, **own: object) -> dict:
    block = {"model_type": "qwen3", "num_hidden_layers": LAYERS}
    stated = {"speculators_model_type": "dflash", "architectures": ["DFlashSpeculator"], "mask_token_id": MASK}
    states = {"aux_hidden_state_layer_ids": [2, 4, 6], "draft_vocab_size": 40, "sample_from_anchor": False}
    return stated | states | {"transformer_layer_config": make.sizes | block, "block_size": ROWS} | own


def deepspec(make: Any) -> dict:
    own = {"architectures": ["Qwen3DSparkModel"], "mask_token_id": MASK, "target_layer_ids": [1, 3, 5]}
    plain = {"markov_rank": 0, "enable_confidence_head": False, "num_anchors": 512}
    return {name: value for name, value in zlab(make).items() if name != "dflash_config"} | own | plain


# config.json, draft vocabulary (None if the teacher's matrices serve), whether the root's row drafts.
WRITERS: dict[str, tuple[Callable, int | None, bool]] = {
    "z-lab": (zlab, None, False),
    "SpecForge-shifted": (lambda make: zlab(make, shift_label=True), None, True),
    "speculators": (speculators, 40, False),
    "speculators-anchor": (lambda make: speculators(make, sample_from_anchor=True), 40, True),
    "DeepSpec": (deepspec, 101, True),
}


class Reference:
    """The equations in float64, row by row and all anew."""

    def __init__(self, oracle: Any, tensors: dict, head: np.ndarray, from_root: bool) -> None:
        self.oracle, self.head, self.from_root = oracle, head, from_root
        self.ids = tensors.get("d2t", torch.zeros(len(head), dtype=torch.int64)).numpy() + np.arange(len(head))

    def ranked(self, features: np.ndarray, root: int, k: int) -> tuple[np.ndarray, np.ndarray]:
        rows = self.oracle.denoised(features, [root] + [MASK] * (ROWS - 1), LAYERS)
        logits = np.array([self.head @ x for x in rows[0 if self.from_root else 1 :]])
        best = np.argsort(-logits)[:, :k]
        scores = np.take_along_axis(logits, best, 1) - np.log(np.exp(logits).sum(1, keepdims=True))
        return self.ids[best], scores


@pytest.fixture(scope="module", params=WRITERS)
def written(
    request: pytest.FixtureRequest,
    make: Any,
    tmp_path_factory: pytest.TempPathFactory,
    teacher: Checkpoint,
    load: Callable,
) -> tuple[DFlash, Reference]:
    config, draft, from_root = WRITERS[request.param]
    folder, tensors = tmp_path_factory.mktemp("dflash"), make.dflash_tensors(LAYERS, 3, draft)
    make.save(folder, config(make), tensors)
    assert kind_of(folder) is DFLASH
    opened = DFlashModel.open(folder, teacher).checkpoint
    assert opened.config.aux_layers == (2, 4, 6) and opened.config.from_root == from_root
    embed = teacher.weight("embed.weight").double().numpy()
    head = tensors.get("lm_head.weight", teacher.weight("lm_head.weight")).double().numpy()
    return load(DFlash, opened), Reference(make.oracle(tensors, embed=embed), tensors, head, from_root)


def inputs_of(drafter: DFlash, decoder: Decoder, warm: Callable, form: str = "fused") -> list[torch.Tensor]:
    return warm(ExtendStep(drafter, decoder, form), 2 * LAYERS)


def silent(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The arguments of a draft step: the inputs, with no noise after the fourth, for every level and token."""
    return [*inputs[:4], torch.zeros(1, 1), *inputs[4:]]


@pytest.mark.parametrize("form", ["fused", "cpu"])
def test_candidates(written: tuple, decoder: Decoder, warm: Callable, text: tuple, form: str) -> None:
    drafter, reference = written
    ids, scores, *_ = LevelStep(drafter, decoder, 6, form)(*silent(inputs_of(drafter, decoder, warm, form)))
    wanted = reference.ranked(text[0], text[1][-1], 6)
    assert ids.dtype == torch.int64 and ids.tolist() == wanted[0].tolist()
    np.testing.assert_allclose(scores, wanted[1], rtol=0, atol=CLOSE)


@pytest.fixture(scope="module")
def drafter(make: Any, tmp_path_factory: pytest.TempPathFactory, teacher: Checkpoint, load: Callable) -> DFlash:
    folder = tmp_path_factory.mktemp("dflash")
    make.save(folder, zlab(make), make.dflash_tensors(LAYERS, 3))
    return load(DFlash, DFlashModel.open(folder, teacher).checkpoint)


def test_the_block_leaves_no_trace(drafter: DFlash, decoder: Decoder, warm: Callable) -> None:
    inputs = inputs_of(drafter, decoder, warm)
    _, _, *caches = LevelStep(drafter, decoder, 6)(*silent(inputs))
    for before, after in zip(inputs[4:], caches, strict=True):
        changed = (before != after).view(2, 32, 16).any(-1)
        assert changed[:, 8:11].all() and not changed[:, :8].any() and not changed[:, 11:31].any()


def test_padding_and_stale_slots_do_not_matter(drafter: DFlash, decoder: Decoder, warm: Callable) -> None:
    step, inputs = LevelStep(drafter, decoder, 6), inputs_of(drafter, decoder, warm)
    ids, scores, *_ = step(*silent(inputs))
    other = [t.clone() for t in inputs]
    other[0][3], other[1][3] = 77, 6
    other[0][:2] = 50  # only the root is read of the tokens
    for cache in other[4:]:
        cache.view(2, 32, 16)[:, 11:] = -30.0
    others = step(*silent(other))
    assert torch.equal(ids, others[0])
    torch.testing.assert_close(scores, others[1], rtol=0, atol=1e-6)  # masked scores add exact zeros


def wrong_root(inputs: list, drafter: DFlash) -> None:
    inputs[0] = inputs[0].roll(1)


def wrong_states(inputs: list, drafter: DFlash) -> None:
    inputs[1] = inputs[1].roll(1, 0)


def wrong_length(inputs: list, drafter: DFlash) -> None:
    inputs[2] = inputs[2] + 1


@pytest.mark.parametrize("harm", [wrong_root, wrong_states, wrong_length])
def test_harm_shows(drafter: DFlash, decoder: Decoder, warm: Callable, harm: Callable) -> None:
    step, inputs = LevelStep(drafter, decoder, 6), inputs_of(drafter, decoder, warm)
    ids, scores, *_ = step(*silent(inputs))
    harm(inputs, drafter)
    worse = step(*silent(inputs))
    assert not torch.equal(ids, worse[0]) or (scores - worse[1]).abs().max() > 100 * CLOSE


@pytest.mark.parametrize(("layers", "wanted"), [(1, (5,)), (2, (2, 6)), (3, (2, 4, 6)), (5, (2, 3, 4, 5, 6))])
def test_usual_states(make: Any, teacher: Checkpoint, tmp_path: Path, layers: int, wanted: tuple) -> None:
    # build_target_layer_ids of z-lab for a teacher of eight layers gives 4; 1, 5; 1, 3, 5; 1, 2, 3, 4, 5.
    config = zlab(make, target_layer_ids=None) | {"num_hidden_layers": layers, "layer_types": None}
    make.save(tmp_path, config, make.dflash_tensors(layers, len(wanted)))
    assert DFlashModel.open(tmp_path, teacher).checkpoint.config.aux_layers == wanted


def top(**values: object) -> Callable:
    return lambda make: zlab(make) | values


def inner(**values: object) -> Callable:
    return lambda make: zlab(make, **values)


REFUSED = [
    (top(block_size=None), r"block_size is None; expected one number of rows from 2 to 256; found \[\]"),
    (inner(block_size=8), r"expected one number of rows from 2 to 256; found \[4, 8\]"),
    (inner(mask_token_id=None), "mask_token_id is None; expected the id of the mask token"),
    (inner(mask_token_id=101), "mask_token_id is 101; expected an id of the teacher, below 101"),
    (inner(target_layer_ids=[1, 3, 7]), "target_layer_ids is .* expected layers before the last; if the state before"),
    (top(target_layer_ids=[0, 2, 4]), r"the same as in dflash_config, \[1, 3, 5\], or only one of the two"),
    (inner(target_layer_ids=[3, 1, 5]), r"entering layers \[4, 2, 6\]; expected ascending ids from 0 to 8"),
    (inner(target_layer_ids=[1, 5]), r"fc.weight has shape \[64, 192\]; expected \[64, 128\]"),
    (inner(projector_type="domino"), "projector_type is 'domino'; expected 'dflash' or no such field: DFlash's succ"),
    (inner(causal=True), "causal is True; expected False or no such field"),
    (inner(use_swa=True), "use_swa is True; expected False"),
    (top(is_neox_style=False), "is_neox_style is False; expected True or no such field"),
    (top(markov_rank=64), "markov_rank is 64; expected 0 or no such field"),
    (top(num_target_layers=36), "num_target_layers is 36; expected 8 as the teacher has"),
    (top(model_type="llama"), "model_type is 'llama'; expected 'qwen3'"),
    (top(layer_types=["sliding_attention"] * 2, sliding_window=2048, use_sliding_window=True), "readers disagree"),
    (top(num_hidden_layers=3), "num_hidden_layers is 3; expected 2, as many as the file has tensors for"),
    (top(vocab_size=151), "vocab_size is 151; expected 101 as the teacher has"),
    (lambda make: zlab(make, shift_label=False) | {"sample_from_anchor": True}, "anchor is True; expected the"),
    (top(architectures=["Gemma4DSparkModel"]), "architectures is .* Gemma's blocks are not supported"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_refused(make: Any, teacher: Checkpoint, tmp_path: Path, config: Callable, message: str) -> None:
    make.save(tmp_path, config(make), make.dflash_tensors(LAYERS, 3))
    with pytest.raises(CheckpointError, match=message) as caught:
        DFLASH.model.open(tmp_path, teacher)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
