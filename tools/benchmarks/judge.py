"""Problems with a known answer, and whether a text solves one: GSM8K's numbers and HumanEval's functions.

A function that a model wrote is run, in a process of its own with limits of time, memory, and what it writes. That
keeps accidents away and no attacker, so such problems belong on a machine where a stranger's program may run.
"""

from __future__ import annotations

import re
import resource
import secrets
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from textwrap import dedent

from draftwood.tools.prompts import Prompt

# Seconds, bytes of memory and bytes of a file that a model's program may take.
SECONDS, MEMORY, FILE_BYTES = 10, 2 << 30, 1 << 20
# The program lies in a file: an argument of a command has to be shorter than some tests are. As in HumanEval's own
# harness it is no main program, so what an answer does only as one, such as to ask for input, is not done.
_RUN = "exec(compile(open('program', encoding='utf-8').read(), 'program', 'exec'), {})"
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_BLOCK = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.S)
# The end of a line before one that is not indented.
_END = re.compile(r"\n(?=\S)")


def has_answer(prompt: Prompt) -> bool:
    """Whether a prompt's line says what solves it."""
    return "test" in prompt.reference or _last_number(prompt.reference.get("answer", "")) is not None


def solves(prompt: Prompt, text: str) -> bool:
    """Whether the model's text solves the problem of a prompt that has an answer.

    A sum is solved if the text's last number is the answer's. A function is solved if its tests pass.
    """
    reference = prompt.reference
    if "test" in reference:
        return passes(program(prompt.text, text, reference["entry_point"], reference["test"]))
    return _last_number(text) == _last_number(reference["answer"])


def _last_number(text: str) -> float | None:
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def program(prompt: str, text: str, function: str, test: str) -> str:
    """The program of a model's answer and HumanEval's test of it.

    The answer is the first block of code that defines the function, or else all of the text. A text that begins
    indented, or does not define the function itself, goes on from the prompt, to the function's end: what follows there
    is often cut off in the middle.
    """
    head = f"def {function}("
    blocks = [dedent(block) for block in _BLOCK.findall(text) if head in block]
    if not blocks and (head not in text or text.lstrip("\n").startswith(("  ", "\t"))):
        whole = prompt + _END.split(text)[0]
    else:  # what stands before the function in the prompt, imports and helpers, is often left out of an answer
        whole = f"{prompt.partition(head)[0]}\n{blocks[0] if blocks else text.strip()}"
    return f"{whole}\n{test}\ncheck({function})\n"


def passes(code: str) -> bool:
    """Whether a program runs to its end, within the limits."""
    word = secrets.token_hex(8)  # or a program that ends itself early would pass
    # What it prints goes to a file, whose size is limited: a loop may print gigabytes.
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as said:
        try:
            (Path(folder) / "program").write_text(f"{code}\nprint({word!r})", encoding="utf-8")
            done = subprocess.run(
                [sys.executable, "-I", "-c", _RUN],
                cwd=folder,
                env={},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.DEVNULL,
                timeout=SECONDS,
                preexec_fn=partial(_limit, (SECONDS, MEMORY, FILE_BYTES)),
            )
        except (subprocess.TimeoutExpired, UnicodeEncodeError):  # half a character has no UTF-8
            return False
        said.seek(0)
        return done.returncode == 0 and said.read().endswith(f"{word}\n".encode())


def _limit(limits: tuple[int, int, int]) -> None:
    for kind, most in zip((resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_FSIZE), limits, strict=True):
        resource.setrlimit(kind, (most, most))
