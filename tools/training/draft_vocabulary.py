"""The draft vocabulary: the tokens that the teacher itself writes most."""

from __future__ import annotations

import numpy as np

from draftwood.errors import RequestError
from draftwood.tools.training.texts import Distilled

# W texts, V draft vocabulary, N tokens


def most_frequent(texts: Distilled, text_W: np.ndarray, size: int, vocabulary: int) -> np.ndarray:
    """The ``size`` tokens that the teacher wrote most often in these texts, int64 [V], rising.

    Ties go to the smaller id; tokens never written come last.

    Raises:
        RequestError: the teacher's vocabulary is smaller.
    """
    if not 1 <= size <= vocabulary:
        raise RequestError(f"draft vocabulary of {size}: expected 1 to {vocabulary}, the teacher's")
    counts = np.bincount(_written(texts, text_W), minlength=vocabulary)
    return np.sort(np.argsort(-counts, kind="stable")[:size])


def coverage(texts: Distilled, text_W: np.ndarray, ids_V: np.ndarray) -> float:
    """Share of the tokens that the teacher wrote in these texts that are among the ids."""
    return float(np.isin(_written(texts, text_W), ids_V).mean())


def _written(texts: Distilled, text_W: np.ndarray) -> np.ndarray:
    """The teacher's own tokens, prompts left out, uint32 [N]."""
    return np.concatenate([texts.tokens_of(text)[texts.index_W["prompt"][text] :] for text in text_W])
