"""The teacher of a training, many texts side by side: of every family it equals transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwood.compiler.teachers.decoder import Decoder
from draftwood.compiler.training.teacher import FrozenTeacher, TextCaches

MIXTURE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
FAMILIES = {
    "Llama": {"tie_word_embeddings": True},
    "Qwen2": {},
    "Qwen3": {"head_dim": 24},
    "Qwen3Moe": {**MIXTURE, "norm_topk_prob": True, "mlp_only_layers": [0]},
    "Mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "Mistral": {"sliding_window": 128},
    "Glm4": {"head_dim": 24, "pad_token_id": 0},
    "PanguEmbedded": {},
}
TEXTS, LENGTH = 3, 11
# Two implementations in fp32, of states and logits of magnitude 10.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(params=FAMILIES)
def pair(request: Any, tmp_path: Path, save_llama: Callable, save_pangu: Callable) -> tuple[FrozenTeacher, Any]:
    name = request.param
    model = save_pangu(tmp_path) if name == "PanguEmbedded" else save_llama(tmp_path, family=name, **FAMILIES[name])
    return FrozenTeacher.open(tmp_path), model


def test_states_and_steps_are_those_of_transformers(pair: tuple[FrozenTeacher, Any]) -> None:
    """Whole texts; and the same in two steps over caches, of unlike length, padded on the left, with their states."""
    teacher, model = pair
    ids = torch.randint(0, 101, (TEXTS, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
    states = teacher.states(ids, (0, 1, 2)).chunk(4, -1)
    for found, wanted in zip(states[:3], (out.hidden_states[-1], *out.hidden_states[:2]), strict=True):
        torch.testing.assert_close(found, wanted, **CLOSE)
    with torch.no_grad():  # the last layer's output; transformers keeps its normed form alone
        torch.testing.assert_close(model.model.norm(states[3]), out.hidden_states[-1], **CLOSE)
    lengths = torch.tensor([LENGTH - 4, LENGTH - 1, LENGTH - 2])
    fed, seen = torch.zeros(TEXTS, LENGTH - 1, dtype=torch.int64), torch.zeros(TEXTS, LENGTH, dtype=torch.bool)
    for text, length in enumerate(lengths):
        fed[text, LENGTH - 1 - length :], seen[text, LENGTH - 1 - length :] = ids[text, :length], True
    caches = TextCaches(teacher, TEXTS, LENGTH)
    position = (seen[:, :-1].cumsum(1) - 1).clamp(min=0)
    logits, fed_states = teacher.step(fed, position, caches, seen[:, :-1], (0, 1))
    torch.testing.assert_close(logits, out.logits[torch.arange(TEXTS), lengths - 1], **CLOSE)
    for text, length in enumerate(lengths):  # the states of the fed tokens, those of a shorter text on the right
        of_text = torch.cat([out.hidden_states[layer][text, :length] for layer in (-1, 0, 1)], -1)
        torch.testing.assert_close(fed_states[text, LENGTH - 1 - length :], of_text, **CLOSE)
    caches.keep(torch.tensor([2, 0]))
    last, _ = teacher.step(ids[[2, 0], lengths[[2, 0]]][:, None], lengths[[2, 0], None], caches, seen[[2, 0]])
    torch.testing.assert_close(last, out.logits[[2, 0], lengths[[2, 0]]], **CLOSE)


def test_a_layer_to_begin_with_is_the_last_one(pair: tuple[FrozenTeacher, Any]) -> None:
    """Its matrices under a Llama's names; of a mixture the sum of experts with equal shares."""
    teacher, model = pair
    last, hidden = teacher.last_layer(), torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    theirs = model.model.layers[-1].state_dict()
    assert torch.equal(last["input_layernorm.weight"], theirs["input_layernorm.weight"])
    assert torch.equal(last["self_attn.o_proj.weight"], theirs["self_attn.o_proj.weight"])
    gate, up, down = (last[f"mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    assert gate.shape == up.shape == (teacher.mlp_width, 64)
    found = (torch.nn.functional.silu(hidden @ gate.T) * (hidden @ up.T)) @ down.T
    layer: Any = teacher.decoder.layers[-1]
    if hasattr(layer, "experts"):
        count = layer.config.experts_per_token
        ids = torch.arange(count, dtype=torch.int32).expand(5, -1)
        wanted = layer.experts(hidden, ids, torch.full((5, count), 1 / count))
    else:
        wanted = layer.mlp(hidden)
    torch.testing.assert_close(found, wanted, **CLOSE)


def test_a_teacher_in_eight_bits_is_run_as_the_compiler_runs_it(
    quantised_teacher: Path, load_decoder: Callable[[Path, int], Decoder]
) -> None:
    """In float32, whatever was asked for: its products are of whole numbers."""
    teacher, decoder = FrozenTeacher.open(quantised_teacher, torch.bfloat16), load_decoder(quantised_teacher, 32)
    ids, order, none = torch.arange(9), torch.arange(9), torch.zeros(1, dtype=torch.int64)
    caches = [torch.zeros(2 * 16, 16) for _ in range(4)]
    branch = torch.zeros(2, 2, 1, 2, 16)
    seen = order[None] <= order[:, None]
    wanted = decoder.step(ids, order, seen, none, none, none[:0], branch, caches, form="eager").logits_RV
    with torch.no_grad():
        found = teacher.decoder.head(teacher.states(ids[None])[0])
    assert teacher.dtype == torch.float32 and teacher.output_VH.shape == (300, 64)
    torch.testing.assert_close(found, wanted, **CLOSE)
