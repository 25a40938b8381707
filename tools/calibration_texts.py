"""Texts to calibrate a quantised teacher with, and others of the same kind to judge it by."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftwood.errors import RequestError
from draftwood.runtime.text.tokenizer import Tokenizer
from draftwood.tools.prompts import numbered_lines, user_turns

# Questions with answers, to judge a precision by.
BUILT_IN = Path(__file__).parent / "demo" / "answers.jsonl"
# One text in this many is withheld.
_WITHHELD = 4
LEAST_TOKENS = 8


class Texts(NamedTuple):
    """Token ids int64 [T]; what is ``withheld`` has not been calibrated with."""

    calibration: list[Tensor]
    withheld: list[Tensor]


def read_texts(path: Path, tokenizer: Tokenizer, limit: int, longest: int) -> Texts:
    """The first ``limit`` texts of a JSON-lines file, cut to ``longest`` tokens; every fourth is withheld.

    A line has a ``text``, or ``messages``, whose contents follow each other, or is one of a prompt file.

    Raises:
        RequestError: the file cannot be read, a line has no text, or there are too few of them.
    """
    texts = [torch.tensor(ids[:longest], dtype=torch.int64) for ids in islice(_ids(path, tokenizer), limit)]
    if len(texts) < _WITHHELD:
        raise RequestError(
            f"{path}: {len(texts)} texts of {LEAST_TOKENS} tokens or more; expected at least {_WITHHELD}"
        )
    withheld = [number % _WITHHELD == _WITHHELD - 1 for number in range(len(texts))]
    return Texts(
        [text for text, away in zip(texts, withheld, strict=True) if not away],
        [text for text, away in zip(texts, withheld, strict=True) if away],
    )


def suffices(path: Path, tokenizer: Tokenizer) -> bool:
    """Whether a file has enough texts for `read_texts`; RequestError as there."""
    return len(list(islice(_ids(path, tokenizer), _WITHHELD))) == _WITHHELD


def _ids(path: Path, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """The texts of a file that are long enough."""
    for number, line in numbered_lines(path):
        if len(ids := tokenizer.encode(_text(path, number, line))) >= LEAST_TOKENS:
            yield ids


def _text(path: Path, number: int, line: str) -> str:
    try:
        row: dict[str, Any] = json.loads(line)
        parts = (
            row.get("messages") or row.get("turns") or [row.get("text") or "".join(user_turns(row)) or row["prompt"]]
        )
        return "\n".join(part["content"] if isinstance(part, dict) else part for part in parts)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise RequestError(
            f'{path}, line {number}: expected {{"text": "..."}}, or prompt, question, turns or messages; got'
            f" {line[:60]!r}"
        ) from None
