"""Texts to calibrate a quantised teacher with, and others of the same kind to judge it by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftwood.errors import RequestError
from draftwood.runtime.text.tokenizer import Tokenizer
from draftwood.tools.prompts import numbered_lines

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

    A line has a ``text``, a ``prompt``, or ``messages`` or ``turns``, whose contents follow each other.

    Raises:
        RequestError: the file cannot be read, a line has no text, or there are too few of them.
    """
    texts: list[Tensor] = []
    for number, line in numbered_lines(path):
        ids = tokenizer.encode(_text(path, number, line))[:longest]
        if len(ids) >= LEAST_TOKENS:
            texts.append(torch.tensor(ids, dtype=torch.int64))
        if len(texts) == limit:
            break
    if len(texts) < _WITHHELD:
        raise RequestError(
            f"{path}: {len(texts)} texts of {LEAST_TOKENS} tokens or more; expected at least {_WITHHELD}"
        )
    withheld = [number % _WITHHELD == _WITHHELD - 1 for number in range(len(texts))]
    return Texts(
        [text for text, away in zip(texts, withheld, strict=True) if not away],
        [text for text, away in zip(texts, withheld, strict=True) if away],
    )


def _text(path: Path, number: int, line: str) -> str:
    try:
        row: dict[str, Any] = json.loads(line)
        parts = row.get("messages") or row.get("turns") or [row.get("text") or row["prompt"]]
        return "\n".join(part["content"] if isinstance(part, dict) else part for part in parts)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise RequestError(
            f'{path}, line {number}: expected {{"text": "..."}}, or prompt, turns or messages; got {line[:60]!r}'
        ) from None
