"""``draftwood chat`` as somebody at a terminal has it."""

import contextlib
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import draftwood
from draftwood.runtime.reasoning import ReasoningForm
from draftwood.tools.cli import main
from draftwood.tools.commands import chat


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        command = [sys.executable, "-P", "-m", "draftwood.tools.cli", *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            # Whoever starts the tests in the background has them ignore interrupts, and a child inherits that.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
            env=os.environ | {"TERM": "dumb"},
        )
        os.close(theirs)
        self.text = ""

    def until(self, pattern: str, seconds: float = 300) -> "re.Match[str]":
        """Waits for what it prints; what was waited for is not found again."""
        limit = time.monotonic() + seconds
        while (found := re.search(pattern, self.text)) is None:
            assert time.monotonic() < limit, self.text
            if select.select([self._ours], [], [], 0.2)[0]:
                try:
                    self.text += os.read(self._ours, 4096).decode(errors="replace")
                except OSError:  # it has ended
                    assert re.search(pattern, self.text), self.text
        self.text = self.text[found.end() :]
        return found

    def interrupt_until(self, pattern: str) -> None:
        """Interrupts, again every second: a signal between readline's last look and its wait shows at the next."""
        for _ in range(60):
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(AssertionError):
                self.until(pattern, 1)
                return
        raise AssertionError(self.text)

    def send(self, line: str) -> None:
        os.write(self._ours, line.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal(tiny_bundle: Path) -> Iterator[Terminal]:
    made = Terminal("chat", str(tiny_bundle), "--temperature", "0", "--max-new-tokens", "12")
    yield made
    made.close()


def answer(bundle: Path, *turns: str) -> str:
    """The library's answer to a user's last turn, after the earlier turns and answers."""
    messages: list[dict[str, str]] = []
    with draftwood.open(bundle, threads=1) as model:
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            text = model.generate(list(messages), max_new_tokens=12, policy="plain").text
            assert text is not None
            messages.append({"role": "assistant", "content": text})
    return text


def shown(text: str) -> str:
    """As a terminal gives a text back, up to the figures."""
    return text.replace("\n", "\r\n").strip()


FIGURES = r"(?s)\r\n(.*?)\r\n\d+ tokens in \d+ steps, [\d.]+ a step, \d+ tokens/s, cut by --max-new-tokens\r\n"


def test_a_conversation_in_a_terminal(terminal: Terminal, tiny_bundle: Path) -> None:
    terminal.until("/new begins anew")
    terminal.until("> ")
    terminal.send("the cat\n")
    assert terminal.until(FIGURES)[1].strip() == shown(answer(tiny_bundle, "the cat"))
    terminal.until("> ")
    terminal.send("the hat\n")
    assert terminal.until(FIGURES)[1].strip() == shown(answer(tiny_bundle, "the cat", "the hat"))
    terminal.send("/new\n")
    terminal.send("the hat\n")
    assert shown(answer(tiny_bundle, "the hat")) in terminal.until(FIGURES)[0]
    terminal.send("/plain\n")
    terminal.until("plain decoding on")
    terminal.send("/what\n")
    terminal.until("/quit or Ctrl-D ends")
    terminal.until("> ")
    terminal.interrupt_until("> ")  # nothing runs
    terminal.send("\x04")
    assert terminal.process.wait(300) == 0


def test_an_interrupt_stops_an_answer_and_nothing_else(tiny_bundle: Path) -> None:
    terminal = Terminal("chat", str(tiny_bundle), "--temperature", "0", "--max-new-tokens", "200")
    try:
        terminal.until("> ")
        terminal.send("the cat\n")
        terminal.until(re.escape(shown(answer(tiny_bundle, "the cat"))[:4]))
        terminal.process.send_signal(signal.SIGINT)
        terminal.until(r"stopped\r\n|tokens/s")  # the answer may have ended before
        terminal.until("> ")
        terminal.send("/quit\n")
        assert terminal.process.wait(300) == 0
    finally:
        terminal.close()


def test_an_answer_is_as_long_as_the_context_has_room(tiny_bundle: Path) -> None:
    command = [sys.executable, "-P", "-m", "draftwood.tools.cli", "chat", str(tiny_bundle), "--temperature", "0"]
    ended = subprocess.run(command, input="the cat\n", capture_output=True, text=True, check=True)
    with draftwood.open(tiny_bundle, threads=1) as model:
        messages = [{"role": "user", "content": "the cat"}]
        result = model.generate(messages, max_new_tokens=model.manifest.dims.context, policy="plain")
    assert result.finish_reason == "context" and len(result.token_ids) > 128
    assert ended.stdout.strip() == (result.text or "").strip()
    assert f"{len(result.token_ids)} tokens in" in ended.stderr and "the context is full" in ended.stderr


@pytest.mark.parametrize("after", [0.0, 0.002, 0.01, 0.03])
def test_an_interrupt_at_any_moment_leaves_the_conversation(terminal: Terminal, after: float) -> None:
    terminal.until("> ")
    terminal.send("the cat\n")
    terminal.until("the cat\r\n")  # the echo: the line may not have been read yet
    time.sleep(after)
    terminal.process.send_signal(signal.SIGINT)
    terminal.until("> ")
    terminal.send("the hat\n")
    terminal.until("tokens/s")
    terminal.send("/quit\n")
    assert terminal.process.wait(300) == 0


def test_a_bundle_without_a_chat_template_is_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    done: Any = subprocess.run(
        [sys.executable, "-P", "-m", "draftwood.tools.cli", "chat", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1


class _Reasons:
    """A model whose answers are those texts; an empty one is interrupted before it begins."""

    bundle = SimpleNamespace(tokenizer=None)

    def __init__(self, *texts: str) -> None:
        self._texts, self.asked = list(texts), list[Any]()

    def stream(self, messages: list[dict[str, str]], **asked: Any) -> Any:
        self.asked.append((messages, asked))
        text = self._texts.pop(0)
        decoding: Any = _Letters(text) if text else _Interrupted()
        decoding.prompt, decoding.result = [], None
        return decoding


class _Interrupted:
    """An answer that is interrupted before it begins."""

    def __iter__(self) -> Iterator[str]:
        raise KeyboardInterrupt


class _Letters(list):
    prompt: list[int]
    result: None


def test_a_closed_input_has_ended(monkeypatch: pytest.MonkeyPatch, tiny_bundle: Path) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert main(["chat", str(tiny_bundle)]) == 0


def test_an_interrupt_before_an_answer_leaves_no_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "form_of", lambda tokenizer: None)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    model = _Reasons("", "Yes.")
    chat.Dialogue(cast(Any, model), {}).run()
    assert [messages for messages, _ in model.asked] == [[{"role": "user", "content": line}] for line in ("one", "two")]


def test_reasoning_is_told_from_the_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    form = ReasoningForm(begin="[unused16]", end="[unused17]", special=["[unused16]", "[unused17]"])
    monkeypatch.setattr(chat, "form_of", lambda tokenizer: form)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    model = _Reasons("[unused16]Hm.\n[unused17]\nYes.", "No.")
    chat.Dialogue(cast(Any, model), {"temperature": 0.0}).run()
    assert capsys.readouterr().out == "Hm.\n\nYes.\nNo.\n"
    messages, asked = model.asked[1]
    assert messages[1] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    assert asked == {"policy": "adaptive", "temperature": 0.0, "special_tokens": form.special}
