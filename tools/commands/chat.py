"""``draftwood chat``: a conversation with a bundle in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, Any

from draftwood.errors import RequestError
from draftwood.manifest import read_manifest
from draftwood.runtime.reasoning import Reasoning, begins_in, form_of
from draftwood.tools.commands.arguments import (
    add_bundle_argument,
    add_decoding_arguments,
    add_opening_arguments,
    decoding_options,
    opening_of,
    show_openings,
)

if TYPE_CHECKING:
    from draftwood.runtime.decoding import Decoding
    from draftwood.runtime.opened import OpenedBundle

# How a terminal shows reasoning, and all else.
_DIM, _USUAL = "\033[2m", "\033[0m"
# Why an answer is not whole, by the reason that ended it.
_CUT = {"length": ", cut by --max-new-tokens", "context": ", cut: the context is full; /new begins anew"}
HELP = "/new begins anew, /plain switches drafts off and on, /quit or Ctrl-D ends; Ctrl-C stops an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_bundle_argument(parser)
    add_decoding_arguments(parser, "temperature")
    parser.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="of an answer (default: as many as the context has room for)"
    )
    add_opening_arguments(parser)


def main(args: argparse.Namespace) -> int:
    import draftwood
    from draftwood.threads import share_threads

    share_threads()
    show_openings()
    manifest = read_manifest(args.bundle)
    if not manifest.tokenizer:  # said before its graphs are opened
        raise RequestError(f"{args.bundle}: has no tokenizer; draftwood run continues token ids")
    with draftwood.open(args.bundle, opening_of(args)) as model:
        tokenizer = model.bundle.tokenizer
        if tokenizer is None or not tokenizer.has_chat:
            raise RequestError(f"{args.bundle}: has no chat template; draftwood run continues a text")
        if args.max_new_tokens is None:
            args.max_new_tokens = manifest.dims.context
        Dialogue(model, decoding_options(args)).run()
    return 0


class Dialogue:
    """Turns; each sees those before it."""

    def __init__(self, model: OpenedBundle, options: Any) -> None:
        self._model, self._options = model, options
        self._form = form_of(model.bundle.tokenizer)
        self._messages: list[dict[str, str]] = []
        self._plain = False

    def run(self) -> None:
        """Until the input ends; a closed one has ended."""
        if sys.stdin is None:
            return
        terminal = sys.stdin.isatty()
        if terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 (lines can be edited and recalled)
            print(HELP, file=sys.stderr)
        while True:
            try:
                line = _line("> " if terminal else "")
                if line == "/quit":
                    return
                if line:
                    self._turn(line)
            except KeyboardInterrupt:  # at the prompt, or in the moments around an answer
                print()

    def _turn(self, line: str) -> None:
        if line == "/new":
            self._messages.clear()
        elif line == "/plain":
            self._plain = not self._plain
            print(f"plain decoding {'on' if self._plain else 'off'}", file=sys.stderr)
        elif line.startswith("/"):
            print(HELP, file=sys.stderr)
        else:
            messages = [*self._messages, {"role": "user", "content": line}]
            try:
                if answer := self._answer(messages):
                    self._messages = [*messages, answer]
            except RequestError as error:  # too long by now, say; the conversation goes on without this turn
                print(f"{error}\n/new begins anew", file=sys.stderr)

    def _answer(self, messages: list[dict[str, str]]) -> dict[str, str] | None:
        """Decodes and prints an answer; the message that it is, for the turns after it, or None if an interrupt came
        before its text: the model never answered nothing."""
        asked = {"policy": "plain" if self._plain else "adaptive", **self._options}
        if self._form is not None:
            asked["special_tokens"] = self._form.special
        decoding: Decoding | None = None
        printed, stopped = Printed(), False
        try:  # an interrupt also stops the rendering of the chat
            decoding = self._model.stream(messages, **asked)
            reader = Reasoning(self._form)
            if begins_in(decoding.prompt, self._form, self._model.bundle.tokenizer):
                reader.begin()
            for piece in decoding:
                printed.add(*reader.push(piece))
            printed.add(*reader.finish())
        except KeyboardInterrupt:
            stopped = True
        print(flush=True)
        _tell(decoding)
        if stopped and not printed.answer:
            return None
        reasoning = {"reasoning_content": printed.reasoning} if printed.reasoning else {}
        return {"role": "assistant", "content": printed.answer, **reasoning}


class Printed:
    """An answer as it is printed: its reasoning first, dim in a terminal, then a blank line and the text."""

    def __init__(self) -> None:
        self.reasoning = self.answer = ""
        self._marks = (_DIM, _USUAL) if sys.stdout.isatty() else ("", "")

    def add(self, reasoning: str, answer: str) -> None:
        if reasoning:
            print(f"{self._marks[0]}{reasoning}{self._marks[1]}", end="", flush=True)
        if answer:
            print("" if self.answer or not (self.reasoning + reasoning) else "\n\n", answer, sep="", end="", flush=True)
        self.reasoning += reasoning
        self.answer += answer


def _line(prompt: str) -> str:
    """The next line that is typed; /quit when the input ends."""
    try:
        return input(prompt).strip()
    except EOFError:
        return "/quit"


def _tell(decoding: Decoding | None) -> None:
    """The figures of a turn."""
    result = None if decoding is None else decoding.result
    if result is None:
        print("stopped", file=sys.stderr)
        return
    rate = (len(result.token_ids) - 1) / max(result.decode_seconds, 1e-9)
    print(
        f"{len(result.token_ids)} tokens in {result.steps} steps, {result.accept_length_mean:.2f} a step,"
        f" {rate:.0f} tokens/s{_CUT.get(result.finish_reason, '')}",
        file=sys.stderr,
    )
