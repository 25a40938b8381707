"""The frozen teacher's hidden states at every token of the distilled texts, kept on disk up to a bound.

Recomputing them at every visit would cost a good part of a training step. They are kept while the teacher writes the
texts; missing ones are computed from the texts. A file holds the states of a shard, bfloat16 as uint16 [tokens, (1 +
aux layers) * H]. It is named by a digest of all that it depends on. So another teacher, other layers or other texts
never meet a wrong file. Texts that do not fit are computed whenever they are asked for.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from draftwood.compiler.drafters.common.training import aux_layers
from draftwood.compiler.training.batch import Batch
from draftwood.compiler.training.teacher import FrozenTeacher
from draftwood.errors import RequestError
from draftwood.tools.made_from import damaged
from draftwood.tools.training.texts import Distilled, batch_of, by_length, padded

# W texts, N tokens, B texts a batch, T fed tokens, S tokens of the longest, H hidden size, F width of the aux states,
# A width of all

# The folder next to the texts, and the most bytes in it. A GPU computes the states of a batch sooner than a disk gives
# them.
FOLDER, LARGEST = "states", {"cpu": 12 * 10**9, "cuda": 0}
# How the name of a file ends that is not whole.
_PART = ".part"
# Texts that the teacher reads at a time.
_BATCH = 32


def path_of_states(
    folder: Path, teacher: str, aux: Sequence[int], lengths: Sequence[int], tokens_N: np.ndarray
) -> Path:
    """The file for the states of a shard's texts: their lengths, and all their tokens."""
    digest = hashlib.sha256(f"{teacher} {tuple(aux)} {list(map(int, lengths))}".encode())
    digest.update(tokens_N.astype(np.uint32).tobytes())
    return folder / f"states-{digest.hexdigest()[:24]}.npy"


