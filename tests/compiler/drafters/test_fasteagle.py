"""FastEagle against its equations, and its checkpoints."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftwood.compiler.drafters.common.layers import Waiting
from draftwood.compiler.drafters.common.steps import ExtendStep, LevelStep
from draftwood.compiler.drafters.fasteagle.model import FastEagleModel
from draftwood.compiler.drafters.fasteagle.network import FastEagle
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.decoder import Decoder, TeacherEnds
from draftwood.errors import CheckpointError

LEVELS = 3
# fp32 against float64 through three blocks.
CLOSE = 1e-4
SIZES = {
    "architectures": ["FastEagleDrafter"],
    "model_type": "fasteagle",
    "num_hidden_layers": LEVELS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e3,
    "vocab_size": 101,
    "target_hidden_size": 64,
    "aux_layer_ids": [2, 4, 5],
}


def save(make: Any, folder: Path, draft: int, own_head: bool = False, **fields: object) -> dict:
    tensors = make.fasteagle_tensors(LEVELS, draft)
    if own_head:
        tensors["lm_head.weight"] = torch.randn(draft, 64, generator=torch.Generator().manual_seed(19)) * 0.15
    make.save(folder, {**SIZES, "draft_vocab_size": draft, **fields}, tensors)
    return tensors


class Model:
    """A drafter, and its levels' ranking by the equations."""

    def __init__(
        self,
        make: Any,
        folder: Path,
        teacher: Checkpoint,
        load: Callable,
        draft: int,
        own_head: bool,
        window: int | None = None,
    ) -> None:
        tensors = save(make, folder, draft, own_head)
        checkpoint = FastEagleModel.open(folder, teacher).checkpoint
        config = replace(checkpoint.config, window=window)  # shorter than a folder may say
        self.drafter = load(FastEagle, replace(checkpoint, config=config))
        self.ids = np.arange(draft) + (tensors["d2t"].numpy() if draft < 101 else 0)
        head = tensors["lm_head.weight"] if own_head else teacher.weight("lm_head.weight")[self.ids]
        self.head = head.double().numpy()
        self.oracle = make.oracle(tensors, embed=teacher.weight("embed.weight").double().numpy(), window=window)

    def ranked(self, features: np.ndarray, tokens: list[int], k: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and log-probabilities [levels, k], best first; every block over all rows, row by row."""
        oracle, get = self.oracle, self.oracle.get
        hidden = [
            get("proj.weight") @ np.concatenate([oracle.fused(states), oracle.embedded(token)])
            for states, token in zip(features, tokens, strict=True)
        ]
        ids, scores = [], []
        for i in range(LEVELS):
            at = f"layers.{i}"
            inputs = [oracle.norm(h, get(f"{at}.input_layernorm.weight")) for h in hidden]
            middle = [h + oracle.attention(inputs[: j + 1], at) for j, h in enumerate(hidden)]
            weight = get(f"{at}.post_attention_layernorm.weight")
            hidden = [h + oracle.feed_forward(oracle.norm(h, weight), at) for h in middle]
            logits = self.head @ oracle.norm(hidden[-1], get("norm.weight"))
            best = np.argsort(-logits)[:k]
            ids.append(self.ids[best])
            scores.append(logits[best] - np.log(np.exp(logits).sum()))
        return np.array(ids), np.array(scores)


@pytest.fixture(
    scope="module",
    params=[(40, False), (40, True), (101, False), (40, False, 4)],
    ids=["rows", "own", "teacher", "window"],
)
def model(
    request: pytest.FixtureRequest,
    make: Any,
    tmp_path_factory: pytest.TempPathFactory,
    teacher: Checkpoint,
    load: Callable,
) -> Model:
    return Model(make, tmp_path_factory.mktemp("fasteagle"), teacher, load, *request.param)


@pytest.fixture(scope="module")
def rows(make: Any, tmp_path_factory: pytest.TempPathFactory, teacher: Checkpoint, load: Callable) -> Model:
    return Model(make, tmp_path_factory.mktemp("fasteagle"), teacher, load, 40, False)


def inputs_of(model: Model, decoder: Decoder, warm: Callable, form: str = "fused") -> list[torch.Tensor]:
    return warm(ExtendStep(model.drafter, decoder, form), 2 * LEVELS)


def given(step: LevelStep, inputs: list[torch.Tensor], spread: float = 0.0) -> list[torch.Tensor]:
    """The arguments of a draft step: the inputs, with random noise of this size after the fourth."""
    noise = (
        torch.randn(LEVELS, step.drafter.config.draft_vocabulary, generator=torch.Generator().manual_seed(8)) * spread
    )
    return [*inputs[:4], noise, *inputs[4:]]


@pytest.mark.parametrize("form", ["fused", "eager", "cpu"])
def test_candidates(model: Model, decoder: Decoder, warm: Callable, text: tuple, form: str) -> None:
    step = LevelStep(model.drafter, decoder, 6, form)
    ids, scores, *_ = step(*given(step, inputs_of(model, decoder, warm, form)))
    wanted = model.ranked(*text, 6)
    assert ids.dtype == torch.int64 and ids.tolist() == wanted[0].tolist()
    np.testing.assert_allclose(scores, wanted[1], rtol=0, atol=CLOSE)


def test_caches_are_those_of_one_pass_over_the_text(rows: Model, decoder: Decoder, warm: Callable, text: tuple) -> None:
    inputs = inputs_of(rows, decoder, warm)
    step = LevelStep(rows.drafter, decoder, 6)
    _, _, *caches = step(*given(step, inputs))
    features, tokens = torch.tensor(text[0][:, :192]).float(), torch.tensor(text[1])
    count = torch.tensor([11])
    waiting, teacher = Waiting(tokens, features, count, count), TeacherEnds(decoder, embeds=True)
    at_once = rows.drafter.extend(waiting, inputs[4:], teacher).caches
    for place, (ours, theirs, before) in enumerate(zip(caches, at_once, inputs[4:], strict=True)):
        ours, theirs, before = (t.view(2, 32, 16) for t in (ours, theirs, before))
        torch.testing.assert_close(ours[:, :11], theirs[:, :11], rtol=0, atol=1e-5, msg=f"cache {place}")
        assert torch.equal(ours[:, 11:31], before[:, 11:31])


def test_padding_and_stale_slots_do_not_matter(rows: Model, decoder: Decoder, warm: Callable) -> None:
    step, inputs = LevelStep(rows.drafter, decoder, 6), inputs_of(rows, decoder, warm)
    ids, scores, *_ = step(*given(step, inputs))
    other = [t.clone() for t in inputs]
    other[0][3], other[1][3] = 77, 6
    for cache in other[4:]:
        cache.view(2, 32, 16)[:, 11:] = -30.0
    others = step(*given(step, other))
    assert torch.equal(ids, others[0])
    torch.testing.assert_close(scores, others[1], rtol=0, atol=1e-6)  # masked scores add exact zeros


@pytest.mark.parametrize("place", [0, 1, 2], ids=["tokens", "features", "committed"])
def test_harm_shows(rows: Model, decoder: Decoder, warm: Callable, place: int) -> None:
    step, inputs = LevelStep(rows.drafter, decoder, 6), inputs_of(rows, decoder, warm)
    ids, scores, *_ = step(*given(step, inputs))
    inputs[place] = inputs[place].roll(1, 0) if place < 2 else inputs[place] + 1
    worse = step(*given(step, inputs))
    assert not torch.equal(ids, worse[0]) or (scores - worse[1]).abs().max() > 100 * CLOSE


@pytest.mark.filterwarnings("ignore")
def test_onnx_and_one_write_a_cache(rows: Model, make: Any, decoder: Decoder, warm: Callable) -> None:
    step = LevelStep(rows.drafter, decoder, 6)
    inputs = given(step, inputs_of(rows, decoder, warm), 1.0)
    program, outputs = make.run_onnx(step, inputs)
    for ours, theirs in zip(outputs, step(*inputs), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)  # onnxruntime sums in another order
    assert make.written_once(program, 2 * LEVELS)


def test_zero_inputs_index_nothing_outside(rows: Model, decoder: Decoder) -> None:
    zeros = [torch.zeros(4, dtype=torch.int64), torch.zeros(4, 192)]
    ends = [torch.zeros(1, dtype=torch.int64)] * 2 + [torch.zeros(64, 16)] * 2 * LEVELS
    step = LevelStep(rows.drafter, decoder, 6)
    assert step(*given(step, [*zeros, *ends]))[0].shape == (LEVELS, 6)


def test_state_names_are_those_of_the_checkpoint(make: Any, teacher: Checkpoint, tmp_path: Path) -> None:
    tensors = save(make, tmp_path, 40)
    opened = FastEagleModel.open(tmp_path, teacher).checkpoint
    state = FastEagle(opened.config, 8).state_dict()
    assert set(state) == {*opened.names(), *opened.buffers(8)}
    assert {n: opened.weight(n).shape for n in opened.names()} == {n: state[n].shape for n in opened.names()}
    assert opened.config.aux_layers == (2, 4, 5) and opened.config.block.layers == LEVELS
    assert torch.equal(opened.weight("cascade.1.down.weight"), tensors["layers.1.mlp.down_proj.weight"])
    assert torch.equal(opened.weight("draft_head.weight"), teacher.weight("lm_head.weight")[opened.ids])


REFUSED = [
    ({"architectures": ["LlamaForCausalLM"]}, r"architectures is .*; expected \['FastEagleDrafter'\]"),
    ({"model_type": "llama"}, "model_type is 'llama'; expected 'fasteagle'"),
    ({"num_hidden_layers": 4}, "tensors missing, first layers.3.input_layernorm.weight"),
    ({"num_hidden_layers": 2}, "does not explain: layers.2.input_layernorm.weight"),
    ({"num_hidden_layers": None}, "num_hidden_layers is None; expected a whole number"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0; expected 1"),
    ({"hidden_size": 48}, "hidden_size is 48; expected 64 as the teacher has"),
    ({"target_hidden_size": 48}, "target_hidden_size is 48; expected 64"),
    ({"vocab_size": 99}, "vocab_size is 99; expected 101"),
    ({"draft_vocab_size": 39}, r"d2t is I64 \[40\]; expected I64 \[39\]"),
    ({"aux_layer_ids": None}, r"aux_layer_ids gives the states entering layers \[\]; expected ascending ids"),
    ({"aux_layer_ids": [2, 4, 9]}, r"\[2, 4, 9\]; expected ascending ids from 0 to 8"),
    ({"rms_norm_eps": None}, "rms_norm_eps is None; expected a finite number"),
    ({"intermediate_size": 80}, r"gate_proj.weight has shape \[96, 64\]; expected \[80, 64\]"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[next(iter(fields)) for fields, _ in REFUSED])
def test_refused(make: Any, teacher: Checkpoint, tmp_path: Path, fields: dict, message: str) -> None:
    save(make, tmp_path, 40, **fields)
    with pytest.raises(CheckpointError, match=message) as caught:
        FastEagleModel.open(tmp_path, teacher)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
