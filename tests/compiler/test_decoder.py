"""The decoder against transformers: prompts, trees after a text, the deferred commit, and faults that must show.

The oracle knows neither trees nor caches: every row's own path from the root is run as plain text.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from draftwood.compiler.teachers.block import Appended, Form, place
from draftwood.compiler.teachers.decoder import Decoder, StepOutput
from draftwood.trees import Topology, TreeBuffers, tensorize

# T new rows, P path slots, V vocabulary

# fp32 against fp32, logits of magnitude up to 5: two layers add in another order. Measured: 6e-6 at most, over all
# kinds and forms.
FP32 = 1e-4
# bf16 keeps 8 bits; the oracle rounds its attention scores to bf16 where we keep fp32. As a share of the largest
# logit; measured 1.7e-2, and both sides are as far from fp32.
BF16_SHARE = 4e-2
# A fault must stand out from the tolerance by this factor at least; measured 3e4 and more.
WIDE = 1e3

SLOTS, PATH_SLOTS = 128, 4
PROMPT = (5, 17, 3, 88, 41, 9, 62)
# Rows:                          1     2     3       4       5       6
TREE = Topology.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)])
# For each of two trees: the tokens of its rows, then the rows that are accepted. The first path leaves the text
# with two rows to move, the second with one.
ROUNDS = (((11, 23, 35, 47, 59, 71, 83), (0, 2, 5)), ((97, 13, 29, 31, 7, 53, 61), (0, 1, 4)))
DECODED = (19, 77)

KINDS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "untied": {},
    "bias": {"attention_bias": True},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "head_dim": {"head_dim": 24},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 500.0}},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "pangu": {},
    "qwen2": {"family": "Qwen2"},
    "qwen3": {"family": "Qwen3", "head_dim": 24},
    "qwen3-bias": {"family": "Qwen3", "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    "mistral": {"family": "Mistral", "sliding_window": None},
    "glm4": {"family": "Glm4", "head_dim": 16, "pad_token_id": 0},
    "glm4-share": {
        "family": "Glm4",
        "head_dim": 24,
        "pad_token_id": 0,
        "attention_bias": False,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "partial_rotary_factor": 0.75,
        },
    },
    "mistral-window": {"family": "Mistral", "sliding_window": 64, "head_dim": 24},
}
FORMS: tuple[Form, ...] = ("fused", "eager", "cpu")


class Oracle:
    """Logits [V] after a text, by transformers; all tests of a model share what is known of it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.known: dict[tuple[int, ...], Tensor] = model.__dict__.setdefault("known", {})

    def __call__(self, text: tuple[int, ...]) -> Tensor:
        if text not in self.known:
            with torch.no_grad():
                self.known[text] = self.model(torch.tensor([text])).logits[0, -1].float()
        return self.known[text]


@dataclass
class Player:
    """Runs steps of one form and keeps the caches; ``moved`` are branch rows still to be put in place."""

    decoder: Decoder
    form: Form
    slots: int = SLOTS
    length: int = 0
    moved: tuple[int, ...] = ()
    in_place: int = 0
    caches: list[Tensor] = field(default_factory=list)
    branch: Tensor = field(default_factory=lambda: torch.zeros(0))

    def __post_init__(self) -> None:
        config, dtype = self.decoder.config, self.decoder.embed.weight.dtype
        kv, dim = config.kv_heads, config.head_dim
        shape = (1, kv, self.slots, dim) if self.form == "cpu" else (kv * self.slots, dim)
        # Stale memory must not matter: only finite, as the kernels multiply it by a weight of zero.
        self.caches = [torch.full(shape, 7.0, dtype=dtype) for _ in range(2 * config.layers)]
        self.branch = torch.full((config.layers, 2, 1, kv, dim), 7.0, dtype=dtype)

    def step(self, tokens: tuple[int, ...], depths: Tensor, visible: Tensor) -> StepOutput:
        run = self._cpu if self.form == "cpu" else self._static
        out = run(torch.tensor(tokens), depths, visible)
        self.caches, self.branch, self.moved = out.caches, out.branch_L2TKD, ()
        return out

    def _static(self, tokens: Tensor, depths: Tensor, visible: Tensor) -> StepOutput:
        # The slots past the accepted ones name a live row, so that a write of theirs would be seen.
        path = torch.tensor((*self.moved, *[0] * PATH_SLOTS)[:PATH_SLOTS])
        committed, accepted = torch.tensor([self.length]), torch.tensor([len(self.moved)])
        return self.decoder.step(
            tokens, depths, visible, committed, accepted, path, self.branch, self.caches, form=self.form
        )

    def _cpu(self, tokens: Tensor, depths: Tensor, visible: Tensor) -> StepOutput:
        """The rows that are to be moved are, as the host does; the last row stands in attention twice."""
        start = self.length - len(self.moved)
        before = start - self.in_place
        for cache in self.caches:
            cache[:, :, start : self.length] = cache[:, :, [before + row for row in self.moved]]
        rows, seen = len(tokens), self.length + len(tokens) + 1
        bias = torch.zeros(1, 1, rows + 1, seen)
        bias[0, 0, :rows, self.length : -1][~visible] = -1e38
        last, total = torch.tensor([seen - 1], dtype=torch.int32), torch.tensor(seen, dtype=torch.int32)
        queries, places = torch.tensor([[*range(rows), rows - 1]]), torch.arange(rows)
        results = torch.stack((torch.zeros_like(places), places), 1)
        positions = torch.cat((self.length + depths, torch.tensor([self.length + rows])))[None]
        appended = Appended(queries, results, positions, bias, last, total)
        return self.decoder.step_cpu(tokens, places, appended, self.caches)

    def prefill(self, tokens: tuple[int, ...]) -> StepOutput:
        rows = len(tokens)
        out = self.step(tokens, torch.arange(rows), torch.ones(rows, rows, dtype=torch.bool).tril())
        self.length += rows
        return out

    def verify(self, tokens: tuple[int, ...], tree: TreeBuffers) -> StepOutput:
        return self.step(tokens, torch.tensor(tree.depths), torch.tensor(tree.mask))

    def commit(self, rows: tuple[int, ...]) -> None:
        """Rows that stand where they belong are committed by length, the others remembered."""
        self.in_place = next((i for i, row in enumerate(rows) if i != row), len(rows))
        self.moved, self.length = rows[self.in_place :], self.length + len(rows)


