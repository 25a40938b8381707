"""Distilled texts as a drafter sees them: hidden states of the teacher, and the tokens its text has further on.

A context is a place t in a text: the runtime has the hidden state of token t and the root, token t + 1, and
asks head i (0-based) for token t + 2 + i. Roots are the teacher's own tokens, so t starts at the last token of
the prompt.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from draftwood.errors import RequestError

# W texts, N tokens or contexts, B texts a batch, S tokens of the longest, H hidden size, I heads

# One row a text: where its tokens start, how many are the prompt, how many it has, and the corpus row it is of.
INDEX = np.dtype([("start", "<i8"), ("prompt", "<i4"), ("length", "<i4"), ("temperature", "<f4"), ("source", "<i4")])
# A target behind the end of the text.
NONE = -100


@dataclass(frozen=True, slots=True)
class Distilled:
    """Texts that a teacher wrote."""

    # uint16 [N], all texts one behind the other.
    tokens_N: np.ndarray
    # INDEX [W].
    index_W: np.ndarray
    # SHA-256 of the teacher.
    teacher: str
    # Tokens that end a text.
    ends: tuple[int, ...]

    @classmethod
    def open(cls, folder: Path, teacher: str | None = None) -> Distilled:
        """Reads all whole shards of a folder that distill wrote, and checks that ``teacher`` wrote them.

        Raises:
            RequestError: there are none, one is damaged, or another teacher wrote them.
        """
        try:
            settings = json.loads((folder / "distill.json").read_text())
            shards = [
                (np.load(path.with_name(path.name.replace(".index", ""))), np.load(path))
                for path in sorted(folder.glob("shard-*.index.npy"))
            ]
        except (OSError, ValueError) as error:
            raise RequestError(f"{folder}: not a whole folder of distilled texts ({error}); run distill") from None
        if not shards:
            raise RequestError(f"{folder}: no shard is finished; run distill first")
        if teacher is not None and settings["teacher"] != teacher:
            raise RequestError(f"{folder}: was written by another teacher; run distill with this one")
        offset = 0
        for tokens, index in shards:
            index["start"] += offset
            offset += len(tokens)
        tokens_N, index_W = (np.concatenate(part) for part in zip(*shards, strict=True))
        return cls(tokens_N, index_W, settings["teacher"], tuple(settings["ends"]))

    def held_out(self) -> np.ndarray:
        """bool [W]: a fixed twentieth, chosen by corpus row, so that both texts of one prompt fall together."""
        return np.array([zlib.crc32(int(s).to_bytes(4, "little")) % 20 == 0 for s in self.index_W["source"]])

    def ended(self) -> np.ndarray:
        """bool [W]: whether the text ends with an end token, and not because its tokens were used up."""
        last = self.index_W["start"] + self.index_W["length"] - 1
        return np.isin(self.tokens_N[last], self.ends)


@dataclass(frozen=True, slots=True)
class Contexts:
    """Hidden states bfloat16 [N, H], targets int64 [N, I] (NONE behind the end), and the text each is of [N]."""

    hidden_NH: Tensor
    targets_NI: Tensor
    text_N: np.ndarray


def targets_of(texts: Distilled, chosen_W: np.ndarray, heads: int) -> tuple[Tensor, np.ndarray]:
    """Targets int64 [N, I] and text int64 [N] of every context in the chosen texts (bool [W]), in text order."""
    text_W = chosen_W.nonzero()[0]
    span_W = _spans(texts.index_W[text_W])
    text_N = np.repeat(text_W, span_W)
    step_N = np.arange(len(text_N)) - np.repeat(np.cumsum(span_W) - span_W, span_W)
    of_N = texts.index_W[text_N]
    place_NI = (of_N["prompt"] - 1 + step_N)[:, None] + 2 + np.arange(heads)
    inside_NI = place_NI < of_N["length"][:, None]
    flat_NI = np.minimum(of_N["start"][:, None] + place_NI, len(texts.tokens_N) - 1)
    return torch.from_numpy(np.where(inside_NI, texts.tokens_N[flat_NI].astype(np.int64), NONE)), text_N


def _spans(index: np.ndarray) -> np.ndarray:
    """Contexts a text: those with a root and at least one token behind it."""
    return np.maximum(index["length"] - index["prompt"] - 1, 0)


@torch.no_grad()
def contexts_of(
    model: LlamaForCausalLM, texts: Distilled, chosen_W: np.ndarray, heads: int, batch: int = 32
) -> Contexts:
    """Runs the teacher over the chosen texts (bool [W]) once; keeps N * H * 2 bytes.

    Recomputing the hidden states at every visit would cost more than half of a training step.
    """
    targets_NI, text_N = targets_of(texts, chosen_W, heads)
    hidden_NH = torch.empty(len(text_N), model.config.hidden_size, dtype=torch.bfloat16)
    text_W = chosen_W.nonzero()[0]
    span_W = _spans(texts.index_W[text_W])
    first_W = np.cumsum(span_W) - span_W
    by_length = np.argsort(texts.index_W["length"][text_W], kind="stable")
    for at in range(0, len(by_length), batch):
        part = by_length[at : at + batch]
        hidden_BSH = _hidden(model, texts, text_W[part])
        for row, which in enumerate(part):
            begin = texts.index_W["prompt"][text_W[which]] - 1
            rows = slice(first_W[which], first_W[which] + span_W[which])
            hidden_NH[rows] = hidden_BSH[row, begin : begin + span_W[which]]
    return Contexts(hidden_NH, targets_NI, text_N)


def _hidden(model: LlamaForCausalLM, texts: Distilled, text_B: np.ndarray) -> Tensor:
    """Final-norm hidden states, bfloat16 [B, S, H] on the host; padding stands on the right, unseen."""
    index_B = texts.index_W[text_B]
    ids_BS = torch.zeros(len(index_B), int(index_B["length"].max()), dtype=torch.int64)
    for row, (start, length) in enumerate(zip(index_B["start"], index_B["length"], strict=True)):
        ids_BS[row, :length] = torch.from_numpy(texts.tokens_N[start : start + length].astype(np.int64))
    with torch.autocast(model.device.type, dtype=torch.bfloat16):
        hidden_BSH = model.model(ids_BS.to(model.device), use_cache=False).last_hidden_state
    return hidden_BSH.to("cpu", torch.bfloat16)
