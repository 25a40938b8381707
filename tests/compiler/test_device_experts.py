"""The cost of a mixture of experts against sums done by hand."""

import math

import pytest

from draftwood.compiler.device import experts
from draftwood.compiler.device.devices import DEVICES
from draftwood.compiler.device.experts import mixture_ops, touched_experts
from draftwood.compiler.device.steps import step_ops, step_s
from draftwood.compiler.device.table import modelled_table
from draftwood.compiler.teachers.checkpoint import expected_tensors
from draftwood.compiler.teachers.registry import read_config
from draftwood.tools.demo import SHAPES
from draftwood.trees.latency import LatencyTable

B3 = DEVICES["ascend-910b3"]
# 128 experts of 768 by 2048, 8 a token, 48 layers.
QWEN = read_config(SHAPES["shape:qwen3-30b-a3b"])


def streamed(rows: int) -> float:
    """Bytes of the experts' matrices that one layer reads, activations left out."""
    grouped = [op for op in mixture_ops(QWEN, rows) if op.name.startswith("experts")]
    inner = (2048 + 2 * 768) + (768 + 2048)
    return sum(op.memory for op in grouped) - 2 * rows * 8 * inner


def test_rows_that_choose_evenly_touch_nearly_all_experts() -> None:
    assert touched_experts(QWEN, 1) == pytest.approx(8, rel=1e-12)
    assert touched_experts(QWEN, 16) == pytest.approx(128 * (1 - (15 / 16) ** 16), rel=1e-12)  # 82.4
    assert 125 < touched_experts(QWEN, 64) < 128


def test_a_step_reads_the_experts_that_it_touches() -> None:
    matrices = 3 * 768 * 2048 * 2  # bytes of one expert
    assert streamed(1) == pytest.approx(8 * matrices, rel=1e-9)
    assert streamed(16) == pytest.approx(82.4 * matrices, rel=1e-3)


def test_every_expert_touched_is_every_matrix_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "touched_experts", lambda config, rows: float(config.experts))
    held = expected_tensors(QWEN).items()
    matrices = sum(math.prod(s) for n, s in held if len(s) == 2 and n != "model.embed_tokens.weight")
    products = [op for op in step_ops(QWEN, 512, 1024) if op.engine == "matmul"]
    # Each is padded to whole fractals: 512 rows fill those of the dense products, 32 rows an expert two of them.
    dense = sum(op.count * op.cube / 2 / 512 for op in products if not op.name.startswith("experts"))
    mixed = sum(op.count * op.cube / 2 / 32 for op in products if op.name.startswith("experts"))
    assert dense + mixed == pytest.approx(matrices, rel=1e-9)


def test_a_hair_less_than_every_expert_is_every_expert() -> None:
    assert 0 < 128 - touched_experts(QWEN, 512) < 1e-9
    (down,) = (op for op in mixture_ops(QWEN, 512) if op.name == "experts down")
    assert down.cube == pytest.approx(2 * 128 * 32 * 768 * 2048, rel=1e-9)  # 32 rows an expert, two fractals


def test_a_tree_costs_a_mixture_more_than_a_dense_teacher() -> None:
    dense = read_config(SHAPES["shape:qwen3-8b"])
    assert step_s(B3, dense, 16, 1024) < 1.05 * step_s(B3, dense, 1, 1024)
    assert step_s(B3, QWEN, 16, 1024) > 2 * step_s(B3, QWEN, 1, 1024)


def test_a_table_says_what_its_steps_touch() -> None:
    table = LatencyTable.from_json(modelled_table(B3, QWEN, (1, 16), (1024,)).to_json())
    assert table.teacher["experts"] == {"experts": 128, "per_token": 8}
    assert "of 128, by its rows: 8 at 1, 82 at 16; taken to be chosen evenly" in table.notes[-1]
