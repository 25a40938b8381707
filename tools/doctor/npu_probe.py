"""Probes of the NPU at hand: each piece of the graphs alone, compiled as the graphs are.

    python -m draftwood.tools.doctor.npu_probe NAME

runs one probe and prints its verdict; what fails on a device may take its process along. A probe's module is compiled
by torchair and launched on the device, and has to give what it gives in eager PyTorch on the host.
"""

from __future__ import annotations

import csv
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from draftwood.compiler.ge.torchair_bridge import compile_step, device_of, profiled
from draftwood.compiler.steps.noise import ciphered
from draftwood.noise import numbers_of
from draftwood.tools.doctor.acl_probe import Verdict

# N query heads, K key/value heads, T rows, C slots, D head dimension, V vocabulary
HEADS, KV_HEADS, DIM, SLOTS, WIDTH, VOCABULARY = 8, 2, 128, 1024, 512, 4096
# bf16 and another order of sums; what is left out or misplaced moves a result by 1e-1 and more.
TOLERANCE = 3e-2
Compile = Callable[[nn.Module], Callable[..., tuple[Tensor, ...]]]


@dataclass(frozen=True, slots=True)
class Probe:
    """A piece of a graph: its module, what it is given, and how near the result has to be."""

    ability: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    tolerance: float = 0.0


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class TreeAttention(nn.Module):
    """Tree rows over a cache, rows side by side (BSND), one boolean mask for all heads."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, masked: Tensor) -> tuple[Tensor, ...]:
        out, _ = torch.ops.npu.npu_fused_infer_attention_score(
            query, key, value, atten_mask=masked, num_heads=HEADS, num_key_value_heads=KV_HEADS,
            scale=DIM**-0.5, input_layout="BSND", sparse_mode=1,
        )  # fmt: skip
        return (out,)


def _attention(rows: int) -> Probe:
    """Every row sees half of the slots, another half each."""
    query = _random(1, rows, HEADS, DIM)
    key, value = (_random(1, SLOTS, KV_HEADS, DIM, seed=seed) for seed in (1, 2))
    masked = (torch.arange(SLOTS) + torch.arange(rows)[:, None]) % 2 == 0
    ability = f"attention of {rows} rows with a mask [1, 1, {rows}, {SLOTS}], BSND"
    return Probe(ability, TreeAttention(), (query, key, value, masked[None, None]), TOLERANCE)


class RanksJoined(nn.Module):
    def forward(self, scores: Tensor) -> tuple[Tensor, ...]:
        values, places = scores.topk(4, -1)
        return values, places


def _ranks(dtype: torch.dtype) -> Probe:
    """No two scores of a row are equal, so that there is one order."""
    order = torch.stack([torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(i)) for i in range(5)])
    # bf16 tells 256 whole numbers apart.
    distinct = order[:, :256].argsort(-1) if dtype == torch.bfloat16 else order
    return Probe(f"TopK of {str(dtype).removeprefix('torch.')}", RanksJoined(), (distinct.to(dtype),))


class Turned(nn.Module):
    def forward(self, rows: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return (torch.ops.npu.npu_rotary_mul(rows, cos, sin),)


def _turned() -> Probe:
    """Whole rows by tables [1, T, 1, D]; heads that keep their place are turned by no angle."""
    angle = _random(1, 13, 1, DIM // 2, dtype=torch.float32, seed=1).repeat(1, 1, 1, 2)
    rows = _random(1, 13, HEADS + KV_HEADS, DIM)
    return Probe(
        "RotaryMul with whole tables", Turned(), (rows, angle.cos().bfloat16(), angle.sin().bfloat16()), TOLERANCE
    )


class CacheWrite(nn.Module):
    """A cache that the graph writes in place, and reads through what was written."""

    def forward(self, index: Tensor, rows: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        written = torch.ops.npu.npu_scatter_nd_update(cache, index, rows)
        cache.copy_(written)
        return (written.index_select(0, index.flatten()),)


def _written() -> Probe:
    index = torch.tensor([[3], [5], [SLOTS - 1], [SLOTS - 1]])
    rows = _random(3, WIDTH).index_select(0, torch.tensor([0, 1, 2, 2]))  # the spare slot is written twice
    return Probe(
        "a cache written in place (RefData, ScatterNdUpdate)",
        CacheWrite(),
        (index, rows, torch.zeros(SLOTS, WIDTH).bfloat16()),
    )


class Ciphered(nn.Module):
    """The whole numbers that noise is made of, as acceptance has them."""

    def forward(self, numbers: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        return ciphered(ids[:1] & 3, ids & 65535, numbers)


def _ciphered() -> Probe:
    numbers = torch.from_numpy(numbers_of(7, range(4)))
    ids = torch.arange(1, 8193, dtype=torch.int32).repeat(4, 1)
    return Probe("the noise's int32 (Addcmul, Axpy, BitwiseAnd)", Ciphered(), (numbers, ids))


class Cut(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x[:, 1:3], x[:, :1], x[2:, -4:]


def _cut() -> Probe:
    return Probe("slices of bf16 (SplitV)", Cut(), (_random(5, 16),))


class Products(nn.Module):
    """The fused operators between attentions, and a product with a float32 bias after it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(_random(2 * WIDTH, WIDTH, seed=3) * 0.05, requires_grad=False)
        self.bias = nn.Parameter(_random(2 * WIDTH, seed=4), requires_grad=False)
        self.gamma = nn.Parameter(_random(WIDTH, seed=5), requires_grad=False)

    def forward(self, x: Tensor, more: Tensor) -> tuple[Tensor, ...]:
        normed, _, total = torch.ops.npu.npu_add_rms_norm(x, more, self.gamma, 1e-5)
        gated = torch.ops.npu.npu_swiglu(torch.ops.draftwood.linear(normed, self.weight, self.bias.float()))
        return gated, total


