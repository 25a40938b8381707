"""Long prompts made of short ones."""

import pytest

from draftwood.runtime.text.tokenizer import Tokenizer
from draftwood.tests import fixtures
from draftwood.tools.cli import main
from draftwood.tools.documents import behind_documents, behind_in_turn
from draftwood.tools.prompts import BUILT_IN, Prompt, read_prompts
from draftwood.trees.calibration_file import read_calibration


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(fixtures.TEACHER)


@pytest.mark.parametrize("tokens", [100, 700, 3000])
def test_a_question_comes_behind_others_up_to_its_length(tokenizer: Tokenizer, tokens: int) -> None:
    prompts = read_prompts(BUILT_IN)
    found = behind_documents(prompts, 3, tokens, tokenizer)
    assert found is not None and found.text.endswith("\n\n" + prompts[3].text)
    assert found.text.startswith(prompts[4].text) and found.conversation == prompts[3].conversation
    # Prompts are read again as one text, in which neighbouring words may be other tokens.
    assert len(tokenizer.chat([{"role": "user", "content": found.text}])) == pytest.approx(tokens, rel=0.04)
    assert behind_documents(prompts, 3, 5, tokenizer) is None


def test_conversations_take_lengths_in_turn_and_later_turns_none(tokenizer: Tokenizer) -> None:
    prompts = [
        Prompt(id=f"{name}/{turn}", text=f"What is {name} {turn}?", conversation=name, source="")
        for name in "abc"
        for turn in (1, 2)
    ]
    found = behind_in_turn(prompts, (0, 200), tokenizer, 2000)
    assert [one.id for one in found] == [one.id for one in prompts]
    changed = [one.id for one, other in zip(found, prompts, strict=True) if one != other]
    assert changed == ["b/1"]
    assert [one.conversation for one in behind_in_turn(prompts, (0, 200), tokenizer, 100)] == ["a", "a", "c", "c"]


@pytest.mark.parametrize("text", ["", "far", "-1", "1,,2", "0.5"])
def test_lengths_that_are_none(text: str, tmp_path, capsys) -> None:
    line = ["calibrate", str(fixtures.TEACHER), "--drafter", str(fixtures.MEDUSA), "--behind", text]
    assert main([*line, "--out", str(tmp_path / "x.stats")]) == 2
    assert "--behind" in capsys.readouterr().err and not (tmp_path / "x.stats").exists()


def test_lengths_past_what_the_teacher_knows_are_named_and_left_out(tmp_path, capsys) -> None:
    line = [
        "calibrate",
        str(fixtures.TEACHER),
        "--drafter",
        str(fixtures.MEDUSA),
        "--behind",
        "2600,0",
        "--max-new-tokens",
        "24",
    ]
    prompts = tmp_path / "two.jsonl"
    prompts.write_text("".join(BUILT_IN.read_text().splitlines(keepends=True)[:2]))
    assert main([*line, "--prompts", str(prompts), "--out", str(tmp_path / "x.stats")]) == 0
    said = capsys.readouterr()
    assert "--behind 2600: a text has 2048 tokens at most" in said.err
    assert read_calibration(tmp_path / "x.stats").contexts.total > 0
