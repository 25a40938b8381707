"""Prompt files: one JSON object a line with a ``prompt``; rows of one ``conversation`` follow each other.

A line may hold ``turns`` instead, a whole conversation's user messages, as MT-Bench, Spec-Bench and Arena-Hard are
published; or a ``question``, as GSM8K is. HumanEval's lines have a ``prompt`` and a ``task_id``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from draftwood.errors import RequestError
from draftwood.files import json_of, lines_of, read_text
from draftwood.runtime.text.tokenizer import Tokenizer

BUILT_IN = Path(__file__).parent / "demo" / "prompts.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One user message. ``conversation`` joins turns: a later turn follows the answer to the one before.

    ``source`` is the task family, by which figures are grouped: the line's ``source``, ``family`` or ``category``.
    """

    id: str
    text: str
    conversation: str
    source: str
    # Of a problem, what solves it: the line's ``answer``, or its ``test`` and ``entry_point``.
    reference: Mapping[str, str] = field(default_factory=dict, hash=False)


def read_prompts(path: Path | None, limit: int | None = None) -> list[Prompt]:
    """Reads a prompt file, the built-in one if None; RequestError names the line that does not fit."""
    return list(islice(_prompts(path or BUILT_IN), limit))


def read_families(files: Sequence[str]) -> list[Prompt]:
    """Prompts of several files, each ``FILE`` or ``FAMILY=FILE``; the built-in ones if none is given.

    A family's name takes the place of what its lines say, and stands before their ids.

    Raises:
        RequestError: a line that does not fit, or two files with conversations of one name.
    """
    read, owners = list[Prompt](), dict[str, str]()
    for name in files or (str(BUILT_IN),):
        family, path = split_family(name)
        prompts = _prompts(path)
        if family:
            prompts = [
                replace(p, id=f"{family}/{p.id}", conversation=f"{family}/{p.conversation}", source=family)
                for p in prompts
            ]
        for prompt in prompts:
            if owners.setdefault(prompt.conversation, name) != name:
                raise RequestError(
                    f"{path}: conversation {prompt.conversation!r} is in {owners[prompt.conversation]}, too; tell them"
                    " apart as FAMILY=FILE"
                )
        read += prompts
    return read


def split_family(text: str) -> tuple[str, Path]:
    """``FAMILY=FILE`` in its parts; of a ``FILE``, or a path whose folders have the sign, the family is empty."""
    family, sign, path = text.partition("=")
    return (family, Path(path)) if sign and family and "/" not in family else ("", Path(text))


def _prompts(path: Path) -> list[Prompt]:
    prompts, lines = list[Prompt](), dict[str, int]()
    for number, line in numbered_lines(path):
        name, parsed = _parse(path, number, line)
        for taken in (name, *(prompt.id for prompt in parsed)):
            if (other := lines.setdefault(taken, number)) != number:
                raise RequestError(
                    f"{path}, line {number}: its id {taken!r} is that of line {other}, and they would be taken for one"
                    " conversation; give each line an id of its own"
                )
        prompts += parsed
    if not prompts:
        raise RequestError(f"{path}: holds no prompts; expected one JSON object a line")
    return prompts


def numbered_lines(path: Path) -> list[tuple[int, str]]:
    """A file's lines but empty ones, each with its number; RequestError if it cannot be read."""
    try:
        lines = lines_of(read_text(path))
    except OSError as error:
        raise RequestError(f"{path}: not a readable text file ({error})") from error
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def chat_ids(tokenizer: Tokenizer, messages: Sequence[dict[str, str]]) -> list[int]:
    """A chat's token ids; if the tokenizer has no template for one, those of its messages, line by line."""
    if tokenizer.has_chat:
        return tokenizer.chat(messages)
    return tokenizer.encode("\n".join(message["content"] for message in messages))


def _parse(path: Path, number: int, line: str) -> tuple[str, list[Prompt]]:
    """A line's name and its turns."""
    try:
        row = json_of(line)
    except ValueError as error:
        raise RequestError(f"{path}, line {number}: {error}; got {line[:60]!r}") from error
    if not (texts := user_turns(row)):
        raise RequestError(
            f'{path}, line {number}: expected {{"prompt": "..."}} or {{"turns": ["...", ...]}}, or a question;'
            f" got {line[:60]!r}"
        )
    name = prompt_id(row, number)
    conversation = str(_first(row, "conversation", default=name))
    source = str(_first(row, "source", "family", "category", default=_form(row)))
    if len(texts) == 1:
        reference = _reference(row)
        return name, [Prompt(id=name, text=texts[0], conversation=conversation, source=source, reference=reference)]
    return name, [
        Prompt(id=f"{name}/{turn}", text=text, conversation=conversation, source=source)
        for turn, text in enumerate(texts, 1)
    ]


def user_turns(row: Any) -> list[str]:
    """The user messages of a prompt file's line, none of them empty; none if it is no such line."""
    try:
        texts = [turn["content"] if isinstance(turn, dict) else turn for turn in row.get("turns") or [_message(row)]]
    except (KeyError, TypeError, AttributeError):
        return []
    return texts if all(isinstance(text, str) and text for text in texts) else []


def prompt_id(row: dict[str, Any], number: int) -> str:
    """The name that a line gives itself, or its number in the file."""
    return str(_first(row, "id", "question_id", "task_id", default=number))


def _reference(row: dict[str, Any]) -> dict[str, str]:
    for fields in (("test", "entry_point"), ("answer",)):
        if all(isinstance(row.get(name), str) for name in fields):
            return {name: row[name] for name in fields}
    return {}


def _message(row: dict[str, Any]) -> Any:
    return row["prompt"] if "prompt" in row else row["question"]


def _first(row: dict[str, Any], *names: str, default: object) -> object:
    """The first of the fields that the line has; null stands for one that it lacks."""
    return next((row[name] for name in names if row.get(name) is not None), default)


def _form(row: dict[str, Any]) -> str:
    """The family of a line that names none."""
    if str(row.get("task_id", "")).startswith("HumanEval"):
        return "humaneval"
    return "gsm8k" if {"question", "answer"} <= row.keys() else "prompts"