def causal(player: Player, tokens: tuple[int, ...], tree: TreeBuffers) -> StepOutput:
    lower = torch.ones(tree.rows, tree.rows, dtype=torch.bool).tril().numpy()
    return Player.verify(player, tokens, replace(tree, mask=lower))


def shifted(player: Player, tokens: tuple[int, ...], tree: TreeBuffers) -> StepOutput:
    return Player.verify(player, tokens, replace(tree, depths=tree.depths + 1))


def dropped(player: Player, tokens: tuple[int, ...], tree: TreeBuffers) -> StepOutput:
    player.moved = ()
    return Player.verify(player, tokens, tree)


def misrouted(player: Player, tokens: tuple[int, ...], tree: TreeBuffers) -> StepOutput:
    player.moved = tuple(row - 1 for row in player.moved)
    return Player.verify(player, tokens, tree)


Verify = Callable[[Player, tuple[int, ...], TreeBuffers], StepOutput]


def play(player: Player, verify: Verify = Player.verify) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """(text, our logits after it) of every row: a prompt in two chunks, two trees with a commit each, two decodes."""
    text: tuple[int, ...] = ()
    for chunk in (PROMPT[:5], PROMPT[5:]):
        for at, logits in enumerate(player.prefill(chunk).logits_RV, 1):
            yield text + chunk[:at], logits
        text += chunk
    tree = tensorize(TREE)
    for tokens, accepted in ROUNDS:
        logits_TV = verify(player, tokens, tree).logits_RV
        for row, path in enumerate(tree.paths):
            below = tree.depths[row] + 1
            yield text + tuple(tokens[at] for at in path[:below]), logits_TV[row]
        player.commit(accepted)
        text += tuple(tokens[row] for row in accepted)
    for token in DECODED:
        text += (token,)
        yield text, verify(player, (token,), tensorize(Topology.plain())).logits_RV[0]
        player.commit((0,))


def worst(player: Player, oracle: Oracle, verify: Verify = Player.verify) -> float:
    return max(float((logits.float() - oracle(text)).abs().max()) for text, logits in play(player, verify))


@pytest.fixture(scope="module")
def teacher(
    tmp_path_factory: pytest.TempPathFactory, save_llama: Callable, save_pangu: Callable, load_decoder: Callable
) -> Callable[..., tuple[Decoder, PreTrainedModel]]:
    made: dict[tuple, tuple[Decoder, PreTrainedModel]] = {}

    def make(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Decoder, PreTrainedModel]:
        if (kind, dtype) not in made:
            folder = tmp_path_factory.mktemp(kind)
            model = (save_pangu if kind == "pangu" else save_llama)(folder, dtype, **KINDS[kind])
            made[kind, dtype] = load_decoder(folder, SLOTS), model
        return made[kind, dtype]

    return make


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(teacher: Callable, kind: str, form: Form) -> None:
    decoder, model = teacher(kind)
    assert worst(Player(decoder, form), Oracle(model)) < FP32


def test_kinds_differ_from_one_another(teacher: Callable) -> None:
    # Otherwise a kind whose peculiarity both sides ignore would pass.
    base = Oracle(teacher("untied")[1])(PROMPT)
    for kind in ("linear", "llama3", "yarn"):  # same weights, other frequencies
        assert float((Oracle(teacher(kind)[1])(PROMPT) - base).abs().max()) > WIDE * FP32
    for kind, biased in (("pangu", True), ("qwen2", False), ("qwen3-bias", True)):
        layers = teacher(kind)[0].layers
        assert all(layer.qkv.bias.abs().max() > 0.1 and (layer.o.bias is not None) == biased for layer in layers)
    assert all((layer.q_norm.weight - layer.k_norm.weight).abs().max() > 0.1 for layer in teacher("qwen3")[0].layers)


