"""The demo on a language model that people use: SmolLM2, its file's own four bits, trees looked up in the text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftwood.tools import demo
from draftwood.tools.demo import fetch
from draftwood.trees.spec import LOOKUPS, parse_specs

if TYPE_CHECKING:
    from draftwood.compiler.bundle.request import BuildRequest

# Rows of the trees: copies of 3 and of 7 tokens.
ROWS = (4, 8)
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
        drafter=None,
        trees=tuple(parse_specs(",".join(LOOKUPS[rows] for rows in ROWS))),
        slots=(SLOTS,),
        prefill_rows=PREFILL_ROWS,
        precision="nbits",
        texts=SEQUENCES,
    )
