"""Matrices as kernels read them lie in a bundle's weights file, and onnxruntime finds them there."""

from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
from safetensors.numpy import load_file

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.teachers.conversion import Precision
from draftwood.runtime.bundle import Bundle
from draftwood.threads import pool_options
from draftwood.trees import Topology

TREES = (("plain", Topology.plain()), ("chain", Topology.chain(2)))


def layouts(graph: Path) -> set[tuple[str, str]]:
    """Initializers with the names of their layouts, an operator's and a hash of the content."""
    return {
        (tensor.name, entry.value.split("|")[0])
        for tensor in onnx.load(str(graph), load_external_data=False).graph.initializer
        for entry in tensor.external_data
        if entry.key.startswith("prepacked")
    }


def made_by_onnxruntime(graph: Path, folder: Path) -> set[tuple[str, str]]:
    """The layouts that it makes when it opens the whole graph and is told of none."""
    model = onnx.load(str(graph), load_external_data=False)
    for tensor in model.graph.initializer:
        places = [entry for entry in tensor.external_data if not entry.key.startswith("prepacked")]
        del tensor.external_data[:]
        tensor.external_data.extend(places)
    options = pool_options(threads=1, spins=False)
    options.optimized_model_filepath = str(folder / "whole.onnx")
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "whole.bin")
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1")
    options.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(graph.parent))
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return layouts(folder / "whole.onnx")


@pytest.mark.parametrize("precision", ["nbits", "w8a8", pytest.param("exact", marks=pytest.mark.slow)])
def test_every_matrix_of_a_step_is_found_laid_out(
    precision: Precision, tiny_eagle3: Path, save_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """What onnxruntime lays out of a whole graph has the names of what lies in the file: it takes that instead."""
    teacher = save_tiny(tmp_path, hidden_size=64, intermediate_size=96)
    request = BuildRequest(
        model=teacher, drafter=tiny_eagle3, trees=TREES, slots=(128,), prefill_rows=(), precision=precision, texts=2
    )
    build(request, tmp_path / "bundle")
    bundle = Bundle.open(tmp_path / "bundle")
    running = [graph for graph in bundle.manifest.graphs_of("onnx") if not graph.slots]
    assert {graph.kind for graph in running} >= {"step", "batch", "draft", "draft-texts", "extend"}
    for graph in running:
        made = made_by_onnxruntime(bundle.folder / graph.file, tmp_path)
        assert made and made <= layouts(bundle.folder / graph.file)
    names = [name for name in load_file(bundle.folder / "onnx/weights.safetensors") if name.startswith("layouts.")]
    assert len(names) == len({*names}) and not any(
        layouts(bundle.folder / graph.file) for graph in bundle.manifest.graphs_of("onnx") if graph.slots
    )
