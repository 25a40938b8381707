"""The split of a model: weights cut and joined, and networks of all ranks that equal the whole one."""

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from draftwood.compiler.checkpoints.weight import WeightEntry
from draftwood.compiler.ranks import modules
from draftwood.compiler.ranks.plan import SPLITS, cut, join
from draftwood.compiler.ranks.share import Share, check_ranks
from draftwood.compiler.ranks.weights import rank_entries
from draftwood.compiler.targets.modules import load_modules
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.experts import MixtureConfig
from draftwood.compiler.teachers.glm4 import Glm4Config
from draftwood.compiler.teachers.registry import FAMILIES, family_of, make_decoder
from draftwood.errors import RequestError

CONFIG = TeacherConfig(
    family="llama", layers=2, hidden=24, intermediate=22, heads=4, kv_heads=2, head_dim=8, vocabulary=51,
    rms_norm_eps=1e-5, rope_theta=1e4, rope_scaling=None, max_positions=64, qkv_bias=True, o_bias=True, tied=False,
    dtype="float32", bos=None, eos=(1,),
)  # fmt: skip
# Every family by its own network, biases, head norms and a tied head among them; no size but the heads divides by 4.
TEACHERS = {
    **{name: replace(CONFIG, family=name) for name, one in FAMILIES.items() if one.config is TeacherConfig},
    "normed": replace(CONFIG, family="qwen3", qk_norm=True, qkv_bias=False, o_bias=False),
    "tied": replace(CONFIG, tied=True),
    "mixture": MixtureConfig(
        **{f: getattr(CONFIG, f) for f in CONFIG.__slots__ if f != "family"},
        family="qwen3-moe",
        experts=3,
        experts_per_token=2,
        expert_intermediate=10,
        shares_normalised=True,
        dense_layers=(0,),
    ),
    "glm4": Glm4Config(**{**{f: getattr(CONFIG, f) for f in CONFIG.__slots__}, "family": "glm4", "rotary_dim": 4}),
}


class Ranks:
    """Runs a function for every rank in a thread; a rank's part of a collective waits for the others'."""

    def __init__(self, ranks: int, patch: pytest.MonkeyPatch) -> None:
        self.ranks, self.barrier, self.brought = ranks, threading.Barrier(ranks, timeout=300), [torch.empty(0)] * ranks
        self.here = threading.local()
        patch.setattr(modules, "summed", lambda x: torch.stack(self.meet(x)).sum(0))
        patch.setattr(modules, "gathered", lambda x, ranks, width: torch.cat(self.meet(x), -1)[:, :width])

    def meet(self, x: Tensor) -> list[Tensor]:
        self.brought[self.here.rank] = x
        self.barrier.wait()
        found = list(self.brought)
        self.barrier.wait()
        return found

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        found: list[Any] = [None] * self.ranks

        def one(rank: int) -> None:
            self.here.rank = rank
            with torch.inference_mode():
                found[rank] = function(rank)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


def random_weights(config: TeacherConfig) -> dict[str, Tensor]:
    torch.manual_seed(0)
    found = {n: torch.randn_like(t) * 0.2 for n, t in make_decoder(config, 64).state_dict().items()}
    tables = {n: torch.from_numpy(t) for n, t in family_of(config).tables(config, 64).items()}
    return found | tables


def entries(weights: dict[str, Tensor]) -> list[WeightEntry]:
    return [WeightEntry(name, tuple(value.shape), partial(lambda v: v, value)) for name, value in weights.items()]


