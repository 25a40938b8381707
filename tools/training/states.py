"""The frozen teacher's hidden states at every token of the distilled texts, kept on disk up to a bound.

Recomputing them at every visit would cost a good part of a training step. A file of the cache holds the states of
``BLOCK`` texts, bfloat16 as uint16 [tokens, (1 + aux layers) * H], and is named by a digest of all that it depends
on, so another teacher, other layers or other texts never meet a wrong file. Texts that do not fit are computed
whenever they are asked for.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftwood.compiler.training.batch import Batch
from draftwood.compiler.training.teacher import FrozenTeacher
from draftwood.errors import RequestError
from draftwood.tools.training.texts import Distilled, batch_of, by_length, padded

# W texts, B texts a batch, S tokens of the longest, H hidden size, F width of the aux states, A width of all

BLOCK = 1024
# Texts that the teacher reads at a time.
_BATCH = 32


class States:
    """The teacher's states of some texts: those behind its final norm, and those entering the aux layers."""

    def __init__(
        self, model: FrozenTeacher, texts: Distilled, aux: tuple[int, ...], folder: Path | None = None,
        largest: int = 0,
    ) -> None:  # fmt: skip
        """A cache in ``folder`` of at most ``largest`` bytes; without a folder everything is computed.

        Raises:
            RequestError: the teacher has no such layers.
        """
        layers = model.config.layers
        if list(aux) != sorted(set(aux)) or any(not 0 <= layer <= layers for layer in aux):
            raise RequestError(f"aux layers {list(aux)}: expected rising numbers from 0 to {layers}")
        self.model, self.texts, self.aux = model, texts, aux
        self.width = (1 + len(aux)) * model.config.hidden
        self.blocks: dict[int, np.ndarray] = {}
        self.first_W = np.cumsum(texts.index_W["length"]) - texts.index_W["length"]
        self.paths = self._paths(folder, largest) if folder is not None else []

    def _paths(self, folder: Path, largest: int) -> list[Path]:
        """A file for every block that fits into ``largest`` bytes, from the first on."""
        folder.mkdir(parents=True, exist_ok=True)
        paths, size, total = [], 0, len(self.texts.index_W)
        for first in range(0, total, BLOCK):
            tokens_W = [self.texts.tokens_of(text) for text in range(first, min(first + BLOCK, total))]
            size += sum(map(len, tokens_W)) * self.width * 2
            if size > largest:
                break
            digest = hashlib.sha256(f"{self.texts.teacher} {self.aux} {[len(t) for t in tokens_W]}".encode())
            digest.update(np.concatenate(tokens_W).tobytes())
            paths.append(folder / f"states-{digest.hexdigest()[:24]}.npy")
        return paths

    def fill(self, share: int = 0, shares: int = 1) -> int:
        """Computes the files that are missing, every ``shares``-th from ``share`` on; returns how many."""
        missing = [(block, path) for block, path in enumerate(self.paths) if not path.is_file()][share::shares]
        for block, path in missing:
            self._write(block, path)
        return len(missing)

    def _write(self, block: int, path: Path) -> None:
        lengths = self.texts.index_W["length"]
        text_W = np.arange(block * BLOCK, min((block + 1) * BLOCK, len(lengths)))
        part = path.with_suffix(f".{os.getpid()}.part")  # two trainings may fill one folder at once
        shape = (int(lengths[text_W].sum()), self.width)
        file = np.lib.format.open_memmap(part, mode="w+", dtype=np.uint16, shape=shape)
        for text_B in by_length(lengths, text_W, _BATCH):
            states_BSA = self._computed(text_B).cpu().view(torch.uint16).numpy()
            for row, text in enumerate(text_B):
                at = self.first_W[text] - self.first_W[text_W[0]]
                file[at : at + lengths[text]] = states_BSA[row, : lengths[text]]
        file.flush()
        del file
        part.replace(path)

    def batch(self, text_B: np.ndarray) -> Batch:
        """The texts with their states, on the teacher's device."""
        if all(text // BLOCK < len(self.paths) and self.paths[text // BLOCK].is_file() for text in text_B):
            states_BSA = self._read(text_B).to(self.model.device)
        else:
            states_BSA = self._computed(text_B)
        hidden = self.model.config.hidden
        return batch_of(self.texts, text_B, states_BSA[..., :hidden], states_BSA[..., hidden:])

    def _read(self, text_B: np.ndarray) -> Tensor:
        lengths = self.texts.index_W["length"][text_B]
        states_BSA = np.zeros((len(text_B), lengths.max(), self.width), np.uint16)
        for row, (text, length) in enumerate(zip(text_B, lengths, strict=True)):
            block = int(text) // BLOCK
            if block not in self.blocks:
                self.blocks[block] = np.load(self.paths[block], mmap_mode="r")
            at = self.first_W[text] - self.first_W[block * BLOCK]
            states_BSA[row, :length] = self.blocks[block][at : at + length]
        return torch.from_numpy(states_BSA).view(torch.bfloat16)

    def _computed(self, text_B: np.ndarray) -> Tensor:
        """bfloat16 [B, S, A] on the teacher's device: final states first, then the aux states, low to high."""
        ids_BS = torch.from_numpy(padded(self.texts, text_B).astype(np.int64)).to(self.model.device)
        return self.model.states(ids_BS, self.aux).to(torch.bfloat16)
