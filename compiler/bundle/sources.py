"""The opened checkpoints of a request: whether they can serve it, and every weight that they give."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from draftwood.compiler.bundle.request import BuildRequest, check_slots
from draftwood.compiler.checkpoints.weight import WeightEntry
from draftwood.compiler.drafters.int8 import in_int8
from draftwood.compiler.drafters.model import DraftModel, Modules, OpenedDrafter
from draftwood.compiler.drafters.registry import check_tree, describe_drafter, open_drafter
from draftwood.compiler.ranks.share import check_ranks
from draftwood.compiler.targets.modules import make_modules
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.conversion import in_precision
from draftwood.compiler.teachers.registry import family_of
from draftwood.errors import RequestError, TreeError


@dataclass(frozen=True, slots=True)
class Sources:
    """A teacher's checkpoint and a drafter's."""

    teacher: Checkpoint
    drafter: OpenedDrafter | None

    @classmethod
    def open(cls, request: BuildRequest) -> Sources:
        """Reads headers only; without weights, configurations only, if they describe the network."""
        if request.weights == "none":
            teacher = in_precision(Checkpoint.describe(request.model), request.precision, npu=True)
            return cls(teacher, describe_drafter(request.drafter, teacher) if request.drafter else None)
        exact = Checkpoint.open(request.model)
        teacher = in_precision(exact, request.precision, npu="ge" in request.targets)
        if request.drafter is None:
            return cls(teacher, None)
        drafter = open_drafter(request.drafter, exact)
        return cls(teacher, in_int8(drafter, teacher.config) if request.int8_drafter else drafter)

    @property
    def draft_model(self) -> DraftModel | None:
        """The drafter without its weights."""
        return self.drafter.model if self.drafter else None

    def modules(self, positions: int) -> Modules:
        """The modules without values, on the device of the context."""
        return make_modules(self.teacher.config, self.draft_model, positions)

    def weights(self, positions: int) -> list[WeightEntry]:
        """Every weight of the bundle, rotary tables for ``positions`` positions among them."""
        teacher, drafter = self.teacher, self.drafter
        with torch.device("meta"):
            modules = self.modules(positions)
        shapes = {n: tuple(t.shape) for module in modules if module for n, t in module.state_dict().items()}
        entries = [
            WeightEntry(n, shapes[n], partial(teacher.weight, n), p.concatenated, p.dtype)
            for n, p in teacher.parts.items()
        ]
        if drafter:
            entries += drafter.weights(shapes, positions)
        tables = family_of(teacher.config).tables(teacher.config, positions).items()
        return entries + [WeightEntry(name, table.shape, partial(torch.from_numpy, table)) for name, table in tables]


def check_fit(request: BuildRequest, sources: Sources) -> None:
    """Raises RequestError or TreeError if these checkpoints cannot serve the request."""
    config, drafter = sources.teacher.config, sources.draft_model
    for precision in request.precisions.values():
        if precision.quantised != bool(config.quantised or config.packed):
            raise RequestError(
                f"precision {precision.types.name}: the teacher is {'' if config.quantised else 'not '}quantised;"
                f" {'choose one of w8a8' if config.quantised else 'run draftwood quantize on it first'}"
            )
    check_slots(request.slots, config.max_positions)
    if request.ranks > 1:
        check_ranks(config, request.ranks, "the teacher")
        if drafter is not None:
            check_ranks(drafter.block(config), request.ranks, "the drafter")
            drafter.shared(request.ranks)
            if drafter.quantised:
                raise RequestError(
                    f"--ranks {request.ranks}: the drafter is quantised; expected plain weights, or one rank"
                )
    for name, tree in request.shapes.drafted:
        if drafter is not None:
            check_tree(drafter, name, tree, config)
        elif tree.nodes:
            raise TreeError(
                f"tree {name}: {tree.depth} levels deep, but there is no --drafter; name one, or look the tree up in"
                " the text (--tree lookup:chain:7)"
            )
