"""Answers that solve a problem, and those that do not."""

import pytest

from draftwood.tools.benchmarks import judge
from draftwood.tools.benchmarks.judge import has_answer, passes, program, solves
from draftwood.tools.prompts import Prompt

HEAD = 'from math import floor\n\ndef half(x):\n    return x / 2\n\ndef low(x: float) -> int:\n    """Half."""\n'
TEST = "def check(candidate):\n    assert candidate(5) == 2\n"


def problem(text: str, **reference: str) -> Prompt:
    return Prompt(id="p", text=text, conversation="p", source="s", reference=reference)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("She makes 9 * 2 = $1,018 every day.", True),
        ("1018", True),
        ("It is 1018.0.", True),
        ("1018 eggs for 2 days", False),
        ("-1018", False),
        ("none", False),
    ],
)
def test_sums(text: str, right: bool) -> None:
    assert solves(problem("How much?", answer="9 * 2 = <<9*2=18>>18\n#### 1,018"), text) == right


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("```python\ndef low(x):\n    return floor(half(x))\n```\nThis rounds.", True),
        ("Here:\n```\ndef other(): pass\n```\n```py\ndef low(x):\n    return floor(half(x))", True),
        ("```Python 3\ndef low(x):\n    return floor(half(x))\n```", True),
        ("1. So:\n   ```python\n   def low(x):\n       return floor(half(x))\n   ```\n2. It rounds.", True),
        ("def low(x):\n    return floor(half(x))", True),
        ("def low(x):\n    return floor(half(x))\n\nif __name__ == '__main__':\n    print(low(input()))", True),
        ("    return floor(half(x))", True),
        ("\n    y = half(x)\n\n    return floor(y)\n\n\ndef low(x):\n    return 1\n\nassert low(", True),
        ("    return floor(half(x))\n```\nThis rounds.", True),
        ("```python\ndef low(x):\n    return x\n```", False),
        ("```python\ndef low(x):\n    import sys; sys.exit(0)\n```", False),
        ("I cannot.", False),
        ("    return 2\0", False),
    ],
)
def test_functions(text: str, right: bool) -> None:
    assert solves(problem(HEAD, test=TEST, entry_point="low"), text) == right


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "x = bytearray(1 << 33)",
        "open('x', 'wb').write(bytes(1 << 22))",
        "import os; os._exit(0)",
        "for _ in range(9): print('x' * (1 << 20))",
    ],
)
def test_a_program_beyond_its_limits_does_not_pass(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "SECONDS", 1)
    assert not passes(code)


def test_a_test_may_be_longer_than_a_commands_argument() -> None:
    """HumanEval+ has tests of a megabyte."""
    assert passes(f"assert len({'x' * 200_000!r}) == 200_000")


def test_a_program_has_what_stands_before_its_function() -> None:
    assert program(HEAD, "    return 1\n", "low", TEST).startswith(HEAD + "    return 1\n")
    assert has_answer(problem("", answer="5")) and not has_answer(problem("", answer="five"))
    assert not has_answer(problem(""))
