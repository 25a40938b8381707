"""Prompt files: one JSON object a line with a ``prompt``; rows of one ``conversation`` follow each other.

A line may hold ``turns`` instead, a whole conversation's user messages, as MT-Bench and Arena-Hard are published.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from draftwood.errors import RequestError
from draftwood.files import read_text
from draftwood.runtime.bundle import Bundle

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
        lines = read_text(path).splitlines()
    except OSError as error:
        raise RequestError(f"{path}: not a readable text file ({error})") from error
    parsed = (_parse(path, number, line) for number, line in enumerate(lines, 1) if line.strip())
    prompts = [prompt for turns in parsed for prompt in turns]
    if not prompts:
        raise RequestError(f"{path}: holds no prompts; expected one JSON object a line")
    return list(islice(prompts, limit))


def first_turns(bundle: Bundle, prompts: list[Prompt]) -> dict[str, list[int]]:
    """Token ids by prompt id; every prompt is a conversation's first turn. RequestError without a tokenizer."""
    tokenizer = bundle.tokenizer
    if tokenizer is None:
        raise RequestError(f"{bundle.folder}: has no tokenizer; give the prompt with --prompt-ids")
    found = {}
    for prompt in prompts:
        message = [{"role": "user", "content": prompt.text}]
        found[prompt.id] = tokenizer.chat(message) if tokenizer.has_chat else tokenizer.encode(prompt.text)
    return found


def _parse(path: Path, number: int, line: str) -> list[Prompt]:
    try:
        row = json.loads(line)
        texts = [turn["content"] if isinstance(turn, dict) else turn for turn in row.get("turns") or [row["prompt"]]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        texts = []
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(
            f'{path}, line {number}: expected {{"prompt": "..."}} or {{"turns": ["...", ...]}}, got {line[:60]!r}'
        )
    name = str(row.get("id", row.get("question_id", number)))
    conversation = str(row.get("conversation", name))
    source = str(row.get("source", row.get("category", "prompts")))
    several = len(texts) > 1
    return [
        Prompt(id=f"{name}/{turn}" if several else name, text=text, conversation=conversation, source=source)
        for turn, text in enumerate(texts, 1)
    ]
