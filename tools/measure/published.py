"""Holds the analytic device model against two published results on openPangu-7B, and says what it cannot explain.

    python -m draftwood.tools.measure.published [--json]

Both systems ran eager PyTorch: 17.65 tokens/s is 57 ms a token where streaming the weights takes 14 ms, so their
time is the host's, which the model of a static graph does not have. It is added here as one explicit parameter,
the time the host needs to launch an operator, fitted to that one figure; everything else is then a prediction.

Sources: EAGLE-Pangu, arXiv 2603.08088 (figures as reported in summaries of it); Medusa on openPangu-7B, arXiv
2603.03383, and its code, wujing215/OpenPangu7B-with-Medusa. Operators of eager steps were counted in that code.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from draftwood.compiler.device.devices import DEVICES, DeviceSpec, parts
from draftwood.compiler.device.operators import Op, attention, copy, elementwise, matmul
from draftwood.compiler.device.steps import step_s
from draftwood.compiler.drafters.eagle3.cost import Eagle3Cost
from draftwood.compiler.drafters.medusa.cost import MedusaCost
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.trees.latency import Constant

OPENPANGU_7B = TeacherConfig(
    family="pangu-embedded",
    layers=34,
    hidden=4096,
    intermediate=12800,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocabulary=153376,
    rms_norm_eps=1e-5,
    rope_theta=1.6e7,
    rope_scaling=None,
    max_positions=32768,
    qkv_bias=True,
    o_bias=True,
    tied=False,
    dtype="bfloat16",
    bos=1,
    eos=(45892,),
)
# EAGLE-Pangu: tokens/s of the teacher alone and with trees, accept length, best budget, depth, mean lengths.
EAGLE = {"plain": 17.65, "tree": 22.42, "accept": 3.17, "nodes": 16, "depth": 10, "prompt": 501, "answer": 891}
# Medusa: by length, tokens a step and time of a step over that of plain decoding; 32 nodes and 5 heads.
MEDUSA = {128: (1.78, 1.32), 256: (1.75, 1.40), 512: (1.70, 1.55), 1024: (1.65, 1.77)}
MEDUSA_NODES, MEDUSA_HEADS = 32, 5
# Operators that the code launches beside those of the decoder blocks.
_MODEL_OPS, _MEDUSA_OPS, _DRAFT_OPS, _COMMIT_OPS = 26, 45, 25, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Eager:
    """Eager PyTorch on a device: what the host adds."""

    device: DeviceSpec
    # Seconds between two launches.
    launch: float
    # Seconds a step spends on turning each token of the answer so far into text again.
    text: float = 0.0

    def seconds(self, ops: Iterable[Op]) -> float:
        """One stream: the host launches an operator every ``launch`` seconds, the device runs them in order."""
        issued = done = 0.0
        for op in ops:
            for _ in range(op.count):
                issued += self.launch
                done = max(done, issued) + self.device.seconds(op)
        return done


def eager_layer(config: TeacherConfig, rows: int, slots: int) -> list[Op]:
    """One unfused block, 41 operators: norms of 8, rotary of 10, caches that grow by concatenation."""
    H, I = config.hidden, config.intermediate  # noqa: E741
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return [
        elementwise("norm", rows * H, 2, count=8),
        matmul("q", rows, H, queries),
        matmul("k and v", rows, H, keys, count=2),
        elementwise("rotary", rows * queries, 2, count=10),
        copy("longer cache", keys * slots, count=2),
        attention(config, rows, slots),
        copy("transpose", rows * queries),
        matmul("o", rows, queries, H),
        elementwise("residual", rows * H, 3),
        elementwise("norm", rows * H, 2, count=8),
        matmul("gate and up", rows, H, I, count=2),
        elementwise("silu and product", rows * I, 2, count=2),
        matmul("down", rows, I, H),
        elementwise("residual", rows * H, 3),
    ]


def eager_step(config: TeacherConfig, rows: int, slots: int) -> list[Op]:
    """A whole eager teacher step."""
    small = elementwise("embedding, rotary tables, mask, last norm, argmax", rows * config.hidden, 2, count=_MODEL_OPS)
    return [
        *(op for _ in range(config.layers) for op in eager_layer(config, rows, slots)),
        small,
        matmul("head", rows, config.hidden, config.vocabulary),
    ]


def medusa_step(config: TeacherConfig, rows: int, slots: int) -> list[Op]:
    """Their Medusa step: every head with a matrix of its own, on every row of the tree."""
    H, V, heads = config.hidden, config.vocabulary, MEDUSA_HEADS
    return [
        *eager_step(config, rows, slots),
        *(
            op
            for _ in range(heads)
            for op in (
                matmul("block", rows, H, H),
                elementwise("silu and residual", rows * H, 2, count=2),
                matmul("head", rows, H, V),
            )
        ),
        copy("stacked logits", heads * rows * V),
        elementwise("candidates, acceptance, caches", rows * H, 2, count=_MEDUSA_OPS),
    ]


def eagle_step(config: TeacherConfig, rows: int, slots: int, depth: int) -> list[Op]:
    """Their EAGLE step: depth + 1 draft passes of one block, a copy of the whole cache, verify, commit."""
    H, keys = config.hidden, config.kv_heads * config.head_dim
    draft = [
        *eager_layer(config, 10, slots),
        elementwise("tree", 10 * H, 2, count=_DRAFT_OPS),
        matmul("draft head", 10, H, config.vocabulary),
    ]
    return [
        *(depth + 1) * draft,
        copy("copied cache", keys * slots, count=2 * config.layers),
        *eager_step(config, rows, slots),
        copy("commit", keys * rows, count=2 * config.layers * _COMMIT_OPS),
    ]


def solve(wanted: float, function: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising function takes a value, by bisection."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < wanted else (low, middle)
    return (low + high) / 2


def accept_length(nodes: int, depth: int, share: float) -> float:
    """Expected tokens a step of the best tree, if the candidate of rank r is right with share * (1 - share)^r."""
    heap, total = [(-share, 0, 1)], 1.0
    for _ in range(nodes):
        negative, rank, level = heapq.heappop(heap)
        total -= negative
        heapq.heappush(heap, (negative * (1 - share), rank + 1, level))
        if level < depth:
            heapq.heappush(heap, (negative * share, 0, level + 1))
    return total


def fitted_eager(device: DeviceSpec) -> tuple[Eager, tuple[Constant, ...]]:
    """The host's two parameters, each fitted to one published figure."""
    config = OPENPANGU_7B
    plain = eager_step(config, 1, _mean_slots())
    launch = solve(1 / EAGLE["plain"], lambda s: Eager(device=device, launch=s).seconds(plain), 0.0, 1e-3)
    eager = Eager(device=device, launch=launch)
    wanted = MEDUSA[1024][1] * eager.seconds(eager_step(config, 1, 512))
    text = (wanted - eager.seconds(medusa_step(config, MEDUSA_NODES + 1, 512))) / 512
    constants = (
        _fit("host time to launch an operator", launch, "17.65 tokens/s of the teacher alone, arXiv 2603.08088"),
        _fit(
            "host time a step to turn one token of the answer so far into text again",
            text,
            "a Medusa step of 1.77 plain steps at length 1024, arXiv 2603.03383: its code decodes the whole answer at"
            " every step, with a tokenizer in Python, and the plain loop it is compared with does not",
        ),
    )
    return replace(eager, text=text), constants