@pytest.mark.parametrize("form", ["fused", "cpu"])
@pytest.mark.parametrize("verify", [causal, shifted, dropped, misrouted], ids=lambda fault: fault.__name__)
def test_a_fault_shows(teacher: Callable, form: Form, verify: Verify) -> None:
    decoder, model = teacher("untied")
    assert worst(Player(decoder, form), Oracle(model), verify) > WIDE * FP32


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_checkpoints_are_computed_in_fp32(teacher: Callable, dtype: torch.dtype, form: Form) -> None:
    decoder, model = teacher("pangu", dtype)
    assert model.dtype == dtype and decoder.embed.weight.dtype == torch.float32
    wide = LlamaForCausalLM(model.config).eval()
    wide.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    assert worst(Player(decoder, form), Oracle(wide)) < FP32


@pytest.mark.parametrize("kind", ["tied", "pangu"])
def test_bf16_arithmetic(teacher: Callable, load_decoder: Callable, kind: str) -> None:
    decoder, model = teacher(kind, torch.bfloat16)
    narrow = Decoder(decoder.config, SLOTS).to(torch.bfloat16)
    narrow.load_state_dict(decoder.state_dict())
    oracle = Oracle(model)
    difference = worst(Player(narrow.requires_grad_(False), "eager"), oracle)
    scale = max(float(logits.abs().max()) for logits in oracle.known.values())
    assert 0 < difference < BF16_SHARE * scale


@pytest.mark.parametrize("form", FORMS)
def test_outputs_belong_together(teacher: Callable, form: Form) -> None:
    decoder, _ = teacher("untied")
    player = Player(decoder, form)
    player.prefill(PROMPT)
    out = player.verify(ROUNDS[0][0], tensorize(TREE))
    assert torch.equal(out.choice_R, out.logits_RV.argmax(-1))
    torch.testing.assert_close(decoder.head(out.features_RF), out.logits_RV, rtol=0, atol=1e-5)
    for i, cache in enumerate(out.caches if out.branch_L2TKD is not None else ()):
        live_KTD = cache.view(2, SLOTS, -1)[:, 7:14]
        assert torch.equal(live_KTD.transpose(0, 1), out.branch_L2TKD[i // 2, i % 2])


@pytest.mark.parametrize("form", FORMS)
def test_a_step_writes_nothing_else(teacher: Callable, form: Form) -> None:
    player = Player(teacher("untied")[0], form)
    player.prefill(PROMPT)
    player.verify(ROUNDS[0][0], tensorize(TREE))
    player.commit((0, 2, 5))
    before = [cache.clone().view(2, SLOTS, -1) for cache in player.caches]
    player.verify((97,), tensorize(Topology.plain()))
    for old, cache in zip(before, player.caches, strict=True):
        changed = (old != cache.view(2, SLOTS, -1)).any(-1).any(0).nonzero()[:, 0].tolist()
        # Rows 2 and 5 go to slots 8 and 9, the new row to 10, and the two idle path slots to the spare slot. On a CPU
        # the new row goes once more to 11.
        assert changed == [8, 9, 10, 11 if form == "cpu" else SLOTS - 1]


@pytest.mark.parametrize("form", FORMS)
def test_rows_do_not_depend_on_the_tree_around_them(teacher: Callable, form: Form) -> None:
    decoder, _ = teacher("untied")
    logits = []
    for tokens, tree in ((ROUNDS[0][0], TREE), ((11, 23, 59), Topology.from_paths([(0,), (0, 1)]))):
        player = Player(decoder, form)
        player.prefill(PROMPT)
        logits.append(player.verify(tokens, tensorize(tree)).logits_RV)
    torch.testing.assert_close(logits[0][[0, 1, 4]], logits[1], rtol=0, atol=FP32)


def test_place() -> None:
    # Two rows after five committed slots, one path slot of two in use, two heads of eight slots.
    place_at = partial(place, torch.tensor([[True, False], [True, True]]), torch.tensor([5]))
    placed = place_at(torch.tensor([1]), moved=2, slots=8, kv_heads=2)
    assert placed.index[:, 0].tolist() == [4, 12, 7, 15, 5, 13, 6, 14]
    assert (~placed.masked[0, 0]).int().tolist() == [[1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1, 0]]
    idle = place_at(torch.tensor([0]), moved=2, slots=8, kv_heads=1)
    assert idle.index[:, 0].tolist() == [7, 7, 5, 6]


def test_place_on_an_empty_cache() -> None:
    placed = place(torch.tensor([[True]]), torch.tensor([0]), torch.tensor([0]), 1, 4, 1)
    assert placed.index[:, 0].tolist() == [3, 0]
    assert placed.masked.tolist() == [[[[False, True, True, True]]]]
