"""Random drafters on disk in every layout, and their results by the papers' equations: loops, no cache."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.tests import random_models
from draftwood.tests.exported import onnx_graph, opened

V, LAYERS, HIDDEN = 101, 8, 64
HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, DRAFT = 4, 2, 16, 96, 40
EPSILON, THETA = 1e-5, 5e3
# Cache slots of a drafter, and its rotary positions.
SLOTS, POSITIONS = 32, 32

BLOCK = {
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": V,
    "rms_norm_eps": EPSILON,
    "rope_theta": THETA,
    "num_hidden_layers": 1,
    "max_position_embeddings": 16,  # shorter than the cache: published drafters state a training length
    "model_type": "llama",
}


@pytest.fixture(scope="session")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory, save_llama: Callable) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    save_llama(folder, num_hidden_layers=LAYERS, vocab_size=V, hidden_size=HIDDEN)
    return folder


@pytest.fixture(scope="session")
def teacher(teacher_folder: Path) -> Checkpoint:
    """Eight layers, so that the published states are those entering layers 2, 4 and 5."""
    return Checkpoint.open(teacher_folder)


@pytest.fixture(scope="session")
def decoder(teacher_folder: Path, load_decoder: Callable[..., Decoder]) -> Decoder:
    return load_decoder(teacher_folder, POSITIONS)


def draft_ids(draft: int) -> torch.Tensor:
    """Ascending, with gaps."""
    return torch.randperm(V, generator=torch.Generator().manual_seed(7))[:draft].sort().values


def _randn(random: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=random) * 0.15


def block_tensors(
    random: torch.Generator, at: str, hidden: int, width: int, heads: bool = False
) -> dict[str, torch.Tensor]:
    """No weight of a norm is one."""
    return random_models.block(BLOCK | {"hidden_size": hidden}, random, at, width, 0.15, heads, norms=0.15)


def eagle3_tensors(
    at: str = "midlayer",
    *,
    hidden: int = HIDDEN,
    draft: int = DRAFT,
    states: int = 3,
    layers: int = 1,
    qk: bool = False,
) -> dict[str, torch.Tensor]:
    """The tensors of an EAGLE-3 drafter, random, by published names."""
    random = torch.Generator().manual_seed(11)
    tensors = block_tensors(random, at, hidden, 2 * hidden, qk)
    tensors[f"{at}.hidden_norm.weight"] = 1 + _randn(random, hidden)
    for i in range(1, layers):
        tensors |= block_tensors(random, f"layers.{i}", hidden, hidden, qk)
    tensors["fc.weight"] = _randn(random, hidden, states * HIDDEN)
    tensors["norm.weight"] = 1 + _randn(random, hidden)
    tensors["lm_head.weight"] = _randn(random, draft, hidden)
    ids = draft_ids(draft)
    tensors["d2t"] = ids - torch.arange(draft)
    tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
    if hidden != HIDDEN:
        tensors["embed_tokens.weight"] = _randn(random, V, hidden)
    return tensors


def fasteagle_tensors(levels: int, draft: int = DRAFT) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(13)
    tensors = {"fc.weight": _randn(random, HIDDEN, 3 * HIDDEN), "proj.weight": _randn(random, HIDDEN, 2 * HIDDEN)}
    for i in range(levels):
        tensors |= block_tensors(random, f"layers.{i}", HIDDEN, HIDDEN)
    tensors["norm.weight"] = 1 + _randn(random, HIDDEN)
    if draft < V:
        ids = draft_ids(draft)
        tensors["d2t"] = ids - torch.arange(draft)
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def dflash_tensors(layers: int, states: int, draft: int | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a DFlash drafter, random; with ``draft`` own matrices and a map, as speculators stores them."""
    random = torch.Generator().manual_seed(23)
    tensors = {"fc.weight": _randn(random, HIDDEN, states * HIDDEN), "hidden_norm.weight": 1 + _randn(random, HIDDEN)}
    for i in range(layers):
        tensors |= block_tensors(random, f"layers.{i}", HIDDEN, HIDDEN, heads=True)
    tensors["norm.weight"] = 1 + _randn(random, HIDDEN)
    if draft is not None:
        tensors["embed_tokens.weight"], tensors["lm_head.weight"] = (
            _randn(random, V, HIDDEN),
            _randn(random, draft, HIDDEN),
        )
    if draft is not None and draft < V:
        ids = draft_ids(draft)
        tensors["d2t"] = ids - torch.arange(draft)
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def sequential_head(
    rank: int, head: str = "vanilla", confidence: str = "markov", draft: int | None = None, bare: bool = False
) -> dict[str, torch.Tensor]:
    """The tensors that DSpark adds to DFlash's, random; ``bare`` keys are ModelOpt's."""
    random = torch.Generator().manual_seed(31)
    shapes: dict[str, tuple[int, ...]] = {"markov_w1.weight": (V, rank), "markov_w2.weight": (draft or V, rank)}
    if head == "gated":
        shapes |= {"gate_proj.weight": (rank, HIDDEN + rank), "gate_proj.bias": (rank,)}
    if head == "rnn":
        shapes |= {"joint_proj.weight": (3 * rank, HIDDEN + 2 * rank), "joint_proj.bias": (3 * rank,)}
    own = {("" if bare else "markov_head.") + name: shape for name, shape in shapes.items()}
    if confidence != "none":
        at = "confidence_proj" if bare else "confidence_head.proj"
        own |= {f"{at}.weight": (1, HIDDEN + (rank if confidence == "markov" else 0)), f"{at}.bias": (1,)}
    return {name: torch.randn(shape, generator=random) * 0.4 for name, shape in own.items()}


