"""Prompts that the teacher writes itself (Magpie; Xu et al., 2024, arXiv 2406.08464).

After the tokens that open a user's turn, a teacher that was tuned to chat writes a user's question. Every third
conversation goes on: the teacher answers, and asks again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

from draftwood.compiler.training.teacher import FrozenTeacher
from draftwood.errors import RequestError
from draftwood.files import write_whole
from draftwood.runtime.text.tokenizer import Tokenizer
from draftwood.tools.training.generate import batch_draws, generate
from draftwood.tools.training.rows import Row, WrittenMessage, read_rows

# The longest turns, in tokens: a question, and an answer that is asked about.
_QUESTION, _ANSWER = 160, 128
# Questions should differ; answers are those that users get.
_QUESTION_TEMPERATURE, _ANSWER_TEMPERATURE = 0.9, 0.7


class OwnPrompts:
    """Writes conversations that end with a user's turn."""

    def __init__(
        self, model: FrozenTeacher, text: Tokenizer, seed: int, batch: int, told: Callable[[int], None]
    ) -> None:  # fmt: skip
        """``batch`` turns are written at a time; ``told`` is called as ``generate`` does.

        Raises:
            RequestError: there is no chat template.
        """
        if not text.has_chat:
            raise RequestError("the teacher has no chat template, so it writes no prompts; name --data")
        self.model, self.text, self.seed, self.batch, self.told = model, text, seed, batch, told

    def rows(self, count: int) -> list[Row]:
        """Up to ``count`` rows: unfinished, empty and repeated questions are dropped."""
        chats: list[list[WrittenMessage]] = [[] for _ in range(count)]
        chats = self._asked(chats)
        first, again = chats[: -len(chats) // 3], chats[-len(chats) // 3 :]
        answers = self._written([self.text.chat(chat) for chat in again], _ANSWER, _ANSWER_TEMPERATURE)
        answered = [
            [*chat, WrittenMessage(role="assistant", content=self.text.decode(new).strip())]
            for chat, new in zip(again, answers, strict=True)
            if new
        ]
        return [Row(id=f"own/{number}", messages=chat) for number, chat in enumerate([*first, *self._asked(answered)])]

    def _asked(self, chats: Sequence[list[WrittenMessage]]) -> list[list[WrittenMessage]]:
        """The conversations with one more question each."""
        written = self._written([self._opening(chat) for chat in chats], _QUESTION, _QUESTION_TEMPERATURE)
        continued = {}
        for chat, new in zip(chats, written, strict=True):
            if (question := self.text.decode(new).strip()) and new[-1] in self.model.config.eos:
                continued[question] = [*chat, WrittenMessage(role="user", content=question)]
        return list(continued.values())

    def _opening(self, chat: Sequence[WrittenMessage]) -> list[int]:
        """The tokens after which a user's turn begins: the common beginning of two chats that differ in it alone."""
        first, second = (
            self.text.chat([*chat, WrittenMessage(role="user", content=content)]) for content in ("A", "7")
        )
        return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))]

    def _written(self, prompts: Sequence[list[int]], new: int, temperature: float) -> list[list[int]]:
        """The teacher's continuation of each prompt; nothing if its positions do not suffice."""
        longest = self.model.config.max_positions - new
        fitting = [number for number, prompt in enumerate(prompts) if len(prompt) <= longest]
        ordered = sorted(fitting, key=lambda number: len(prompts[number]))
        written: dict[int, list[int]] = {}
        for at in range(0, len(ordered), self.batch):
            chosen = ordered[at : at + self.batch]
            self.seed += 1
            draws = batch_draws([temperature] * len(chosen), self.seed, self.model.device)
            texts = generate(self.model, [prompts[n] for n in chosen], draws, new, self.model.config.eos, self.told)
            written.update(zip(chosen, texts, strict=True))
        return [written.get(number, []) for number in range(len(prompts))]


def own_rows(path: Path, count: int, writer: Callable[[], OwnPrompts]) -> list[Row]:
    """The rows of ``path``, which are written if there is no such file."""
    if not path.is_file():
        write_whole(path, "".join(json.dumps(row) + "\n" for row in writer().rows(count)).encode())
    return list(read_rows(path))
