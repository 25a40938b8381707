"""A teacher family is one class and one registration: a toy one, added here and nowhere else, becomes a bundle."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.checkpoints.weight import WeightParts
from draftwood.compiler.teachers import registry
from draftwood.compiler.teachers.block import Layer, Norm
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.compiler.teachers.family import Family
from draftwood.compiler.teachers.registry import described_config, read_config
from draftwood.errors import BundleError, CheckpointError
from draftwood.manifest import read_manifest
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.options import Options
from draftwood.runtime.policy import FixedTree
from draftwood.trees import Topology

H, I, V, N, K, D, L, EPSILON, SCALE = 32, 48, 101, 4, 2, 8, 2, 1e-5, 2.5  # noqa: E741
# Rotary turns the first R of D dimensions of a head. Ours pairs dimension i with i + D / 2: rotary pairs come first in
# both halves, and what is not turned follows them.
R, ORDER = 4, [0, 1, 4, 5, 2, 3, 6, 7]
NAMES = {"attn_norm": (H,), "q": (N * D, H), "k": (K * D, H), "v": (K * D, H), "qn": (D,), "kn": (D,), "o": (H, N * D)}
NAMES |= {"mlp_norm": (H,), "gate": (I, H), "up": (I, H), "down": (H, I)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyConfig(TeacherConfig):
    """With a field that no other family has."""

    embedding_scale: float


class ToyLayer(Layer):
    """Queries and keys are normalised head by head, before rotary."""

    def __init__(self, config: TeacherConfig) -> None:
        super().__init__(config)
        self.q_norm, self.k_norm = (Norm(config.head_dim, config.rms_norm_eps) for _ in range(2))

    def project(self, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x_TH)
        heads = (q.unflatten(-1, (-1, D)), k.unflatten(-1, (-1, D)))
        return self.q_norm(heads[0]).flatten(-2), self.k_norm(heads[1]).flatten(-2), v


class ToyDecoder(Decoder):
    """The embedding is scaled."""

    config: ToyConfig

    def make_layer(self, index: int) -> Layer:
        return ToyLayer(self.config)

    def embedded(self, tokens_T: Tensor) -> Tensor:
        return self.embed(tokens_T) * self.config.embedding_scale


def reordered(weight: Tensor) -> Tensor:
    return weight.unflatten(0, (-1, D))[:, ORDER].flatten(0, 1)


REORDERED = {
    "qkv": lambda tensors: torch.cat((reordered(tensors[0]), reordered(tensors[1]), tensors[2])),
    "q_norm": lambda tensors: reordered(tensors[0]),
    "k_norm": lambda tensors: reordered(tensors[0]),
}


class Toy(Family):
    """Fields and tensors of other names; the embedding is stored column by column, and half of a head is rotated."""

    name, architecture, config, decoder = "toy", "ToyForCausalLM", ToyConfig, ToyDecoder

    def values(self, fields: Fields) -> dict:
        sizes = {"hidden": H, "intermediate": I, "heads": N, "kv_heads": K, "head_dim": D, "vocabulary": V}
        scale = fields.number("scale")
        other = {"rms_norm_eps": EPSILON, "rope_theta": 1e4, "rope_scaling": None, "max_positions": 256}
        flags = {"qkv_bias": False, "o_bias": False, "tied": False, "dtype": "float32", "bos": None, "eos": ()}
        return sizes | other | flags | {"family": "toy", "layers": fields.whole("depth"), "embedding_scale": scale}

    def tables(self, config: TeacherConfig, positions: int) -> dict[str, np.ndarray]:
        angles_PE = np.zeros((positions, D // 2))
        angles_PE[:, : R // 2] = np.arange(positions)[:, None] / 1e4 ** (np.arange(0, R, 2) / R)
        angles_PD = np.concatenate((angles_PE, angles_PE), 1).astype(np.float32)
        return {"rope_cos": np.cos(angles_PD), "rope_sin": np.sin(angles_PD)}

    def parts(self, config: TeacherConfig) -> dict[str, WeightParts]:
        found = {"embed.weight": WeightParts((("emb", (H, V)),), combine=lambda tensors: tensors[0].T)}
        for i in range(config.layers):
            made = {"attn_norm": ["attn_norm"], "qkv": ["q", "k", "v"], "q_norm": ["qn"], "k_norm": ["kn"]}
            made |= {"o": ["o"], "mlp_norm": ["mlp_norm"], "gate_up": ["gate", "up"], "down": ["down"]}
            for ours, theirs in made.items():
                tensors = tuple((f"b{i}.{name}", NAMES[name]) for name in theirs)
                found[f"layers.{i}.{ours}.weight"] = WeightParts(tensors, REORDERED.get(ours))
        return found | {
            "norm.weight": WeightParts((("last", (H,)),)),
            "lm_head.weight": WeightParts((("out", (V, H)),)),
        }


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.FAMILIES, "toy", Toy())


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, Tensor]:
    """A toy teacher in ``tmp_path``, and its tensors as published."""
    random = torch.Generator().manual_seed(0)
    shapes = {f"b{i}.{name}": shape for i in range(L) for name, shape in NAMES.items()}
    shapes |= {"emb": (H, V), "last": (H,), "out": (V, H)}
    made = {name: torch.randn(shape, generator=random) * 0.3 + (len(shape) == 1) for name, shape in shapes.items()}
    save_file(made, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["ToyForCausalLM"], "depth": L, "scale": SCALE}))
    return made


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * weight


def rotated(x_NTD: Tensor) -> Tensor:
    angle = torch.arange(x_NTD.shape[1])[:, None] / 1e4 ** (torch.arange(0, R, 2) / R)
    first, second, rest = x_NTD.split((R // 2, R // 2, D - R), -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def reference(t: dict[str, Tensor], ids: list[int]) -> Tensor:
    """Logits [V] after a text, straight from the published tensors: no cache, no graph, no class of ours."""
    x = t["emb"].T[ids] * SCALE
    for i in range(L):
        w = {name: t[f"b{i}.{name}"] for name in NAMES}
        h = rms(x, w["attn_norm"])
        q, k, v = ((h @ w[p].T).unflatten(-1, (-1, D)).transpose(0, 1) for p in "qkv")
        q, k = rotated(rms(q, w["qn"])), rotated(rms(k, w["kn"]))
        k, v = (side.repeat_interleave(N // K, 0) for side in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
        x = x + out @ w["o"].T
        h = rms(x, w["mlp_norm"])
        x = x + (F.silu(h @ w["gate"].T) * (h @ w["up"].T)) @ w["down"].T
    return rms(x[-1], t["last"]) @ t["out"].T


def test_a_toy_family_is_described_in_full_and_decodes_like_its_reference(
    registered: None, tensors: dict, tmp_path: Path
) -> None:
    trees, folder = (("plain", Topology.plain()),), tmp_path / "bundle"
    build(BuildRequest(model=tmp_path, drafter=None, trees=trees, slots=(128,), prefill_rows=()), folder)
    described = read_manifest(folder).teacher.config
    assert described_config(described) == read_config(tmp_path) and described["embedding_scale"] == SCALE
    bundle, ids = Bundle.open(folder), [5, 17, 3]
    options = Options(max_new_tokens=24)
    found = Decoding(CpuEngine(bundle), ids, options, FixedTree(bundle)).run()
    text = list(ids)
    for _ in range(24):
        logits = reference(tensors, text)
        best = logits.topk(2).values
        assert best[0] - best[1] > 1e-4  # well above fp32's rounding, so that one token is right
        text.append(int(logits.argmax()))
    assert list(found.token_ids) == text[3:] and len(set(text)) > 6


def test_a_toy_familys_weights_are_made_of_its_tensors(registered: None, tensors: dict, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tmp_path)
    assert torch.equal(checkpoint.weight("embed.weight"), tensors["emb"].T)
    gate_up = torch.cat([tensors[f"b1.{name}"] for name in ("gate", "up")])
    assert torch.equal(checkpoint.weight("layers.1.gate_up.weight"), gate_up)
    assert checkpoint.parts["embed.weight"].concatenated == ()
    assert checkpoint.parts["layers.1.gate_up.weight"].concatenated == ("b1.gate", "b1.up")


def test_a_familys_own_refusals_name_its_fields(registered: None, tensors: dict, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["ToyForCausalLM"], "depth": 2}')
    with pytest.raises(CheckpointError, match="scale is None; expected a finite number"):
        read_config(tmp_path)


def test_the_table_of_families_is_the_registry_and_every_cell_a_test() -> None:
    """docs/own-model.md says yes where ``test_family_bundles`` (onnx) and ``ge/test_families`` hold a family."""
    root = Path(__file__).resolve().parents[2]
    text = (root / "docs/own-model.md").read_text()
    rows = re.findall(r"^\|.*\| `(\w+)ForCausalLM` \|.*\| (\w+) \| (\w+) \|$", text, re.M)
    assert [f"{name}ForCausalLM" for name, *_ in rows] == [family.architecture for family in registry.FAMILIES.values()]
    tests = [(root / "tests/compiler" / file).read_text() for file in ("test_family_bundles.py", "ge/test_families.py")]
    for name, *cells in rows:
        assert cells == ["yes" if f'"{name}"' in test else "no" for test in tests]


def test_unknown_families_are_refused(tensors: dict, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"architectures is .*Toy.*; expected one of Llama.*, Pangu"):
        read_config(tmp_path)
    with pytest.raises(BundleError, match=r"teacher of family .toy.; expected one of llama, .*, pangu-embedded;"):
        described_config({"family": "toy"})
    with pytest.raises(BundleError, match="teacher of family llama: its configuration is damaged"):
        described_config({"family": "llama", "layers": "two"})


class DoubledLayer(Layer):
    """Queries are twice as long, with heads that an NPU turns as whole rows where nothing else is to be done."""

    def project(self, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x_TH)
        return 2 * q, k, v


class DoubledDecoder(Decoder):
    def make_layer(self, index: int) -> Layer:
        return DoubledLayer(self.config)


def test_an_npus_form_keeps_a_familys_own_projection() -> None:
    """With one key head the caches of both forms have one shape."""
    values = Toy().values(Fields(Path("config.json"), {"depth": L, "scale": SCALE})) | {"head_dim": 64, "kv_heads": 1}
    decoder = DoubledDecoder(ToyConfig(**values), 16).requires_grad_(False)
    for tensor in (*decoder.parameters(), *decoder.buffers()):
        tensor.normal_(0, 0.3, generator=torch.Generator().manual_seed(tensor.numel()))
    zero, rows = torch.zeros(1, dtype=torch.int64), torch.arange(2)
    inputs = (rows + 5, rows, torch.ones(2, 2).tril().bool(), zero, zero, zero, torch.zeros(L, 2, 2, 1, 64))
    got, want = (
        decoder.step(*inputs, [torch.zeros(16, 64) for _ in range(2 * L)], form=form).logits_RV
        for form in ("npu", "eager")
    )
    # fp32 in another order of sums, of numbers of order 1; without the factor 2 logits differ by 6e-2.
    torch.testing.assert_close(got, want, rtol=0, atol=1e-3)