ARCHITECTURES = {
    "SafeAILab": "LlamaForCausalLM",
    "SpecForge": "LlamaForCausalLMEagle3",
    "ModelOpt": "LlamaForCausalLMEagle3",
    "AngelSlim": "Eagle3LlamaForCausalLM",
    "Automodel": "LlamaEagle3DraftModel",
    "DeepSpec": "Qwen3Eagle3Model",
}
# Fields that a writer adds to the sizes, as its own code does.
OWN_FIELDS: dict[str, dict] = {
    "ModelOpt": {
        "rope_scaling": {"rope_type": "default", "rope_theta": THETA},
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "parallel_draft_heads_num_layers": 1,
        },
    },
    "AngelSlim": {"target_model_type": "qwen3", "bias": False},
    "Automodel": {"num_aux_hidden_states": 3, "mlp_bias": False},
    "DeepSpec": {
        "model_type": "qwen3",
        "target_layer_ids": [0, 1, 3, 5, 6],
        "ttt_length": 7,
        "step_loss_decay": 0.8,
        "draft_num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"],
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 36,
    },
}


def eagle3_config(layout: str, draft: int = DRAFT, **block: object) -> dict:
    """config.json as each project writes it."""
    sizes = {**BLOCK, **block}
    if layout == "speculators":
        return {
            "speculators_model_type": "eagle3",
            "architectures": ["Eagle3Speculator"],
            "transformer_layer_config": sizes,
            "draft_vocab_size": draft,
            "norm_before_residual": False,
            "target_hidden_size": HIDDEN,
            "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        }
    flat = {"architectures": [ARCHITECTURES[layout]], **sizes, "draft_vocab_size": draft}
    return flat | {"target_hidden_size": HIDDEN} | OWN_FIELDS.get(layout, {})


@pytest.fixture(scope="session")
def make() -> object:
    """The builders above; test modules cannot import this one."""

    class Make:
        eagle3_tensors = staticmethod(eagle3_tensors)
        eagle3_config = staticmethod(eagle3_config)
        fasteagle_tensors = staticmethod(fasteagle_tensors)
        dflash_tensors = staticmethod(dflash_tensors)
        sequential_head = staticmethod(sequential_head)
        sizes = BLOCK
        oracle = Oracle

        @staticmethod
        def save(folder: Path, config: dict, tensors: dict, file: str = "model.safetensors") -> Path:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.json").write_text(json.dumps(config))
            if file.endswith(".safetensors"):
                save_file(tensors, folder / file)
            else:
                torch.save(tensors, folder / file)
            return folder

        @staticmethod
        def run_onnx(
            step: torch.nn.Module, inputs: list[torch.Tensor]
        ) -> tuple[torch.export.ExportedProgram, list[np.ndarray]]:
            """The trace of a step, and onnxruntime's results for its translation."""
            program = torch.export.export(step.eval(), tuple(inputs), strict=False)
            session = opened(onnx_graph(program, cpu=False))
            given = {spec.name: t.numpy() for spec, t in zip(session.get_inputs(), inputs, strict=True)}
            return program, session.run(None, given)

        @staticmethod
        def written_once(program: torch.export.ExportedProgram, caches: int) -> bool:
            """Whether each cache is read by one scatter alone, so that the write can be in place."""
            scatter = torch.ops.npu.npu_scatter_nd_update.default
            given = [n for n in program.graph.nodes if n.op == "placeholder" and n.name.startswith("caches")]
            users = [list(node.users) for node in given]
            alone = all(
                len(u) == 1 and u[0].target is scatter and u[0].args[0] is n for n, u in zip(given, users, strict=True)
            )
            return alone and len(given) == caches == sum(node.target is scatter for node in program.graph.nodes)

    return Make


@dataclass
class Oracle:
    """EAGLE-3 in float64, one row at a time, all rows computed again at every call.

    ``tensors`` are the published ones; ``at`` is where the block's keys begin.
    """

    tensors: dict
    at: str = "midlayer"
    feature_norm: str = "none"
    norm_before_residual: bool = False
    norm_output: bool = False
    layers: int = 1
    window: int | None = None
    # The vector that P-EAGLE's mask rows read in place of states; their tokens are those of the path.
    mask: np.ndarray | None = None
    # The teacher's matrices, for drafters without their own.
    embed: np.ndarray | None = None
    head: np.ndarray | None = None
    wide: dict[str, np.ndarray] = field(default_factory=dict)

    def get(self, name: str) -> np.ndarray:
        if name not in self.wide:
            self.wide[name] = self.tensors[name].double().numpy()
        return self.wide[name]

    def norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return weight * x / np.sqrt((x * x).mean() + EPSILON)

    def fused(self, states: np.ndarray) -> np.ndarray:
        """One token's teacher states, [n * H] or more, as one hidden state."""
        states = states[: self.tensors["fc.weight"].shape[1]]
        if self.feature_norm == "whole":
            states = self.norm(states, self.get("input_norm.weight"))
        if self.feature_norm == "each":
            parts = states.reshape(-1, HIDDEN)
            states = np.concatenate([self.norm(p, self.get(f"fc_norm.{i}.weight")) for i, p in enumerate(parts)])
        return self.get("fc.weight") @ states

    def project(self, side: str, x: np.ndarray, at: str) -> np.ndarray:
        y = self.get(f"{at}.self_attn.{side}_proj.weight") @ x
        bias = f"{at}.self_attn.{side}_proj.bias"
        return y + self.get(bias) if bias in self.tensors else y

    def heads(self, side: str, x: np.ndarray, at: str) -> list[np.ndarray]:
        """The heads of a projection, after their norm if there is one."""
        y = self.project(side, x, at).reshape(-1, HEAD_DIM)
        norm = f"{at}.self_attn.{side}_norm.weight"
        return [self.norm(head, self.get(norm)) for head in y] if norm in self.tensors else [*y]

    def placed(self, side: str, x: np.ndarray, at: str, position: int) -> list[np.ndarray]:
        """Heads turned to a position."""
        return [self.turned(head, position) for head in self.heads(side, x, at)]

    def turned(self, x: np.ndarray, position: int) -> np.ndarray:
        """Rotary embedding of one head, rotate-half."""
        half = HEAD_DIM // 2
        angles = position / THETA ** (np.arange(half) / half)
        low, high = x[:half], x[half:]
        return np.concatenate(
            [low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles)]
        )

    def attention(self, inputs: Sequence[np.ndarray], at: str) -> np.ndarray:
        """The last row's attention over all rows before and itself, row i at position i."""
        row, out = len(inputs) - 1, []
        first = 0 if self.window is None else max(0, row - self.window + 1)
        keys = [self.placed("k", inputs[i], at, i) for i in range(first, row + 1)]
        values = [self.heads("v", x, at) for x in inputs[first:]]
        for head, query in enumerate(self.placed("q", inputs[row], at, row)):
            kv = head // (HEADS // KV_HEADS)
            scores = np.array([query @ key[kv] for key in keys]) / np.sqrt(HEAD_DIM)
            weights = np.exp(scores - scores.max())
            out.append(sum(w * v[kv] for w, v in zip(weights / weights.sum(), values, strict=True)))
        return self.project("o", np.concatenate(out), at)

    def feed_forward(self, x: np.ndarray, at: str) -> np.ndarray:
        gate, up = (self.get(f"{at}.mlp.{p}_proj.weight") @ x for p in ("gate", "up"))
        return self.get(f"{at}.mlp.down_proj.weight") @ (gate / (1 + np.exp(-gate)) * up)

    def denoised(self, features: np.ndarray, tokens: Sequence[int], layers: int) -> list[np.ndarray]:
        """DFlash's block of ``tokens`` after a text of these states: all rows' hidden states after the last norm."""
        known = [self.norm(self.fused(states), self.get("hidden_norm.weight")) for states in features]
        rows = [self.embedded(token) for token in tokens]
        for at in (f"layers.{i}" for i in range(layers)):
            normed = [self.norm(x, self.get(f"{at}.input_layernorm.weight")) for x in rows]
            middle = [x + y for x, y in zip(rows, self.over_block(normed, known, at), strict=True)]
            weight = self.get(f"{at}.post_attention_layernorm.weight")
            rows = [x + self.feed_forward(self.norm(x, weight), at) for x in middle]
        return [self.norm(x, self.get("norm.weight")) for x in rows]

    def over_block(self, rows: list, known: list, at: str) -> list[np.ndarray]:
        """Row b of the block stands at position len(known) + b; it sees all that is known and the whole block."""
        found, seen = [], [*known, *rows]
        keys = [self.placed("k", x, at, i) for i, x in enumerate(seen)]
        values = [self.heads("v", x, at) for x in seen]
        for b, row in enumerate(rows):
            heads = []
            for head, query in enumerate(self.placed("q", row, at, len(known) + b)):
                kv = head // (HEADS // KV_HEADS)
                scores = np.array([query @ key[kv] for key in keys]) / np.sqrt(HEAD_DIM)
                shares = np.exp(scores - scores.max())
                heads.append(sum(s * v[kv] for s, v in zip(shares / shares.sum(), values, strict=True)))
            found.append(self.project("o", np.concatenate(heads), at))
        return found

    def embedded(self, token: int) -> np.ndarray:
        own = "embed_tokens.weight"
        return self.get(own)[token] if own in self.tensors else self.embed[token]

    def run(self, features: np.ndarray, tokens: Sequence[int], path: Sequence[int] = ()) -> np.ndarray:
        """The hidden state, before the last norm, of the last token of ``path`` (of the root if it is empty).

        features [n, 3H] of n tokens, tokens [n] the ones after them, path the drafted tokens after the root.
        """
        hidden, inputs = np.zeros(0), [[] for _ in range(self.layers)]
        for i, token in enumerate([*tokens, *path]):
            later = self.fed_back(hidden) if self.mask is None else self.fused(self.mask)
            before = self.fused(features[i]) if i < len(tokens) else later
            normed = self.norm(before, self.get(f"{self.at}.hidden_norm.weight"))
            embedding = self.norm(self.embedded(token), self.get(f"{self.at}.input_layernorm.weight"))
            row, residual = np.concatenate([embedding, normed]), normed if self.norm_before_residual else before
            for layer in range(self.layers):
                at = f"layers.{layer}" if layer else self.at
                row = self.norm(hidden, self.get(f"{at}.input_layernorm.weight")) if layer else row
                inputs[layer].append(row)
                if layer + 1 < self.layers or i >= len(tokens) - 1:
                    middle = residual + self.attention(inputs[layer], at)
                    after = self.norm(middle, self.get(f"{at}.post_attention_layernorm.weight"))
                    residual = hidden = middle + self.feed_forward(after, at)
        return hidden

    def fed_back(self, hidden: np.ndarray) -> np.ndarray:
        if not len(hidden):
            return hidden
        return self.norm(hidden, self.get("norm.weight")) if self.norm_output else hidden

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """[draft vocabulary]."""
        head = self.get("lm_head.weight") if "lm_head.weight" in self.tensors else self.head
        return head @ self.norm(hidden, self.get("norm.weight"))

    def ranked(self, features: np.ndarray, tokens: Sequence[int], path: Sequence[int], k: int) -> list[tuple]:
        """The k best next tokens as (the teacher's id, log-probability)."""
        logits = self.logits(self.run(features, tokens, path))
        logp = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        ids = np.arange(len(logp)) + (self.tensors["d2t"].numpy() if "d2t" in self.tensors else 0)
        best = np.argsort(-logp)[:k]
        return [(int(ids[i]), float(logp[i])) for i in best]


