"""Distilled texts: the tokens a teacher wrote, on disk and in batches."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwood.compiler.training.batch import Batch
from draftwood.errors import RequestError

# W texts, N tokens, B texts a batch, S tokens of the longest, C contexts of the longest, H hidden size, F width of the
# aux states

# One row a text: where its tokens start, how many are the prompt, how many it has, and the corpus row it is of.
INDEX = np.dtype([("start", "<i8"), ("prompt", "<i4"), ("length", "<i4"), ("temperature", "<f4"), ("source", "<i4")])
# Batches whose texts are sorted by length together: sorting saves padding, but mixes the texts less.
_SORTED = 16


@dataclass(frozen=True, slots=True)
class Distilled:
    """Texts that a teacher wrote."""

    # uint32 [N], all texts one after the other.
    tokens_N: np.ndarray
    # INDEX [W].
    index_W: np.ndarray
    # How many of the texts each shard has.
    shards: tuple[int, ...]
    # SHA-256 of the teacher, and of tokens and index together.
    teacher: str
    digest: str
    # Tokens that end a text.
    ends: tuple[int, ...]

    @classmethod
    def open(cls, folder: Path, teacher: str | None = None) -> Distilled:
        """Reads all whole shards of a folder that distill wrote, and checks that ``teacher`` wrote them.

        Raises:
            RequestError: there are none, one is damaged, or another teacher wrote them.
        """
        try:
            settings = _settings(folder)
        except (OSError, ValueError) as error:
            raise RequestError(f"{folder}: not a whole folder of distilled texts ({error}); run distill") from None
        shards = [_shard(path) for path in sorted(folder.glob("shard-*.index.npy"))]
        if not shards:
            raise RequestError(f"{folder}: no shard is finished; run distill first")
        if teacher is not None and settings["teacher"] != teacher:
            raise RequestError(f"{folder}: was written by another teacher; run distill with this one")
        offset = 0
        for tokens, index in shards:
            index["start"] += offset
            offset += len(tokens)
        tokens_N, index_W = (np.concatenate(part) for part in zip(*shards, strict=True))
        digest = hashlib.sha256(tokens_N.tobytes() + index_W.tobytes()).hexdigest()
        counts = tuple(len(index) for _, index in shards)
        return cls(tokens_N, index_W, counts, settings["teacher"], digest, tuple(settings["ends"]))

    def held_out(self) -> np.ndarray:
        """bool [W]: a fixed twentieth, chosen by corpus row, so that both texts of one prompt fall together; of rows so
        few that none is chosen, the last."""
        source_W = self.index_W["source"]
        held_W = np.array([zlib.crc32(int(source).to_bytes(4, "little")) % 20 == 0 for source in source_W])
        return held_W if held_W.any() else source_W == source_W.max()

    def ended(self) -> np.ndarray:
        """bool [W]: whether the text ends with an end token, and not because its tokens were used up."""
        last = self.index_W["start"] + self.index_W["length"] - 1
        return np.isin(self.tokens_N[last], np.array(self.ends))

    def spans(self) -> np.ndarray:
        """int [W]: contexts a text, those with a root and at least one token after it."""
        return np.maximum(self.index_W["length"] - self.index_W["prompt"] - 1, 0)

    def tokens_of(self, text: int) -> np.ndarray:
        """The tokens of one text, uint32 [its length], prompt included."""
        start, length = self.index_W["start"][text], self.index_W["length"][text]
        return self.tokens_N[start : start + length]


def _shard(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The tokens and the index of a shard's texts.

    Raises:
        RequestError: one of the two files is damaged, or they do not belong together.
    """
    try:
        tokens, index = np.load(path.with_name(path.name.replace(".index", ""))), np.load(path)
        if index.dtype != INDEX or tokens.shape != (index["length"].sum(),):
            raise ValueError("it is not of the tokens next to it")
    except (OSError, EOFError, ValueError) as error:
        raise RequestError(f"{path}: damaged shard ({error}); remove it, and run distill again") from None
    return tokens, index


def _settings(folder: Path) -> dict[str, Any]:
    """The request that distill had; OSError or ValueError if no file says it."""
    settings = json.loads((folder / "distill.json").read_text())
    if not isinstance(settings, dict) or not isinstance(settings.get("teacher"), str):
        raise ValueError("distill.json names no teacher")
    ends = settings.get("ends")
    if not isinstance(ends, list) or not all(isinstance(token, int) for token in ends):
        raise ValueError("distill.json names no end tokens")
    return settings


def batch_of(texts: Distilled, text_B: np.ndarray, last_BSH: Tensor, aux_BSF: Tensor) -> Batch:
    """The texts numbered ``text_B`` with the teacher's states, on the device where these lie."""
    index_B, span_B = texts.index_W[text_B], texts.spans()[text_B]
    count, device = np.arange(max(1, span_B.max())), last_BSH.device
    slot_BC = np.minimum(index_B["prompt"][:, None] - 1 + count, index_B["length"][:, None] - 1)
    arrays = (padded(texts, text_B), index_B["length"], slot_BC)
    ids_BS, length_B, slot_BC = (torch.from_numpy(a.astype(np.int64)).to(device) for a in arrays)
    there_BC = torch.from_numpy(count < span_B[:, None]).to(device)
    temperature_B = torch.from_numpy(index_B["temperature"].copy()).to(device)
    return Batch(ids_BS, length_B, slot_BC, there_BC, last_BSH, aux_BSF, temperature_B)


def padded(texts: Distilled, text_B: np.ndarray) -> np.ndarray:
    """Tokens of the texts numbered ``text_B``, uint32 [B, S], zeros on the right."""
    ids_BS = np.zeros((len(text_B), texts.index_W["length"][text_B].max()), np.uint32)
    for row, text in enumerate(text_B):
        ids_BS[row, : texts.index_W["length"][text]] = texts.tokens_of(text)
    return ids_BS


def by_length(lengths: np.ndarray, text_W: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """The texts once, in batches of up to ``size`` of like length."""
    ordered = text_W[np.argsort(lengths[text_W], kind="stable")]
    return (ordered[at : at + size] for at in range(0, len(ordered), size))


def shuffled(lengths: np.ndarray, text_W: np.ndarray, size: int, seed: int, start: int) -> Iterator[np.ndarray]:
    """Endless batches of ``size`` text numbers of like length; ``start`` of them are skipped.

    Each epoch has its own order, which depends on the seed alone: every drafter sees the same texts in turn.
    """
    size = min(size, len(text_W))
    epoch, skip = divmod(start, len(text_W) // size)
    while True:
        rng = np.random.default_rng((seed, epoch))
        order = rng.permutation(text_W)[: len(text_W) // size * size]
        groups = [order[at : at + _SORTED * size] for at in range(0, len(order), _SORTED * size)]
        batches = [picked for group in groups for picked in by_length(lengths, group, size)]
        yield from (batches[i] for i in rng.permutation(len(batches))[skip:])
        epoch, skip = epoch + 1, 0
