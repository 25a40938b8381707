"""Prompt files in both forms, and lines that are none."""

import json
from pathlib import Path

import pytest

from draftwood.errors import RequestError
from draftwood.tools.prompts import read_prompts


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_whole_conversations_on_one_line(tmp_path: Path) -> None:
    turns = {"question_id": 81, "category": "writing", "turns": ["Compose.", "Rewrite."]}
    contents = {"question_id": "x", "turns": [{"content": "Use ABC notation."}]}
    found = read_prompts(write(tmp_path / "p.jsonl", turns, contents, {"id": "a", "prompt": "Hi", "source": "s"}))
    assert [(p.id, p.conversation, p.source, p.text) for p in found] == [
        ("81/1", "81", "writing", "Compose."),
        ("81/2", "81", "writing", "Rewrite."),
        ("x", "x", "prompts", "Use ABC notation."),
        ("a", "a", "s", "Hi"),
    ]


@pytest.mark.parametrize("row", ["[1]", '{"turns": []}', '{"turns": [3]}', '{"turns": ["a", ""]}', '{"turns": "ab'])
def test_lines_that_are_none(tmp_path: Path, row: str) -> None:
    with pytest.raises(RequestError, match=r'line 2: expected \{"prompt": "\.\.\."\} or'):
        read_prompts(write(tmp_path / "p.jsonl", {"prompt": "fine"}, row))
