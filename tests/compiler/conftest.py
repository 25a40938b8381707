"""Tiny random teachers on disk, as Hugging Face folders, and the decoder that reads them."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.drafters.medusa.model import MedusaModel
from draftwood.compiler.drafters.medusa.network import MedusaConfig, MedusaHeads
from draftwood.compiler.targets.modules import load_modules
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.compiler.teachers.registry import family_of, make_decoder
from draftwood.manifest import Manifest
from draftwood.trees import Topology

SIZES = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small lose more to waking threads than they win, most of all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def save_llama() -> Callable[..., PreTrainedModel]:
    """Writes a random Llama, or a model of another family of transformers, into a folder and returns it.

    No weight keeps its neutral initial value.
    """

    def save(
        folder: Path, dtype: torch.dtype = torch.float32, family: str = "Llama", **fields: object
    ) -> PreTrainedModel:
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**{**SIZES, **fields}, attn_implementation="eager")
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.15)
        model.to(dtype).save_pretrained(folder)
        return model

    return save


@pytest.fixture(scope="session")
def save_pangu() -> Callable[..., LlamaForCausalLM]:
    """Writes an openPangu folder by hand and returns a Llama of the same function."""

    def save(folder: Path, dtype: torch.dtype = torch.float32, **fields: object) -> LlamaForCausalLM:
        torch.manual_seed(0)
        rope = {"rope_type": "default", "rope_theta": 1.6e7}
        sizes = {**SIZES, **fields}
        twin = LlamaConfig(**sizes, attention_bias=True, rope_parameters=rope, attn_implementation="eager")
        model = LlamaForCausalLM(twin).eval()
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.15)
        named = {"architectures": ["PanguEmbeddedForCausalLM"], "model_type": "PanguEmbedded"}
        config = {**named, **sizes, "bias": True, "rope_theta": 16000000.0, "hidden_act": "silu"}
        (folder / "config.json").write_text(json.dumps(config))
        inverse = {
            f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(twin.num_hidden_layers)
        }
        save_file(model.to(dtype).state_dict() | inverse, folder / "model.safetensors")
        return model

    return save


@pytest.fixture(scope="session")
def load_decoder() -> Callable[[Path, int], Decoder]:
    """The fp32 decoder of a folder, with rotary tables for a number of positions."""

    def load(folder: Path, positions: int) -> Decoder:
        checkpoint = Checkpoint.open(folder)
        tables = family_of(checkpoint.config).tables(checkpoint.config, positions).items()
        weights = {name: checkpoint.weight(name).float() for name in checkpoint.names()}
        decoder = make_decoder(checkpoint.config, positions)
        decoder.load_state_dict(weights | {name: torch.from_numpy(table) for name, table in tables})
        return decoder.requires_grad_(False)

    return load


def medusa_tensors(heads: int, blocks: int, tied: bool, hidden: int = 64, vocabulary: int = 101) -> dict:
    """Heads as people publish them, random."""
    torch.manual_seed(1)
    tensors = {}
    for i in range(heads):
        for j in range(blocks):
            tensors[f"{i}.{j}.linear.weight"] = torch.randn(hidden, hidden) * 0.15
            tensors[f"{i}.{j}.linear.bias"] = torch.randn(hidden) * 0.15
        if not tied:
            tensors[f"{i}.{blocks}.weight"] = torch.randn(vocabulary, hidden) * 0.15
    return tensors


@pytest.fixture(scope="session")
def save_medusa() -> Callable[..., dict]:
    """Writes random heads into a folder and returns their tensors by published name."""

    def save(folder: Path, heads: int = 3, blocks: int = 1, tied: bool = False) -> dict:
        tensors = medusa_tensors(heads, blocks, tied)
        save_file(tensors, folder / "medusa_lm_head.safetensors")
        return tensors

    return save


# Rows 1 (0,), 2 (1,), 3 (0, 0), 4 (0, 1), 5 (1, 0), 6 (0, 1, 0).
RAGGED = Topology.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)])


@dataclass(frozen=True)
class Built:
    """A bundle, its sources, and its modules in eager form."""

    folder: Path
    request: BuildRequest
    manifest: Manifest
    decoder: Decoder
    heads: MedusaHeads | None


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, save_pangu: Callable, save_medusa: Callable) -> Built:
    """openPangu in bf16 with a tokenizer, three Medusa heads with their own output, the plain and a ragged tree."""
    source = tmp_path_factory.mktemp("source")
    save_pangu(source, torch.bfloat16)
    (source / "tokenizer.json").write_text('{"version": "1.0"}')
    (source / "tokenizer_config.json").write_text("{}")
    (source / "heads").mkdir()
    save_medusa(source / "heads")
    trees = (("plain", Topology.plain()), ("ragged", RAGGED))
    request = BuildRequest(model=source, drafter=source / "heads", trees=trees, slots=(128,))
    folder = tmp_path_factory.mktemp("built") / "bundle"
    manifest = build(request, folder)
    weights = folder / manifest.graph_set("onnx").weights
    decoder, heads = load_modules(weights, Checkpoint.open(source).config, MedusaModel(MedusaConfig(3, 1, False)))
    return Built(folder, request, manifest, decoder, heads)
