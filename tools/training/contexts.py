"""Distilled texts as a drafter sees them: the teacher's hidden states, and the tokens its text has further on.

A context is a place t in a text (a *slot* of the drafter): the runtime has the teacher's states of token t and the
root, token t + 1, and asks for token t + 2 at level 0, token t + 3 at level 1, and so on. Roots are the teacher's
own tokens, so t starts at the last token of the prompt.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftwood.errors import RequestError

# W texts, N tokens or contexts, B texts a batch, S tokens of the longest, C contexts of the longest, I levels

# One row a text: where its tokens start, how many are the prompt, how many it has, and the corpus row it is of.
INDEX = np.dtype([("start", "<i8"), ("prompt", "<i4"), ("length", "<i4"), ("temperature", "<f4"), ("source", "<i4")])
# A target behind the end of the text.
NONE = -100
# Batches whose texts are sorted by length together: sorting saves padding, but mixes the texts less.
_SORTED = 16


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

    def spans(self) -> np.ndarray:
        """int [W]: contexts a text, those with a root and at least one token behind it."""
        return np.maximum(self.index_W["length"] - self.index_W["prompt"] - 1, 0)

    def tokens_of(self, text: int) -> np.ndarray:
        """The tokens of one text, uint16 [its length], prompt included."""
        start, length = self.index_W["start"][text], self.index_W["length"][text]
        return self.tokens_N[start : start + length]


@dataclass(frozen=True, slots=True)
class Batch:
    """Some texts with the teacher's states, padded on the right, where no context looks.

    Contexts are numbered text by text: what is said of "each context", [N], is in that order.
    """

    # int64 [B, S].
    ids_BS: Tensor
    # int64 [B].
    length_B: Tensor
    # The slot of each context, int64 [B, C]; past a text's last context it repeats a slot that exists.
    slot_BC: Tensor
    # bool [B, C]: False past a text's last context. N of them are True.
    there_BC: Tensor
    # The teacher's states behind its final norm, [B, S, H], which its output matrix reads.
    last_BSH: Tensor
    # Its states entering the aux layers, low to high, [B, S, F].
    aux_BSF: Tensor

    @classmethod
    def of(cls, texts: Distilled, text_B: np.ndarray, last_BSH: Tensor, aux_BSF: Tensor) -> Batch:
        """The texts numbered ``text_B``, on the device where their states lie."""
        index_B, span_B = texts.index_W[text_B], texts.spans()[text_B]
        count, device = np.arange(max(1, span_B.max())), last_BSH.device
        slot_BC = np.minimum(index_B["prompt"][:, None] - 1 + count, index_B["length"][:, None] - 1)
        arrays = (padded(texts, text_B), index_B["length"], slot_BC)
        ids_BS, length_B, slot_BC = (torch.from_numpy(a.astype(np.int64)).to(device) for a in arrays)
        return cls(ids_BS, length_B, slot_BC, torch.from_numpy(count < span_B[:, None]).to(device), last_BSH, aux_BSF)

    def pick(self, states_BSH: Tensor) -> Tensor:
        """The rows of the contexts' own slots, [N, H]."""
        row_N, place_N = self.there_BC.nonzero().unbind(1)
        return states_BSH[row_N, self.slot_BC[row_N, place_N]]

    def spread(self, states_BSH: Tensor) -> Tensor:
        """The rows of the contexts' own slots, [B, C, H]."""
        index_BCH = self.slot_BC[:, :, None].expand(-1, -1, states_BSH.shape[-1])
        return states_BSH.gather(1, index_BCH)

    def ahead(self, distance: int) -> Tensor:
        """The token ``distance`` behind each context's slot, int64 [B, C]; the padding's where there is none."""
        return self.ids_BS.gather(1, (self.slot_BC + distance).clamp(max=self.ids_BS.shape[1] - 1))

    def targets(self, levels: int) -> Tensor:
        """What each level should predict in each context, int64 [N, I]: tokens, NONE behind the end."""
        found = []
        for level in range(levels):
            inside_BC = self.slot_BC + 2 + level < self.length_B[:, None]
            found.append(torch.where(inside_BC, self.ahead(2 + level), NONE)[self.there_BC])
        return torch.stack(found, 1)

    def places(self, levels: int) -> Tensor:
        """Where, among B * S rows, the teacher's state lies that predicts the same token, int64 [N, I]."""
        size = self.ids_BS.shape[1]
        first_BC = torch.arange(len(self.ids_BS), device=self.ids_BS.device)[:, None] * size
        slots = [(self.slot_BC + 1 + level).clamp(max=size - 1) for level in range(levels)]
        return torch.stack([(first_BC + slot_BC)[self.there_BC] for slot_BC in slots], 1)


def padded(texts: Distilled, text_B: np.ndarray) -> np.ndarray:
    """Tokens of the texts numbered ``text_B``, uint16 [B, S], zeros on the right."""
    ids_BS = np.zeros((len(text_B), texts.index_W["length"][text_B].max()), np.uint16)
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
