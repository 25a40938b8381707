"""The demo models that come with the package, and the names they go by."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from draftwood.compiler.drafters.registry import check_tree, names, open_drafter
from draftwood.errors import RequestError, TreeError
from draftwood.trees import Topology
from draftwood.trees.calibration import Calibration
from draftwood.trees.calibration_file import read_calibration
from draftwood.trees.spec import Budget

if TYPE_CHECKING:
    from draftwood.compiler.drafters.model import DraftModel
    from draftwood.compiler.teachers.config import TeacherConfig

FOLDER = Path(__file__).parent
NAMES = {"demo": FOLDER / "teacher"} | {f"demo-{kind}": FOLDER / kind for kind in names() if (FOLDER / kind).is_dir()}
DRAFTERS = tuple(name for name in NAMES if name != "demo")
# Behind a drafter's name: with its linear layers in eight bits.
W8A8 = "-w8a8"
ALL_DRAFTERS = (*DRAFTERS, *(f"{name}{W8A8}" for name in DRAFTERS))

# The language model that the demo downloads.
SMOLLM2 = "smollm2"

# Configurations without weights: "shape:llama-3.1-8b".
SHAPES = {f"shape:{path.parent.name}": path.parent for path in sorted((FOLDER.parent / "shapes").glob("*/config.json"))}


def resolve(name: str) -> Path:
    """The folder of a shipped model's or shape's name, or the file of ``smollm2``, which is downloaded the first time;
    anything else is taken as a path.

    Raises:
        RequestError: a shape that is not shipped, or a model that cannot be downloaded.
    """
    if name == SMOLLM2:
        from draftwood.tools.demo import fetch

        return fetch.model()
    if name.startswith("shape:") and name not in SHAPES:
        raise RequestError(f"{name}: no such shape; expected {', '.join(SHAPES)}")
    return (NAMES | SHAPES).get(name, Path(name))


def shipped(drafter: str) -> Path:
    """The folder of a shipped drafter, in whichever of its precisions."""
    return NAMES[drafter.removesuffix(W8A8)]


def in_int8(drafter: str) -> bool:
    """Whether a shipped drafter's name asks for eight bits."""
    return drafter.endswith(W8A8)


@cache
def _models(drafter: str) -> tuple[DraftModel, TeacherConfig]:
    from draftwood.compiler.teachers.checkpoint import Checkpoint

    teacher = Checkpoint.open(NAMES["demo"])
    return open_drafter(shipped(drafter), teacher).model, teacher.config


def follows_nodes(drafter: str) -> bool:
    """Whether a shipped drafter's candidates depend on the nodes above them: then every tree has a draft graph of its
    own, and one can be chosen while it is grown. Others rank levels."""
    return _models(drafter)[0].follows_nodes


def can_draft(drafter: str, tree: Topology | Budget) -> bool:
    """Whether a shipped drafter can draft a tree: one of a kind that it can, and no deeper than its levels."""
    model, teacher = _models(drafter)
    try:
        check_tree(model, "asked", tree, teacher)
    except TreeError:
        return False
    return True


def counted(drafter: str, sampled: bool) -> Calibration:
    """What was counted of a shipped drafter's candidates in the demo teacher's text, greedy, or sampled at 0.8.

    In eight bits it proposes nearly the same.
    """
    return read_calibration(shipped(drafter) / f"{'sampled' if sampled else 'greedy'}.stats")
