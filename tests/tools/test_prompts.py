"""Prompt files in both forms, and lines that are none."""

import json
from pathlib import Path

import pytest

from draftwood.errors import RequestError
from draftwood.tools.prompts import read_families, read_prompts


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


def test_a_field_that_is_null_is_as_one_that_is_not_there(tmp_path: Path) -> None:
    """Lines whose conversation is null are conversations of their own."""
    rows = [{"id": None, "conversation": None, "source": None, "prompt": text} for text in ("a", "b")]
    found = read_prompts(write(tmp_path / "p.jsonl", *rows))
    assert [(p.id, p.conversation, p.source) for p in found] == [("1", "1", "prompts"), ("2", "2", "prompts")]


@pytest.mark.parametrize("row", ["[1]", '{"turns": []}', '{"turns": [3]}', '{"turns": ["a", ""]}'])
def test_lines_that_are_none(tmp_path: Path, row: str) -> None:
    with pytest.raises(RequestError, match=r'line 2: expected \{"prompt": "\.\.\."\} or'):
        read_prompts(write(tmp_path / "p.jsonl", {"prompt": "fine"}, row))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"turns": "ab', "not JSON: Unterminated string"),
        ('{"prompt": "a",}', "not JSON: "),
        ('{"a":' * 99999, "not JSON: maximum recursion depth exceeded"),
        ('{"prompt": "a", "prompt": "b"}', "the key 'prompt' occurs twice in one object; keep one"),
    ],
    ids=["cut", "comma", "deep", "twice"],
)
def test_lines_that_are_no_json(tmp_path: Path, row: str, said: str) -> None:
    with pytest.raises(RequestError, match=f"line 2: {said}"):
        read_prompts(write(tmp_path / "p.jsonl", {"prompt": "fine"}, row))


def test_published_forms_name_their_families(tmp_path: Path) -> None:
    spec = {"question_id": 300, "category": "math_reasoning", "turns": ["Sum."]}
    sums = {"question": "How many?", "answer": "#### 3"}
    code = {"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f"}
    mine = {"id": "a", "prompt": "Hi", "family": "talk"}
    found = read_prompts(write(tmp_path / "p.jsonl", spec, sums, code, mine))
    assert [(p.id, p.source) for p in found] == [
        ("300", "math_reasoning"), ("2", "gsm8k"), ("HumanEval/0", "humaneval"), ("a", "talk"),
    ]  # fmt: skip


def test_lines_of_one_name_are_refused(tmp_path: Path) -> None:
    """Lines without an id have their number, which may be another line's id if files were put together."""
    talk, sums = {"question_id": 2, "turns": ["Compose.", "Rewrite."]}, {"question": "How many?", "answer": "#### 3"}
    with pytest.raises(RequestError, match="line 2: its id '2' is that of line 1, and they would be taken for one"):
        read_prompts(write(tmp_path / "p.jsonl", talk, sums))


def test_several_files_are_told_apart_by_family(tmp_path: Path) -> None:
    one, other = (write(tmp_path / name, {"question": "?", "answer": "!"}) for name in ("a.jsonl", "b.jsonl"))
    found = read_families([str(one), f"sums={other}"])
    assert [(p.id, p.conversation, p.source) for p in found] == [("1", "1", "gsm8k"), ("sums/1", "sums/1", "sums")]
    with pytest.raises(RequestError, match=r"b.jsonl: conversation '1' is in .*a.jsonl, too; tell them apart as"):
        read_families([str(one), str(other)])
    assert len(read_families([])) == len(read_prompts(None))
