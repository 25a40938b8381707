"""Prompt files: one JSON object a line with a ``prompt``; rows of one ``conversation`` follow each other."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from draftwood.errors import RequestError

BUILT_IN = Path(__file__).parent / "demo" / "prompts.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One user message. ``conversation`` joins turns: a later turn follows the answer to the one before."""

    id: str
    text: str
    conversation: str
    source: str


def read_prompts(path: Path | None, limit: int | None = None) -> list[Prompt]:
    """Reads a prompt file, the built-in one if None; RequestError names the line that does not fit."""
    path = path or BUILT_IN
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: not a readable text file ({error})") from error
    prompts = [_parse(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise RequestError(f"{path}: holds no prompts; expected one JSON object a line")
    return list(islice(prompts, limit))


def _parse(path: Path, number: int, line: str) -> Prompt:
    try:
        row = json.loads(line)
        text = row["prompt"]
    except (ValueError, KeyError, TypeError):
        text = None
    if not isinstance(text, str) or not text:
        raise RequestError(f'{path}, line {number}: expected {{"prompt": "..."}}, got {line[:60]!r}')
    name = str(row.get("id", number))
    return Prompt(
        id=name,
        text=text,
        conversation=str(row.get("conversation", name)),
        source=str(row.get("source", "prompts")),
    )
