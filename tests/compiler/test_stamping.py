"""Graphs that are stamped from a few blocks are those of the whole trace: nodes, attributes, weights and shapes.

The whole trace of each step, family and precision is translated with the exporter's replacement of operators that have
no form, all others without it.
"""

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import onnx
import pytest
import torch
from onnx import numpy_helper
from torch.onnx._internal.exporter import _fx_passes

from draftwood.compiler.onnx import exporter
from draftwood.compiler.onnx.lowering import lower_to_onnx
from draftwood.compiler.onnx.weights import WeightSpan
from draftwood.compiler.steps.any_size import cpu_step
from draftwood.compiler.steps.bitwise import bitwise_step
from draftwood.compiler.steps.prefill import prefill_step
from draftwood.compiler.steps.short import ShortStep, Unlike, shortened
from draftwood.compiler.steps.step import Step, StepSizes
from draftwood.compiler.steps.tracing import trace
from draftwood.compiler.steps.verify import verify_step
from draftwood.compiler.teachers.config import PackedLayer
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.compiler.teachers.linear import packed, quantised
from draftwood.contract import texts_signature

LAYERS = 6  # the fewest of which not all are traced
SIZES = StepSizes(branch_rows=7, path_rows=4)
MIXTURE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
STEPS: dict[str, Callable[[Decoder], Step]] = {
    "any size": cpu_step,
    "verify": lambda decoder: verify_step(decoder, SIZES, 4, 128),  # fewer rows than the branch: zeros are joined
    "prefill": lambda decoder: prefill_step(decoder, SIZES, 8, 128),
    "bitwise": bitwise_step,
}
SHARES = ("qkv", "o", "gate_up", "down")
SLOW = pytest.mark.slow


def seen(path: Path) -> dict[str, Any]:
    """A graph without its names: each value by its computation."""
    graph = onnx.load(str(path), load_external_data=False).graph
    ids = {"": ""} | {value.name: _digest(value.name, value.type.SerializeToString()) for value in graph.input}
    for tensor in graph.initializer:
        place = sorted((entry.key, entry.value) for entry in tensor.external_data)
        held = place or numpy_helper.to_array(tensor).tobytes()
        ids[tensor.name] = _digest(held, tuple(tensor.dims), tensor.data_type)
    nodes = _nodes(graph, ids)
    return {
        "outputs": [(value.name, ids[value.name], value.type.SerializeToString()) for value in graph.output],
        "nodes": sorted(nodes),
        "shapes": sorted((ids[value.name], value.type.SerializeToString()) for value in graph.value_info),
    }


def _nodes(graph: onnx.GraphProto, ids: dict[str, str]) -> list[str]:
    """Every node by its computation; ``ids`` gets its outputs."""
    nodes = []
    for node in graph.node:
        attributes = sorted(
            (a.name, _body(a.g, ids) if a.HasField("g") else a.SerializeToString())
            for a in node.attribute
            if a.name != "allowzero"  # of a Reshape: no size here is zero
        )
        nodes.append(_digest(node.domain, node.op_type, attributes, [ids[name] for name in node.input]))
        ids |= {name: _digest(nodes[-1], place) for place, name in enumerate(node.output)}
    return nodes


def _body(graph: onnx.GraphProto, around: dict[str, str]) -> bytes:
    """The body of a loop by its computation from the values around it."""
    ids = around | {value.name: f"input {place}" for place, value in enumerate(graph.input)}
    ids |= {tensor.name: _digest(numpy_helper.to_array(tensor).tobytes()) for tensor in graph.initializer}
    _nodes(graph, ids)
    return repr([ids[value.name] for value in graph.output]).encode()


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def lowered(step: Step, short: ShortStep | None, path: Path, texts: int = 1) -> list[dict[str, Any]]:
    """The graph of a step, and that of several texts."""
    names = [name for name in step.module.state_dict() if step.weight_name(name)]
    tensors = step.module.state_dict()
    spans = {
        str(step.weight_name(name)): WeightSpan(tuple(tensors[name].shape), 4096 * place, tensors[name].nbytes)
        for place, name in enumerate(names)
    }
    path.mkdir()
    (path / "w").write_bytes(bytes(4096 * len(names) + 2**20))
    several = [texts_signature(step.signature, texts)] if texts > 1 else []
    program = trace(short.step if short else step)
    lower_to_onnx(step, program, spans, "w", path / "one.onnx", several, short)
    return [seen(file) for file in sorted(path.glob("*.onnx"))]


def check(
    decoder: Decoder, make: Callable[[Decoder], Step], tmp_path: Path, texts: int = 1, replaced: bool = True
) -> None:
    """``replaced``: whether operators without a form are replaced in the whole trace, as in torch.onnx.export's."""
    short = shortened(decoder)
    assert short is not None and len(short.blocks) < len(decoder.layers)
    with patch.object(exporter, "_has_forms", lambda program, registry: not replaced):
        whole = lowered(make(decoder), None, tmp_path / "whole", texts)
    with patch.object(_fx_passes, "decompose_with_registry", side_effect=AssertionError("an operator without a form")):
        stamped = lowered(make(decoder), ShortStep(short, make(short.decoder)), tmp_path / "stamped", texts)
    for one, other in zip(whole, stamped, strict=True):
        for part in one:
            assert one[part] == other[part], part


