"""The constants of the device model that hold for every device, each with its source."""

from __future__ import annotations

from draftwood.trees.latency import Assumption

CUBE_EFFICIENCY = Assumption(
    name="cube efficiency",
    value=0.7,
    unit="of peak",
    mark="vendor simulator",
    source="Ascend/msmodeling, tensor_cast/device.py: compute_efficiency, said there to need calibration",
)
MEMORY_EFFICIENCY = Assumption(
    name="memory efficiency",
    value=0.6,
    unit="of peak",
    mark="vendor simulator",
    source="Ascend/msmodeling, tensor_cast/device.py: memory_efficiency, said there to need calibration",
)
CUBE_OVERHEAD = Assumption(
    name="fixed cost of an operator with matrix work",
    value=5e-6,
    unit="s",
    mark="vendor simulator",
    source="Ascend/msmodeling, tensor_cast/device.py: mma_op_cost_s, said there to need confirmation",
)
VECTOR_OVERHEAD = Assumption(
    name="fixed cost of a vector operator",
    value=2e-6,
    unit="s",
    mark="vendor simulator",
    source="Ascend/msmodeling, tensor_cast/device.py: gp_op_cost_s, said there to need confirmation",
)
AI_CPU_OVERHEAD = Assumption(
    name="fixed cost of an operator on the AI CPU",
    value=50e-6,
    unit="s",
    mark="assumption",
    source="a task that is handed to another processor and waited for; nobody has measured it on these graphs",
)
AI_CPU_BANDWIDTH = Assumption(
    name="what the AI CPU works through",
    value=1e9,
    unit="bytes/s",
    mark="assumption",
    source="one Arm core, element by element; nobody has measured it on these graphs",
)
FRACTAL_ROWS = Assumption(
    name="rows a matrix product is padded to",
    value=16,
    unit="rows",
    mark="public document",
    source="Ascend C guide: the cube works on 16 x 16 fractals of fp16 or bf16",
)
L2_RATIO = Assumption(
    name="L2 bandwidth over HBM bandwidth",
    value=5,
    unit="times",
    mark="code",
    source="hicann/catlass, include/acot/arch/arch.hpp",
)
SCORE_BYTES = Assumption(
    name="bytes of a score that pass between cube and vector cores",
    value=12,
    unit="bytes",
    mark="assumption",
    source="scores in fp32 and probabilities in bf16, each written once and read once through L2, because the two"
    " kinds of core share no buffer (Ascend C architecture guide)",
)
ELEMENT_WORK = Assumption(
    name="vector work per element of a norm, softmax, activation or argmax",
    value=8,
    unit="FLOP",
    mark="assumption",
    source="order of magnitude; if it decides, the result is no better than a factor of two",
)
COLLECTIVE_OVERHEAD = Assumption(
    name="fixed cost of a collective of several devices",
    value=1e-5,
    unit="s",
    mark="vendor simulator",
    source="Ascend/msmodeling, tensor_cast/device.py: comm_op_cost_s, said there to need confirmation",
)
LINK_EFFICIENCY = Assumption(
    name="link efficiency",
    value=0.7,
    unit="of peak",
    mark="vendor simulator",
    source="Ascend/msmodeling, tensor_cast/device.py: comm_efficiency, said there to need confirmation",
)
MESH_DEVICES = Assumption(
    name="devices of a full mesh: N of them use N - 1 of its links",
    value=8,
    unit="devices",
    mark="vendor simulator",
    source="Ascend/msmodeling, tensor_cast/device.py: A2_INTERCONNECT; comm_analytic.py: a group of a full mesh",
)
MOVED_ROWS = Assumption(
    name="accepted rows that a step writes into place",
    value=8,
    unit="rows",
    mark="assumption",
    source="deferred commit moves at most depth + 1 rows inside the step's own cache write",
)
INPUT_SECONDS = Assumption(
    name="host: copying a step's inputs to the device",
    value=5e-5,
    unit="s",
    mark="public document",
    source="fengz72/qwen2.5-varlen-npu, latency_benchmark.md: 0.05 ms, .om of a 0.5B model on Ascend910_9382",
)
OUTPUT_SECONDS = Assumption(
    name="host: copying a step's results back",
    value=1.1e-4,
    unit="s",
    mark="public document",
    source="fengz72/qwen2.5-varlen-npu, latency_benchmark.md: 0.11 ms for 3 MB of logits; choices alone are less",
)
LINKS = (COLLECTIVE_OVERHEAD, LINK_EFFICIENCY, MESH_DEVICES)
COMMON = (
    *(CUBE_EFFICIENCY, MEMORY_EFFICIENCY, CUBE_OVERHEAD, VECTOR_OVERHEAD, FRACTAL_ROWS, L2_RATIO),
    *(SCORE_BYTES, ELEMENT_WORK, MOVED_ROWS, INPUT_SECONDS, OUTPUT_SECONDS),
)