def step(decoder: Any, config: TeacherConfig, rank: int = 0) -> tuple[Tensor, Tensor]:
    """Logits and features of a tree of four rows after a prompt of five, with one row moved."""
    heads = decoder.config.kv_heads
    zeros = [torch.zeros(heads * 32, config.head_dim) for _ in range(2 * config.layers)]
    branch = torch.zeros(config.layers, 2, 4, heads, config.head_dim)
    none, path = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    order = torch.arange(5)
    first = decoder.step(order * 9, order, order[None] <= order[:, None], none, none, path, branch, zeros, form="eager")
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    tokens, depths, five = torch.tensor([50, 3, 17, 40]), torch.tensor([0, 1, 1, 2]), torch.tensor([5])
    out = decoder.step(tokens, depths, tree, five, none, path, branch, first.caches, form="eager")
    return out.logits_RV, out.features_RF


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("teacher", TEACHERS)
def test_every_family_on_several_ranks_is_the_whole_one(
    teacher: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TEACHERS[teacher]
    weights = random_weights(config)
    whole, _ = load_modules(weights, config, None)
    wanted = step(whole, config)
    together = Ranks(ranks, monkeypatch)
    parts = [{e.name: e.read() for e in rank_entries(entries(weights), config, config, Share(rank, ranks))}
             for rank in range(ranks)]  # fmt: skip
    decoders = [load_modules(part, config, None, ranks)[0] for part in parts]
    found = together.run(lambda rank: step(decoders[rank], config))
    for logits, features in found:
        assert torch.equal(logits, found[0][0])  # the same on all ranks, bit for bit
        # fp32 sums in another order; logits here are of order 1.
        torch.testing.assert_close(logits, wanted[0], rtol=0, atol=2e-5)
        torch.testing.assert_close(features, wanted[1], rtol=0, atol=2e-5)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("layer", ["qkv", "o", "gate_up", "down", "embed", "fc", "blocks", "attn_norm"])
def test_the_parts_of_a_weight_are_the_whole(layer: str, ranks: int) -> None:
    config = replace(CONFIG, heads=12, kv_heads=6 if ranks == 3 else 4, head_dim=2)
    widths = {"qkv": config.head_dim * (config.heads + 2 * config.kv_heads), "gate_up": 2 * 22, "embed": 51}
    whole = torch.arange(widths.get(layer, 22) * 24.0).view(widths.get(layer, 22), 24)
    parts = [cut(f"layers.0.{layer}.weight", whole, config, Share(rank, ranks)) for rank in range(ranks)]
    assert len({part.shape for part in parts}) == 1
    assert layer not in SPLITS or parts[0].numel() < whole.numel()
    assert torch.equal(join(f"layers.0.{layer}.weight", parts, config, whole.shape), whole)


def test_fewer_key_heads_than_ranks_are_held_by_several() -> None:
    config = replace(CONFIG, heads=8, kv_heads=2, head_dim=2)
    whole = torch.arange(24.0)[:, None]  # 16 rows of queries, 4 of keys, 4 of values
    parts = [cut("layers.0.qkv.weight", whole, config, Share(rank, 4)).flatten().tolist() for rank in range(4)]
    assert [part[4:6] for part in parts] == [[16, 17], [16, 17], [18, 19], [18, 19]]
    assert [part[:4] for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]


def test_a_bias_behind_a_sum_is_the_first_ranks() -> None:
    whole = torch.ones(24)
    assert [cut("layers.0.o.bias", whole, CONFIG, Share(rank, 2)).sum().item() for rank in range(2)] == [24, 0]


@pytest.mark.parametrize(
    ("changed", "ranks", "line"),
    [
        ({}, 3, "--ranks 3: the teacher has 4 query and 2 key/value heads; .*; choose one of 1, 2, 4"),
        (
            {"heads": 12, "kv_heads": 6},
            4,
            "--ranks 4: the teacher has 12 query and 6 key.*one of 1, 2, 3, 6, 12",
        ),
        ({"vocabulary": 5}, 4, "--ranks 4: the teacher has 5 tokens; expected some for every rank"),
    ],
)
def test_what_cannot_be_split_is_refused(changed: dict[str, int], ranks: int, line: str) -> None:
    with pytest.raises(RequestError, match=line) as refused:
        check_ranks(replace(CONFIG, **changed), ranks, "the teacher")
    assert "\n" not in str(refused.value)