# The usual run has a family with blocks of two kinds, and the Llama of all other tests.
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        pytest.param("Qwen2", {}, marks=SLOW),
        pytest.param("Qwen3", {"head_dim": 24}, marks=SLOW),
        (
            "Qwen3Moe",
            {**MIXTURE, "norm_topk_prob": True, "mlp_only_layers": [0, 3], "head_dim": 16, "num_hidden_layers": 8},
        ),
        pytest.param("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}, marks=SLOW),
        pytest.param("Glm4", {"head_dim": 24, "pad_token_id": 0}, marks=SLOW),
    ],
)
def test_families(tmp_path: Path, save_llama: Callable, load_decoder: Callable, family: str, fields: dict) -> None:
    save_llama(tmp_path, family=family, **{"num_hidden_layers": LAYERS, **fields})
    check(load_decoder(tmp_path, 128), cpu_step, tmp_path, texts=2)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, save_llama: Callable) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_llama(folder, num_hidden_layers=LAYERS)
    return folder


# A prefill's blocks are those of a verify step.
@pytest.mark.parametrize("name", ["any size", "verify", pytest.param("prefill", marks=SLOW), "bitwise"])
def test_steps(tmp_path: Path, llama: Path, load_decoder: Callable, name: str) -> None:
    check(load_decoder(llama, 128), STEPS[name], tmp_path)


@pytest.mark.parametrize(("layers", "aux"), [pytest.param(12, (1, 4, 6), marks=SLOW), (8, (0, 3, 8)), (8, (5,))])
def test_states_that_a_drafter_reads(
    tmp_path: Path, save_llama: Callable, load_decoder: Callable, layers: int, aux: tuple[int, ...]
) -> None:
    save_llama(tmp_path, num_hidden_layers=layers)
    decoder = load_decoder(tmp_path, 128)
    decoder.aux_layers = aux
    check(decoder, cpu_step, tmp_path, replaced=False)


def test_few_blocks_are_traced_whole(llama: Path, load_decoder: Callable) -> None:
    decoder = load_decoder(llama, 128)
    assert shortened(decoder) is not None
    decoder.aux_layers = (1, 3)
    assert shortened(decoder) is None, "four of six blocks"


@pytest.mark.parametrize("name", ["any size", pytest.param("bitwise", marks=SLOW)])
def test_blocks_of_several_precisions(tmp_path: Path, save_llama: Callable, load_decoder: Callable, name: str) -> None:
    """As in a GGUF file's mixture: four bits with a minimum, and some matrices in eight."""
    save_llama(tmp_path, num_hidden_layers=8)
    decoder = load_decoder(tmp_path, 128)
    layers = [
        PackedLayer(
            name=f"layers.{i}.{part}",
            bits=8 if part == "down" and i in (0, 5, 6) else 4,
            zeros=False,
            minimum=i not in (5, 6),
        )
        for i in range(8)
        for part in SHARES
    ]
    packed(decoder, layers)
    check(_filled(decoder), STEPS[name], tmp_path)


def test_whole_numbers(tmp_path: Path, llama: Path, load_decoder: Callable) -> None:
    decoder = load_decoder(llama, 128)
    quantised(decoder, [f"layers.{i}.{part}" for i in range(LAYERS) for part in SHARES])
    check(_filled(decoder), cpu_step, tmp_path, texts=2)


def _filled(decoder: Decoder) -> Decoder:
    for tensor in decoder.state_dict().values():
        if tensor.is_floating_point():
            tensor.data.uniform_(0.5, 1.5)
        else:
            tensor.data.random_(0, 100)
    return decoder.requires_grad_(False)


def test_equal_weights_stay_apart(tmp_path: Path, llama: Path, load_decoder: Callable) -> None:
    """Norms that are alike in the blocks that are traced need not be alike in others."""
    decoder = load_decoder(llama, 128)
    short = shortened(decoder)
    assert short is not None
    for number in short.blocks:
        layer = decoder.layers[number]
        layer.mlp_norm.weight.data.copy_(layer.attn_norm.weight)
    check(decoder, cpu_step, tmp_path, replaced=False)


def test_a_constant_of_one_block_is_noticed(
    tmp_path: Path, llama: Path, load_decoder: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A constant that is no weight, as one folded from weights is, would be wrong in another block."""
    decoder = load_decoder(llama, 128)
    short = shortened(decoder)
    assert short is not None
    for layer in decoder.layers:
        numbers = torch.randn(64)
        monkeypatch.setattr(layer, "mlp", partial(torch.add, numbers))
    with pytest.raises(Unlike, match="constant of block"):
        lowered(cpu_step(decoder), ShortStep(short, cpu_step(short.decoder)), tmp_path / "stamped")