def _fit(name: str, value: float, to: str) -> Constant:
    return Constant(name=name, value=value, unit="s", mark="fitted", source=f"fitted to {to}")


def _mean_slots() -> int:
    """KV length of EAGLE-Pangu's turns, on average over a turn."""
    return int(EAGLE["prompt"] + EAGLE["answer"] // 2)


def study(device: DeviceSpec = DEVICES["ascend-910b3"]) -> dict[str, Any]:
    """Every published figure beside the model's; times in ms."""
    eager, constants = fitted_eager(device)
    return {
        "device": device.name,
        "fitted": [asdict(constant) for constant in constants],
        "medusa": _medusa(eager),
        "eagle": _eagle(eager),
        "static": _static(device),
    }


def _medusa(eager: Eager) -> dict[str, Any]:
    config = OPENPANGU_7B
    rows: list[dict[str, Any]] = []
    for length, (accept, overhead) in MEDUSA.items():
        mean = length // 2  # of an answer that grows to that length
        plain = eager.seconds(eager_step(config, 1, mean))
        device = eager.seconds(medusa_step(config, MEDUSA_NODES + 1, mean)) / plain
        whole = device + eager.text * mean / plain
        rows.append(
            {
                "length": length,
                "overhead": {"published": overhead, "model": whole, "model_without_text": device},
                "speedup": {
                    "published": accept / overhead,
                    "model": accept / whole,
                    "model_without_text": accept / device,
                },
            }
        )
    even = {name: break_even([(row["length"], row["speedup"][name]) for row in rows]) for name in rows[0]["speedup"]}
    return {"by_length": rows, "break_even": even}


def break_even(points: list[tuple[int, float]]) -> float | None:
    """Length at which the speed-up falls to 1, linear between points; None where it does not."""
    for (a, above), (b, below) in pairwise(points):
        if above >= 1 > below:
            return a + (b - a) * (above - 1) / (above - below)
    return None


def _eagle(eager: Eager) -> dict[str, Any]:
    config, nodes, depth = OPENPANGU_7B, int(EAGLE["nodes"]), int(EAGLE["depth"])
    slots = _mean_slots()
    published = EAGLE["accept"] / EAGLE["tree"]
    step = eager.seconds(eagle_step(config, nodes + 1, slots, depth))
    share = solve(EAGLE["accept"], lambda share: accept_length(nodes, depth, share), 0.1, 0.95)
    half, best, twice = (accept_length(count, depth, share) for count in (nodes // 2, nodes, 2 * nodes))
    more = eager.seconds(eagle_step(config, 2 * nodes + 1, slots, depth))
    return {
        "plain_ms": {"published": 1e3 / EAGLE["plain"], "static": 1e3 * step_s(eager.device, config, 1, 1024)},
        "step_ms": {"published": 1e3 * published, "model": 1e3 * step},
        "speedup": {
            "published": EAGLE["tree"] / EAGLE["plain"],
            "model": EAGLE["accept"] / EAGLE["plain"] / step,
        },
        # What a node would have to cost for 16 to beat 32 and 8, against what it costs in the model.
        "node_ms": {
            "needed_at_least": 1e3 * published * (twice / best - 1) / nodes,
            "needed_at_most": 1e3 * published * (1 - half / best) / (nodes // 2),
            "model": 1e3 * (more - step) / nodes,
        },
    }


def _static(device: DeviceSpec) -> dict[str, Any]:
    """The same drafters in static graphs, at KV length 1024: bounds on the speed-up, without host time."""
    config = OPENPANGU_7B
    plain = step_s(device, config, 1, 1024)
    share = solve(EAGLE["accept"], lambda share: accept_length(int(EAGLE["nodes"]), 10, share), 0.1, 0.95)
    drafts = {
        "medusa, own matrices": MedusaCost(levels=MEDUSA_HEADS),
        "medusa, tied": MedusaCost(levels=MEDUSA_HEADS, tied=True),
    }
    verify = step_s(device, config, MEDUSA_NODES + 1, 1024)
    result: dict[str, Any] = {"plain_ms": 1e3 * plain}
    for name, drafter in drafts.items():
        ((_, _, ops),) = drafter.drafts(config, 1024)
        cost = math.fsum(parts(device, ops).values())
        result[name] = {length: accept * plain / (verify + cost) for length, (accept, _) in MEDUSA.items()}
    drafts_of = {(d, w): ops for d, w, ops in Eagle3Cost(vocabulary=32000, levels=10).drafts(config, 1024)}
    result["eagle3, 32000 tokens"] = {
        nodes: max(
            accept_length(nodes, depth, share)
            * plain
            / (step_s(device, config, nodes + 1, 1024) + math.fsum(parts(device, drafts_of[depth, 16]).values()))
            for depth in range(1, 11)
        )
        for nodes in (4, 8, 15, 16, 32, 63)
    }
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description="the device model against published figures")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = study()
    print(json.dumps(found, indent=2) if args.json else _text(found))
    return 0


def _text(found: dict[str, Any]) -> str:
    medusa, eagle = found["medusa"], found["eagle"]
    lines = [f"fitted: {c['name']}, {1e6 * c['value']:.1f} us ({c['source']})" for c in found["fitted"]]
    lines.append("Medusa: length, step over plain published / model / without text, speed-up the same")
    for row in medusa["by_length"]:
        cells = [" / ".join(f"{value:.2f}" for value in row[key].values()) for key in ("overhead", "speedup")]
        lines.append(f"  {row['length']:5}   {cells[0]}   {cells[1]}")
    even = ", ".join(f"{name} {value:.0f}" if value else f"{name} none" for name, value in medusa["break_even"].items())
    lines.append(f"  break-even length: {even}")
    for name in ("plain_ms", "step_ms", "speedup", "node_ms"):
        lines.append(f"EAGLE {name}: " + ", ".join(f"{key} {value:.3f}" for key, value in eagle[name].items()))
    for name, value in found["static"].items():
        text = ", ".join(f"{key}: {v:.2f}" for key, v in value.items()) if isinstance(value, dict) else f"{value:.2f}"
        lines.append(f"static graphs, {name}: {text}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