def _products() -> Probe:
    return Probe(
        "norm, product with a float32 bias, SwiGlu",
        Products(),
        (_random(13, WIDTH), _random(13, WIDTH, seed=1)),
        TOLERANCE,
    )


class Rounded(nn.Module):
    """W8A8: rows rounded on the device, whole numbers multiplied."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randint(-127, 128, (WIDTH, WIDTH), generator=torch.Generator().manual_seed(6))
        self.weight = nn.Parameter(whole.to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1e-3), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (torch.ops.draftwood.quantised_linear(x, self.weight, self.scale, None),)


def _rounded() -> Probe:
    return Probe("products of int8 rows and weights", Rounded(), (_random(13, WIDTH),), TOLERANCE)


# In the order of risk, by name.
PROBES: dict[str, Callable[[], Probe]] = {
    "topk-bf16": lambda: _ranks(torch.bfloat16),
    "topk-fp32": lambda: _ranks(torch.float32),
    "attention-16": lambda: _attention(16),
    "attention-17": lambda: _attention(17),
    "attention-2": lambda: _attention(2),
    "in-place": _written,
    "rotary": _turned,
    "int32": _ciphered,
    "slices": _cut,
    "products": _products,
    "int8": _rounded,
}


def verdict(name: str, device: str = "npu:0", made: Compile | None = None) -> Verdict:
    """Compiles and launches a probe's module; ``made`` stands in for the compilation in tests."""
    probe = PROBES[name]()
    try:
        launch = (made or _compiled(device))(probe.module.to(device_of(device)))
        there, here = [value.clone().to(device) for value in probe.inputs], [value.clone() for value in probe.inputs]
        got, want = launch(*there), type(probe.module)()(*here)
        # Inputs as well: a cache is written in place.
        seen = _apart([*got, *there], [*want, *here], probe.tolerance)
        engines = kernels_of(lambda: launch(*there), device)
    except Exception as error:  # torchair, GE and operators raise classes of every kind
        return Verdict(probe.ability, False, _first_line(error))
    slow = any("AI_CPU" in cores for cores in engines.values())
    on = "".join(f"; {kind} on {engine}" for kind, engine in sorted(engines.items()))
    return Verdict(probe.ability, not seen and not slow, f"{seen or 'as on the host'}{on}")


def _compiled(device: str) -> Compile:
    """torchair's whole way; on a CPU it stops before GE and runs the traced program."""
    cache = Path(tempfile.mkdtemp(prefix="npu-probe-"))
    return lambda module: compile_step(module, cache / type(module).__name__, device == "cpu", lambda _: None)


def _apart(got: Iterable[Tensor], want: Iterable[Tensor], tolerance: float) -> str:
    """The largest difference; "" if all is near enough."""
    for number, (result, expected) in enumerate(zip(got, want, strict=True)):
        here = result.cpu()
        if here.dtype != expected.dtype or here.shape != expected.shape:
            return (
                f"result {number} is {here.dtype} {list(here.shape)}, expected {expected.dtype} {list(expected.shape)}"
            )
        apart = float((here.float() - expected.float()).abs().max())
        if not apart <= tolerance * max(float(expected.float().abs().max()), 1.0):
            return f"result {number} differs by {apart:.1e}"
    return ""


def kernels_of(launch: Callable[[], object], device: str) -> dict[str, str]:
    """Kernel type -> the cores that it ran on, by torch_npu's profiler; empty if ``device`` is no NPU."""
    if not device.startswith("npu"):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        with profiled(folder):
            launch()
        return kernel_engines(*sorted(Path(folder).rglob("kernel_details.csv")))


def kernel_engines(*paths: Path) -> dict[str, str]:
    """Type -> cores of the profiler's ``kernel_details.csv``: kernels of one type may run on several."""
    cores = defaultdict[str, set[str]](set)
    for path in paths:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if row.get("Type"):
                    cores[row["Type"]].add(row["Accelerator Core"])
    return {kind: " and ".join(sorted(several)) for kind, several in cores.items()}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


if __name__ == "__main__":
    print(json.dumps([asdict(verdict(name)) for name in sys.argv[1:]]))
