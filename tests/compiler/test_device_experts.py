"""The cost of a mixture of experts against sums done by hand, and loads that were measured."""

import math

import pytest

from draftwood.compiler.device.devices import DEVICES
from draftwood.compiler.device.experts import ExpertLoads, expert_loads, mixture_ops
from draftwood.compiler.device.steps import step_ops, step_s
from draftwood.compiler.device.table import modelled_table
from draftwood.compiler.teachers.checkpoint import expected_tensors
from draftwood.compiler.teachers.registry import read_config
from draftwood.errors import RequestError
from draftwood.tools.demo import SHAPES
from draftwood.trees.latency import LatencyTable

B3 = DEVICES["ascend-910b3"]
# 128 experts of 768 by 2048, 8 a token, 48 layers.
QWEN = read_config(SHAPES["shape:qwen3-30b-a3b"])
EVEN = expert_loads(QWEN)


def streamed(rows: int, loads: ExpertLoads = EVEN) -> float:
    """Bytes of the experts' matrices that one layer reads, activations left out."""
    grouped = [op for op in mixture_ops(QWEN, rows, loads) if op.name.startswith("experts")]
    inner = (2048 + 2 * 768) + (768 + 2048)
    return sum(op.memory for op in grouped) - 2 * rows * 8 * inner


def test_rows_that_choose_evenly_touch_nearly_all_experts() -> None:
    assert EVEN.touched(1) == pytest.approx(8, rel=1e-12)
    assert EVEN.touched(16) == pytest.approx(128 * (1 - (15 / 16) ** 16), rel=1e-12)  # 82.4
    assert 125 < EVEN.touched(64) < 128


def test_a_step_reads_the_experts_that_it_touches() -> None:
    matrices = 3 * 768 * 2048 * 2  # bytes of one expert
    assert streamed(1) == pytest.approx(8 * matrices, rel=1e-9)
    assert streamed(16) == pytest.approx(82.4 * matrices, rel=1e-3)


def test_every_expert_touched_is_every_matrix_of_the_checkpoint() -> None:
    held = expected_tensors(QWEN).items()
    matrices = sum(math.prod(s) for n, s in held if len(s) == 2 and n != "model.embed_tokens.weight")
    everything = ExpertLoads(128, 8, {1: 128.0})
    products = [op for op in step_ops(QWEN, 512, 1024, loads=everything) if op.engine == "matmul"]
    # Each is padded to whole fractals: 512 rows fill those of the dense products, 32 rows an expert two of them.
    dense = sum(op.count * op.cube / 2 / 512 for op in products if not op.name.startswith("experts"))
    experts = sum(op.count * op.cube / 2 / 32 for op in products if op.name.startswith("experts"))
    assert dense + experts == pytest.approx(matrices, rel=1e-9)


def test_a_tree_costs_a_mixture_more_than_a_dense_teacher() -> None:
    dense = read_config(SHAPES["shape:qwen3-8b"])
    assert step_s(B3, dense, 16, 1024) < 1.05 * step_s(B3, dense, 1, 1024)
    assert step_s(B3, QWEN, 16, 1024) > 2 * step_s(B3, QWEN, 1, 1024)


def test_a_table_says_what_its_steps_touch() -> None:
    table = LatencyTable.from_json(modelled_table(B3, QWEN, (1, 16), (1024,)).to_json())
    assert table.teacher["experts"] == {"experts": 128, "per_token": 8, "measured": None}
    assert "of 128, by its rows: 8 at 1, 82 at 16; taken to be chosen evenly" in table.notes[-1]


def test_measured_loads_take_the_place_of_even_ones() -> None:
    loads = expert_loads(QWEN, {1: 8.0, 16: 38.0})
    assert [loads.touched(rows) for rows in (1, 6, 16, 99)] == [8.0, 18.0, 38.0, 38.0]
    lower, even = (modelled_table(B3, QWEN, (1, 16), (1024,), loads=found) for found in (loads, None))
    assert lower.step_s(16, 1024) < even.step_s(16, 1024) and lower.step_s(1, 1024) == even.step_s(1, 1024)
    assert lower.teacher["experts"]["measured"] == {"1": 8.0, "16": 38.0} and "as measured" in lower.notes[-1]


@pytest.mark.parametrize("loads", [{1: 200.0}, {1: 4.0}, {0: 8.0}])
def test_loads_of_other_experts_are_refused(loads: dict[int, float]) -> None:
    with pytest.raises(RequestError, match="expected 8 to 128 at 1 row or more; measure them with this teacher"):
        expert_loads(QWEN, loads)
