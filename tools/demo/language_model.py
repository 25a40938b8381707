"""The demo on a language model that people use: SmolLM2 in its file's own four bits, with its EAGLE-3 layer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from draftwood.tools import demo
from draftwood.tools.demo import fetch
from draftwood.trees.spec import parse_specs

if TYPE_CHECKING:
    from draftwood.compiler.bundle.request import BuildRequest

DRAFTER: Path | None = demo.FOLDER / "eagle3"
# Drafted by the layer, and copied from the text.
TREES = "chain:1,chain:2,chain:3,lookup:chain:3,lookup:chain:7"
SLOTS, PREFILL_ROWS, SEQUENCES = 1024, (128,), 8
# Twelve questions that a person would ask; one conversation has a second turn.
QUESTIONS = demo.FOLDER / "questions.jsonl"
# Whose answers are printed whole.
SHOWN = ("e-mail", "summary")
# Two that choose the fixed tree, and are not asked again.
CHOOSING = (
    "Give me three reasons to learn to cook, and repeat each reason in other words.",
    "Write a Python class for a point with x and y, and a method that adds another point.",
)


def request() -> BuildRequest:
    """The bundle: the model's blocks as its file has them, with the graphs of up to eight sequences a launch.

    Raises:
        RequestError: the model is not in the cache and cannot be downloaded.
    """
    import draftwood

    return draftwood.BuildRequest(
        model=fetch.model(),
        drafter=DRAFTER,
        int8_drafter=DRAFTER is not None,
        trees=tuple(parse_specs(TREES)),
        slots=(SLOTS,),
        prefill_rows=PREFILL_ROWS,
        precision="nbits",
        texts=SEQUENCES,
    )