@pytest.fixture(scope="session")
def text() -> tuple[np.ndarray, list[int]]:
    """Features [11, 5H] of eleven tokens, and the tokens after them; the last is the root. A drafter reads as many of
    the states as it takes."""
    random = np.random.default_rng(5)
    return random.normal(size=(11, 5 * HIDDEN)), random.integers(0, V, 11).tolist()


@pytest.fixture(scope="session")
def warm(text: tuple) -> Callable:
    """Inputs of a draft step over ``text``: eight slots are cached by an extend step, three are still to come."""
    states, tokens = (torch.tensor(part) for part in text)

    def inputs(extend: Callable, caches: int) -> list[torch.Tensor]:
        width = extend.drafter.config.features
        features = states[:, :width]
        shape = (1, KV_HEADS, SLOTS, HEAD_DIM) if extend.form == "cpu" else (KV_HEADS * SLOTS, HEAD_DIM)
        empty = [torch.full(shape, 9.0) for _ in range(caches)]  # stale slots are not zeros
        chunk = torch.cat((tokens[:8], torch.zeros(2, dtype=torch.int64)))
        first = torch.cat((features[:8], torch.ones(2, width))).float()
        _, *cached = extend(chunk, first, torch.tensor([8]), torch.tensor([8]), *empty)
        rows = torch.cat((features[8:].float(), torch.randn(1, width, generator=torch.Generator().manual_seed(3))))
        after = torch.cat((tokens[8:], torch.tensor([4])))
        return [after, rows, torch.tensor([11]), torch.tensor([3]), *cached]

    return inputs


@pytest.fixture(scope="session")
def load() -> Callable:
    """The network of a checkpoint, its weights and buffers in place."""

    def build(network: type, checkpoint: object) -> torch.nn.Module:
        module = network(checkpoint.config, POSITIONS)
        weights = {name: checkpoint.weight(name).float() for name in checkpoint.names()}
        module.load_state_dict(weights | checkpoint.buffers(POSITIONS))
        return module.requires_grad_(False)

    return build
