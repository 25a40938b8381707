"""A draft step of several texts gives for each what the step of one gives, for every kind of drafter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.bundle.sources import Sources
from draftwood.compiler.ge.texts import texts_step
from draftwood.compiler.steps.step import Step, StepSizes
from draftwood.compiler.steps.tracing import trace
from draftwood.compiler.targets.steps import draft_steps
from draftwood.environment import torch_npu_installed
from draftwood.manifest import text_name
from draftwood.tests.compiler.drafters.test_matrix import KINDS, TREES, save_drafter
from draftwood.trees.spec import Budget

TEXTS, SLOTS = 3, 128
# fp32; the sums of a product of more rows have another order.
ROUNDING = 1e-4
CASES = [pytest.param(kind, False, id=kind) for kind in KINDS]
CASES += [pytest.param(kind, True, id=f"{kind}-int8", marks=pytest.mark.slow) for kind in KINDS]

pytestmark = pytest.mark.skipif(not torch_npu_installed(), reason="needs the torch_npu package")


@pytest.fixture
def steps(tmp_path: Path, make: Any, save_llama: Callable, save_medusa: Callable) -> Callable[..., list[Step]]:
    """The draft steps of a tiny drafter, their weights random."""

    def of(kind: str, int8: bool) -> list[Step]:
        teacher, drafter = tmp_path / "teacher", tmp_path / "drafter"
        teacher.mkdir()
        drafter.mkdir()
        save_llama(teacher)
        if kind == "medusa":
            save_medusa(drafter, heads=2, tied=True)
        else:
            save_drafter(make, drafter, kind)
        trees = (*TREES, *((("budget", Budget(4, 2, 2)),) if kind in ("eagle3", "dspark") else ()))
        request = BuildRequest(model=teacher, drafter=drafter, trees=trees, slots=(SLOTS,), int8_drafter=int8)
        sources = Sources.open(request)
        modules = sources.modules(SLOTS)
        for value in (value for module in modules for value in module.state_dict().values()):
            filled(value)
        sizes = StepSizes(branch_rows=7, path_rows=4)
        every = draft_steps(request.shapes, sizes, sources.draft_model, modules, static=True)
        return [step for step in every if step.signature.kind == "draft"]

    return of


def filled(value: Tensor) -> None:
    if value.dtype == torch.int64:  # ids of the teacher
        value.copy_(torch.randperm(100)[: len(value)])
    elif value.dtype == torch.int8:
        value.copy_(torch.randint(-127, 128, value.shape))
    else:
        value.copy_(torch.randn(value.shape) * (0.1 if value.dim() > 1 else 1e-2) + (value.dim() == 1))


def given(step: Step) -> dict[str, Tensor]:
    """A text's inputs, by their names: some length, some rows that the drafter has not seen, some noise."""
    accepted = int(torch.randint(1, 4, ()))
    fixed = {"accepted": torch.tensor([accepted]), "committed": torch.randint(accepted, SLOTS - 9, (1,))}
    return {
        spec.name: fixed[spec.name]
        if spec.name in fixed
        else torch.randint(0, 100, spec.shape)
        if spec.dtype == "int64"
        else torch.randn(spec.shape)
        for spec in step.signature.inputs
    }


@pytest.mark.parametrize(("kind", "int8"), CASES)
@torch.no_grad()
def test_every_text_is_the_same_as_alone(steps: Callable[..., list[Step]], kind: str, int8: bool) -> None:
    torch.manual_seed(5)
    for one in steps(kind, int8):
        every = [given(one) for _ in range(TEXTS)]
        names = [spec.name for spec in one.signature.outputs]
        alone = [dict(zip(names, one.module(*each.values()), strict=True)) for each in every]
        several = texts_step(one, trace(one), TEXTS)
        rows = {name: torch.cat([each[name] for each in every]) for name in every[0]}
        rows |= {text_name(i, name): value for i, each in enumerate(every) for name, value in each.items()}
        together = several.module(*(rows[spec.name] for spec in several.signature.inputs))
        assert not torch.equal(alone[0]["scores"], alone[1]["scores"])
        for spec, got in zip(several.signature.outputs, together, strict=True):
            want = torch.cat([each[spec.name] for each in alone])
            assert got.shape == spec.shape
            allowed = ROUNDING if got.is_floating_point() else 0
            torch.testing.assert_close(got, want, rtol=allowed, atol=allowed)
