"""Every step computes on its inputs' device: a tensor made elsewhere fails the first trace on an NPU."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import draftwood
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.bundle.sources import Sources
from draftwood.compiler.steps.step import DTYPES, Step
from draftwood.compiler.targets.steps import Shapes, draft_steps, static_steps
from draftwood.trees import Topology
from draftwood.trees.spec import Budget

TREES = {
    "medusa": (("backbone", Topology.backbone(2, 2)),),
    "eagle3": (("backbone", Topology.backbone(2, 2)), ("budget", Budget(4, 3, 2))),
    "fasteagle": (("backbone", Topology.backbone(2, 2)),),
}


def steps_of(sources: Sources, shapes: Shapes) -> list[Step]:
    """The static steps of a teacher and its drafter."""
    modules = sources.modules(128)
    sizes = shapes.sizes()
    return [
        *static_steps(shapes, sizes, modules[0]),
        *draft_steps(shapes, sizes, sources.draft_model, modules, static=True),
    ]


def moved(module: nn.Module, device: str) -> nn.Module:
    """``module.to`` for fake tensors, which it cannot swap."""
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            held.update(
                {name: torch.empty_like(value, device=device) for name, value in held.items() if value is not None}
            )
    return module


@pytest.mark.parametrize("device", ["meta", "lazy"])  # the latter is faked, and stands for an NPU
@pytest.mark.parametrize("kind", TREES)
def test_every_step_runs_on_another_device(
    kind: str, device: str, tiny_teacher: Path, tiny_heads: Path, tiny_drafters: dict[str, Path]
) -> None:
    drafter = tiny_heads if kind == "medusa" else tiny_drafters[kind]
    trees = (("plain", Topology.plain()), *TREES[kind])
    request = BuildRequest(model=tiny_teacher, drafter=drafter, trees=trees, slots=(128,), prefill_rows=(8,))
    steps = steps_of(Sources.open(request), request.shapes)
    assert {step.signature.kind for step in steps} >= {"prefill", "decode", "verify", "draft"}
    with FakeTensorMode(allow_non_fake_inputs=True):
        for step in steps:
            inputs = (
                torch.zeros(spec.shape, dtype=DTYPES[spec.dtype], device=device) for spec in step.signature.inputs
            )
            outputs = moved(step.module, device)(*inputs)
            assert {value.device.type for value in outputs} == {device}, step.signature.name


FACTORIES = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros"}
# Where a step's operators are written; what a module is made of in ``__init__`` moves with it.
STEPS = ("kernels", "compiler/steps", "compiler/teachers/block.py", "compiler/teachers/decoder.py", "compiler/drafters")
HOST = {"__init__", "_places", "examples", "_tables", "rope_tables", "rope_frequencies"}  # outside a step, on the host
HOST_FILES = ("checkpoint.py", "export.py", "training.py", "common/vocabulary.py")


def factories(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls of a torch factory without ``device=``, outside the functions that run on the host."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and node.name in HOST:
            continue
        name = node.func if isinstance(node, ast.Call) else None
        if isinstance(name, ast.Attribute) and isinstance(name.value, ast.Name) and name.value.id == "torch":
            assert isinstance(node, ast.Call)
            if name.attr in FACTORIES and not any(keyword.arg == "device" for keyword in node.keywords):
                yield node
        yield from factories(node)


def test_no_step_makes_a_tensor_without_a_device() -> None:
    root = Path(draftwood.__file__).parent
    files = [
        path for part in STEPS for path in ([root / part] if part.endswith(".py") else (root / part).rglob("*.py"))
    ]
    assert len(files) > 30
    odd = [
        f"{path.relative_to(root)}:{call.lineno}: {ast.unparse(call)}"
        for path in files
        if not str(path).endswith(HOST_FILES)
        for call in factories(ast.parse(path.read_text()))
    ]
    assert odd == []


def test_the_check_sees_a_factory() -> None:
    (found,) = factories(ast.parse("def step(x):\n    return x + torch.arange(4) + torch.ones(4, device=x.device)"))
    assert ast.unparse(found) == "torch.arange(4)"