def usual_aux(model: FrozenTeacher, aux: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The layers whose entering states are kept: those that drafters read here, or ``aux`` if it has others."""
    with suppress(RequestError):  # the teacher has too few layers
        usual = aux_layers(model)
        return usual if set(aux) <= set(usual) else aux
    return aux


class Writing:
    """Takes the states of a shard's texts while the teacher writes them."""

    def __init__(self, model: FrozenTeacher, teacher: str, folder: Path, largest: int) -> None:
        """``teacher`` is the model's digest; ``largest`` is the most bytes that all files of the folder may take."""
        self.folder, self.teacher, self.aux = folder, teacher, usual_aux(model) if largest else ()
        self.left = largest - sum(path.stat().st_size for path in folder.glob("states-*.npy"))
        self.text_parts: dict[int, list[np.ndarray]] = {}

    def take(self, texts: Sequence[int], prompts: Sequence[int], states_BTA: Tensor) -> None:
        """States of the fed tokens of some texts, whose prompts have so many tokens and stand on the right."""
        if self.left <= 0:
            return
        # Copied, since a view would hold the whole batch's states.
        part_BTA = states_BTA.to(torch.bfloat16).cpu().view(torch.uint16).numpy()
        for text, prompt, part_TA in zip(texts, prompts, part_BTA, strict=True):
            new_TA = part_TA[-prompt:].copy()
            self.left -= new_TA.nbytes
            self.text_parts.setdefault(text, []).append(new_TA)

    def save(self, texts: Sequence[int], lengths: Sequence[int], tokens_N: np.ndarray) -> None:
        """Writes the file of a shard, unless it is too large. A text's last token is never fed: its states are 0."""
        if self.left > 0 and len(texts):
            path = path_of_states(self.folder, self.teacher, self.aux, lengths, tokens_N)
            width = self.text_parts[texts[0]][0].shape[1]
            with states_file(path, (len(tokens_N), width)) as states_NA:
                at = 0
                for text, length in zip(texts, lengths, strict=True):
                    states_TA = np.concatenate(self.text_parts[text])[: length - 1]
                    states_NA[at : at + len(states_TA)] = states_TA
                    at += length
        self.text_parts = {}


@contextmanager
def states_file(path: Path, shape: tuple[int, int]) -> Iterator[np.ndarray]:
    """A new file of states, uint16 [N, A] of zeros to fill in, which takes its place when it is whole.

    Raises:
        OSError: the disk has no room for it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}{_PART}")  # two trainings may fill one folder at once
    with _begun(part) as file:
        try:
            states_NA = np.lib.format.open_memmap(part, mode="w+", dtype=np.uint16, shape=shape)
            _reserve(file)
            yield states_NA
            states_NA.flush()
            part.replace(path)
        except OSError as error:
            error.filename = error.filename or str(part)
            raise
        finally:
            part.unlink(missing_ok=True)


def _begun(part: Path) -> BinaryIO:
    """The file of a part, empty and locked, so that others see that somebody writes it. Those that nobody writes any
    more are removed: a killed process leaves gigabytes."""
    folder = os.open(part.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(folder, fcntl.LOCK_EX)  # nobody looks at the part between its creation and its lock
        for other in part.parent.glob(f"states-*{_PART}"):
            with suppress(OSError), other.open("rb+") as left:
                if _lock(left.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB):
                    other.unlink()
        file = part.open("wb")
        _lock(file.fileno(), fcntl.LOCK_EX)
        return file
    finally:
        os.close(folder)


def _lock(descriptor: int, how: int) -> bool:
    """Whether the lock is held now; somebody else may hold it, or the file system has no locks."""
    try:
        fcntl.flock(descriptor, how)
    except OSError:
        return False
    return True


def _reserve(file: BinaryIO) -> None:
    """Takes the disk's room for a file that is mapped: a disk that is full later ends the process by SIGBUS."""
    if not hasattr(os, "posix_fallocate"):  # macOS
        return
    try:
        os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
    except OSError as error:  # others are of file systems that reserve nothing
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise


class States:
    """The teacher's states of some texts: those after its final norm, and those entering the aux layers."""

    def __init__(
        self, model: FrozenTeacher, texts: Distilled, aux: tuple[int, ...], folder: Path | None = None,
        largest: int = 0,
    ) -> None:  # fmt: skip
        """A cache in ``folder`` of at most ``largest`` bytes; without a folder everything is computed.

        Raises:
            RequestError: the teacher has no such layers.
        """
        layers, hidden = model.config.layers, model.config.hidden
        if list(aux) != sorted(set(aux)) or any(not 0 <= layer <= layers for layer in aux):
            raise RequestError(f"aux layers {list(aux)}: expected rising numbers from 0 to {layers}")
        self.model, self.texts, self.stored = model, texts, usual_aux(model, aux)
        self.width = (1 + len(self.stored)) * hidden
        starts = [0, *((1 + self.stored.index(layer)) * hidden for layer in aux)]
        self.columns_A = np.concatenate([np.arange(start, start + hidden) for start in starts])
        self.shards: dict[int, np.ndarray] = {}
        self.first_W = np.cumsum(texts.index_W["length"]) - texts.index_W["length"]
        self.ends_S = np.cumsum(texts.shards)
        self.paths = self._paths(folder, largest) if folder is not None else []

    def _texts(self, shard: int) -> np.ndarray:
        """The numbers of the texts of a shard."""
        return np.arange(self.ends_S[shard] - self.texts.shards[shard], self.ends_S[shard])

    def _paths(self, folder: Path, largest: int) -> list[Path]:
        """A file for every shard that fits into ``largest`` bytes, from the first on."""
        paths, size = [], 0
        for shard in range(len(self.ends_S)):
            tokens_W = [self.texts.tokens_of(text) for text in self._texts(shard)]
            size += sum(map(len, tokens_W)) * self.width * 2
            if size > largest:
                break
            lengths, tokens_N = list(map(len, tokens_W)), np.concatenate(tokens_W)
            paths.append(path_of_states(folder, self.texts.teacher, self.stored, lengths, tokens_N))
        return paths

    def fill(self, share: int = 0, shares: int = 1) -> int:
        """Computes the files that are missing, every ``shares``-th from ``share`` on; returns how many."""
        missing = [(shard, path) for shard, path in enumerate(self.paths) if not path.is_file()][share::shares]
        for shard, path in missing:
            self._write(shard, path)
        return len(missing)

    def _write(self, shard: int, path: Path) -> None:
        lengths, text_W = self.texts.index_W["length"], self._texts(shard)
        with states_file(path, (int(lengths[text_W].sum()), self.width)) as states_NA:
            for text_B in by_length(lengths, text_W, _BATCH):
                states_BSA = self._computed(text_B).cpu().view(torch.uint16).numpy()
                for row, text in enumerate(text_B):
                    at = self.first_W[text] - self.first_W[text_W[0]]
                    states_NA[at : at + lengths[text]] = states_BSA[row, : lengths[text]]

    def batch(self, text_B: np.ndarray) -> Batch:
        """The texts with their states, on the teacher's device."""
        shard_B, hidden = np.searchsorted(self.ends_S, text_B, side="right"), self.model.config.hidden
        if all(shard < len(self.paths) and self.paths[shard].is_file() for shard in set(shard_B.tolist())):
            states_BSA = self._read(text_B, shard_B).to(self.model.device)
        else:
            states_BSA = self._computed(text_B)[..., self.columns_A]
        return batch_of(self.texts, text_B, states_BSA[..., :hidden], states_BSA[..., hidden:])

    def _read(self, text_B: np.ndarray, shard_B: np.ndarray) -> Tensor:
        lengths = self.texts.index_W["length"][text_B]
        states_BSA = np.zeros((len(text_B), lengths.max(), len(self.columns_A)), np.uint16)
        for row, (text, shard, length) in enumerate(zip(text_B, shard_B.tolist(), lengths, strict=True)):
            if shard not in self.shards:
                self.shards[shard] = self._opened(shard)
            at = self.first_W[text] - self.first_W[self._texts(shard)[0]]
            rows_SA = self.shards[shard][at : at + length]
            states_BSA[row, :length] = rows_SA if len(self.columns_A) == self.width else rows_SA[:, self.columns_A]
        return torch.from_numpy(states_BSA).view(torch.bfloat16)

    def _opened(self, shard: int) -> np.ndarray:
        """The states of a shard, uint16 [tokens, width], that stay on disk; RequestError if the file is cut off."""
        try:
            return np.load(self.paths[shard], mmap_mode="r")
        except (OSError, EOFError, ValueError) as error:
            raise damaged(self.paths[shard], str(error)) from None

    def _computed(self, text_B: np.ndarray) -> Tensor:
        """bfloat16 [B, S, A] on the teacher's device: final states first, then the stored aux states, low to high."""
        ids_BS = torch.from_numpy(padded(self.texts, text_B).astype(np.int64)).to(self.model.device)
        return self.model.states(ids_BS, self.stored).to(torch.bfloat16)
