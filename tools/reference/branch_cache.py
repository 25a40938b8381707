"""A transformers cache with explicit branch and commit, for a teacher that runs as it comes.

A forward pass appends its T rows to the committed ones: the *branch*. ``commit`` picks the accepted path out of it and
drops the rest; ``rollback`` cuts rows off. Every time the kept rows are copied, as no engine would do it. Committed
rows are never written again, which ``check`` proves by their fingerprints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from draftwood.errors import InvariantError

# L layers, K key/value heads, C slots, D head dimension, T branch rows

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class BranchCache(Cache):
    """Keys and values of one text, and the committed part of them.

    Usable wherever a model takes ``past_key_values``: ``open`` announces the rows of a forward pass, every layer
    then appends them once, and ``commit`` or ``rollback`` closes the branch.

    ``text`` holds the committed tokens, ``length`` their number, ``open_rows`` the rows of the open branch. ``slots``
    is the room that an engine believes to have; there is more.
    """

    # As `draftwood.runtime.speculation.kv_cache.KvCache.place`: it lies alone.
    place = None

    def __init__(self, layers: int, slots: int) -> None:
        # The base's own storage is not used.
        self.layers: list[Any] = []
        self.slots = slots
        self.text: list[int] = []
        self.length = 0
        self.open_rows = 0
        self._store: list[Tensor | None] = [None] * (2 * layers)
        self._written = [0] * layers
        self._tokens: tuple[int, ...] = ()
        self._positions: tuple[int, ...] = ()
        # Fingerprint of every committed row, int64 [2 L, length].
        self._marks = torch.zeros((2 * layers, 0), dtype=torch.int64)

    @property
    def buffers(self) -> list[Tensor]:
        """2 L tensors [K, length + open rows, D], key then value of every layer."""
        return [store[0] for store in self._store if store is not None]

    def open(self, tokens: Sequence[int], positions: Sequence[int]) -> None:
        """Begins a branch of these tokens at these absolute positions; the next forward pass writes its rows."""
        if self.open_rows:
            raise _broken("branch-open", f"{self.open_rows} rows are open; commit or roll back before a step")
        self._tokens, self._positions = tuple(map(int, tokens)), tuple(map(int, positions))
        self.open_rows = len(self._tokens)
        self._written = [0] * len(self._written)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends a layer's rows [1, K, T, D] to the committed ones; returns all rows it may see."""
        rows = key_states.shape[2]
        if key_states.shape[0] != 1 or rows != self.open_rows or self._written[layer_idx]:
            got = f"{key_states.shape[0]} texts of {rows} rows after {self._written[layer_idx]} rows written"
            raise _broken("write-once", f"layer {layer_idx}: expected one text of {self.open_rows} rows, got {got}")
        self._written[layer_idx] = rows
        at = 2 * layer_idx
        whole = [
            states if store is None else torch.cat((store, states), 2)
            for store, states in zip(self._store[at : at + 2], (key_states, value_states), strict=True)
        ]
        self._store[at : at + 2] = whole
        return whole[0], whole[1]

    def commit(self, rows: Sequence[int]) -> None:
        """Keeps the accepted path, row numbers from the root on, of the open branch.

        Raises:
            InvariantError: the rows are no path of the branch (path, position), or a layer has not run (unwritten).
        """
        rows = [int(row) for row in rows]
        for broken in self._commit_violations(rows):
            raise broken
        path = [self.length + row for row in rows]
        marks = torch.stack([_fingerprints(buffer[:, path]) for buffer in self.buffers])
        self._keep([*range(self.length), *path])
        self._marks = torch.cat([self._marks, marks], dim=1)
        self.text += [self._tokens[row] for row in rows]
        self.length += len(rows)

    def branched(self, rows: int) -> None:
        """A verify step has run; the forward pass has opened its branch and written it."""
        if rows != self.open_rows:
            raise _broken("branch-open", f"a step of {rows} rows left {self.open_rows} open")

    def extended(self, rows: int) -> None:
        """A prefill step has run: all its rows are kept."""
        self.commit(range(rows))

    def rollback(self, length: int) -> None:
        """Drops the open branch, and committed tokens from the end down to ``length``."""
        if not 0 <= length <= self.length:
            raise _broken("rollback", f"expected 0 to {self.length}, got {length}")
        self._keep(range(length))
        self.text, self._marks, self.length = self.text[:length], self._marks[:, :length], length

    def _keep(self, places: Sequence[int]) -> None:
        """These rows alone, and no open branch."""
        rows = torch.tensor(list(places), dtype=torch.int64)
        self._store = [None if store is None else store[:, :, rows] for store in self._store]
        self.open_rows = 0

    def grow(self, slots: int) -> None:
        """There is room already."""
        self.slots = slots

    def violations(self) -> Iterator[InvariantError]:
        """Every invariant that does not hold: text, unwritten, committed, finite."""
        if len(self.text) != self.length or self._marks.shape[1] != self.length:
            yield _broken("text", f"{self.length} rows are committed for {len(self.text)} tokens")
        if self.open_rows:
            yield from self._unwritten()
        for i, buffer in enumerate(self.buffers):
            name = f"layer {i // 2}, {'value' if i % 2 else 'key'}"
            committed = buffer[:, : self.length]
            changed = (_fingerprints(committed) != self._marks[i, : self.length]).nonzero()
            if len(changed):
                yield _broken("committed", f"{name}: slot {int(changed[0])} has changed since it was committed")
            if not bool(torch.isfinite(committed).all()):
                yield _broken("finite", f"{name}: a committed row holds a value that is no number")

    def check(self) -> None:
        """Raises InvariantError with the name of the first invariant that does not hold."""
        for broken in self.violations():
            raise broken

    def _commit_violations(self, rows: list[int]) -> Iterator[InvariantError]:
        if not rows or rows[0] != 0 or rows != sorted(set(rows)) or rows[-1] >= self.open_rows:
            yield _broken("path", f"expected rising rows from 0 below {self.open_rows}, got {tuple(rows)}")
            return
        yield from self._unwritten()
        for i, row in enumerate(rows):
            if self._positions[row] != self.length + i:
                yield _broken(
                    "position", f"row {row} was computed at {self._positions[row]}, its slot is {self.length + i}"
                )

    def _unwritten(self) -> Iterator[InvariantError]:
        for layer, rows in enumerate(self._written):
            if rows != self.open_rows:
                yield _broken("unwritten", f"layer {layer} has written {rows} of {self.open_rows} rows")

    # The questions of models and of transformers' mask functions to any cache.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Committed tokens; the open branch is not counted."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Columns of a mask and the slot of the first."""
        return self.length + query_length, 0

    def __len__(self) -> int:
        return len(self._written)


def _fingerprints(rows: Tensor) -> Tensor:
    """int64 [C] of rows [K, C, D]: the sum of each row's bit patterns, so that any other value shows."""
    return rows.contiguous().view(_BITS[rows.element_size()]).to(torch.int64).sum(dim=(0, 2))


def _broken(name: str, message: str) -> InvariantError:
    return InvariantError(f"branch cache: {name}: {message}")
