"""A transformers cache with explicit branch and commit, for a teacher that runs as it comes.

A forward pass writes its T rows behind the committed length: the *branch*. ``commit`` keeps the accepted path and
drops the rest: rows that already lie in place are kept by length, only the others are moved. Committed rows are
never written again, which ``check`` proves by their fingerprints. ``rollback`` is a smaller length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from draftwood.errors import InvariantError

# L layers, K key/value heads, C slots, D head dimension, T branch rows

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Broken(NamedTuple):
    """One invariant that does not hold: its name, and what was expected and found."""

    name: str
    message: str


class BranchCache(Cache):
    """Keys and values of one text, and what is committed of them.

    Usable wherever a model takes ``past_key_values``: ``open`` announces the rows of a forward pass, every layer
    then writes them once, and ``commit`` or ``rollback`` closes the branch. Storage of ``slots`` rows a layer is
    allocated at the first write and doubled when a branch does not fit; no step copies it otherwise.

    ``text`` holds the committed tokens, ``length`` their number, ``open_rows`` the rows of the open branch.
    """

    def __init__(self, layers: int, slots: int) -> None:
        # The base's own storage is not used, and its constructor differs between the releases of transformers.
        self.layers: list[Any] = []
        self.slots = slots
        self.text: list[int] = []
        self.length = 0
        self.open_rows = 0
        self._store: list[Tensor | None] = [None] * (2 * layers)
        self._written = [0] * layers
        self._tokens: tuple[int, ...] = ()
        self._positions: tuple[int, ...] = ()
        # Fingerprint of every committed row, int64 [2 L, length], taken before the row was moved into place.
        self._marks = torch.zeros((2 * layers, 0), dtype=torch.int64)

    @property
    def buffers(self) -> list[Tensor]:
        """2 L tensors [K, C, D], key then value of every layer: views of the storage."""
        return [store[0] for store in self._store if store is not None]

    def open(self, tokens: Sequence[int], positions: Sequence[int]) -> None:
        """Begins a branch of these tokens at these absolute positions; the next forward pass writes its rows."""
        if self.open_rows:
            raise _error(Broken("branch-open", f"{self.open_rows} rows are open; commit or roll back before a step"))
        if self.length + len(tokens) > self.slots:
            self.grow(max(2 * self.slots, self.length + len(tokens)))
        self._tokens, self._positions = tuple(map(int, tokens)), tuple(map(int, positions))
        self.open_rows = len(self._tokens)
        self._written = [0] * len(self._written)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes a layer's rows [1, K, T, D] behind the committed ones; returns views of all rows it may see."""
        rows = key_states.shape[2]
        if key_states.shape[0] != 1 or rows != self.open_rows or self._written[layer_idx]:
            found = f"{key_states.shape[0]} texts of {rows} rows after {self._written[layer_idx]} rows written"
            raise _error(
                Broken("write-once", f"layer {layer_idx}: expected one text of {self.open_rows} rows, got {found}")
            )
        self._written[layer_idx] = rows
        end = self.length + rows
        views = []
        for buffer, states in ((2 * layer_idx, key_states), (2 * layer_idx + 1, value_states)):
            store = self._store[buffer]
            if store is None:
                store = states.new_zeros((1, states.shape[1], self.slots, states.shape[3]))
                self._store[buffer] = store
            store[:, :, self.length : end] = states
            views.append(store[:, :, :end])
        return views[0], views[1]

    def commit(self, rows: Sequence[int]) -> None:
        """Keeps the accepted path, row numbers from the root on, of the open branch.

        Raises:
            InvariantError: the rows are no path of the branch (path, position), or a layer has not run (unwritten).
        """
        rows = [int(row) for row in rows]
        for broken in self._commit_violations(rows):
            raise _error(broken)
        marks = torch.stack([_fingerprints(buffer[:, [self.length + row for row in rows]]) for buffer in self.buffers])
        in_place = next((i for i, row in enumerate(rows) if i != row), len(rows))
        if moved := [self.length + row for row in rows[in_place:]]:
            for buffer in self.buffers:
                # The right side is gathered before it is written, so rows may overlap.
                buffer[:, self.length + in_place : self.length + len(rows)] = buffer[:, moved]
        self._marks = torch.cat([self._marks, marks], dim=1)
        self.text += [self._tokens[row] for row in rows]
        self.length += len(rows)
        self.open_rows = 0

    def branched(self, rows: int) -> None:
        """A verify step has run; the forward pass has opened its branch and written it."""
        if rows != self.open_rows:
            raise _error(Broken("branch-open", f"a step of {rows} rows left {self.open_rows} open"))

    def extended(self, rows: int) -> None:
        """A prefill step has run: all its rows are kept."""
        self.commit(range(rows))

    def rollback(self, length: int) -> None:
        """Drops the open branch, and committed tokens from the end down to ``length``."""
        if not 0 <= length <= self.length:
            raise _error(Broken("rollback", f"expected 0 to {self.length}, got {length}"))
        self.text = self.text[:length]
        self._marks = self._marks[:, :length]
        self.length = length
        self.open_rows = 0

    def grow(self, slots: int) -> None:
        """Moves to storage of more rows."""
        if slots < self.slots:
            raise _error(Broken("room", f"cannot shrink from {self.slots} slots to {slots}"))
        for i, store in enumerate(self._store):
            if store is not None:
                larger = store.new_zeros((1, store.shape[1], slots, store.shape[3]))
                larger[:, :, : self.length + self.open_rows] = store[:, :, : self.length + self.open_rows]
                self._store[i] = larger
        self.slots = slots

    def violations(self) -> Iterator[Broken]:
        """Every invariant that does not hold: text, room, unwritten, committed, finite."""
        if len(self.text) != self.length or self._marks.shape[1] != self.length:
            yield Broken("text", f"{self.length} rows are committed for {len(self.text)} tokens")
        if self.length + self.open_rows > self.slots:
            yield Broken("room", f"{self.length} + {self.open_rows} rows in {self.slots} slots")
        if self.open_rows:
            yield from self._unwritten()
        for i, buffer in enumerate(self.buffers):
            name = f"layer {i // 2}, {'value' if i % 2 else 'key'}"
            committed = buffer[:, : self.length]
            changed = (_fingerprints(committed) != self._marks[i, : self.length]).nonzero()
            if len(changed):
                yield Broken("committed", f"{name}: slot {int(changed[0])} has changed since it was committed")
            if not bool(torch.isfinite(committed).all()):
                yield Broken("finite", f"{name}: a committed row holds a value that is no number")

    def check(self) -> None:
        """Raises InvariantError with the name of the first invariant that does not hold."""
        for broken in self.violations():
            raise _error(broken)

    def _commit_violations(self, rows: list[int]) -> Iterator[Broken]:
        if not rows or rows[0] != 0 or rows != sorted(set(rows)) or rows[-1] >= self.open_rows:
            yield Broken("path", f"expected rising rows from 0 below {self.open_rows}, got {tuple(rows)}")
            return
        yield from self._unwritten()
        for i, row in enumerate(rows):
            if self._positions[row] != self.length + i:
                yield Broken(
                    "position", f"row {row} was computed at {self._positions[row]}, its slot is {self.length + i}"
                )

    def _unwritten(self) -> Iterator[Broken]:
        for layer, rows in enumerate(self._written):
            if rows != self.open_rows:
                yield Broken("unwritten", f"layer {layer} has written {rows} of {self.open_rows} rows")

    # What models and transformers' mask functions ask of any cache.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Committed tokens; the open branch is not counted."""
        return self.length

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Columns of a mask and the slot of the first; ``query_length`` was a tensor of positions once."""
        rows = query_length if isinstance(query_length, int) else len(query_length)
        return self.length + rows, 0

    def get_max_cache_shape(self) -> int:
        """No limit: storage grows."""
        return -1

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No limit: storage grows."""
        return -1

    def __len__(self) -> int:
        return len(self._written)


def _fingerprints(rows: Tensor) -> Tensor:
    """int64 [C] of rows [K, C, D]: the sum of each row's bit patterns, so that any other value shows."""
    return rows.contiguous().view(_BITS[rows.element_size()]).to(torch.int64).sum(dim=(0, 2))


def _error(broken: Broken) -> InvariantError:
    return InvariantError(f"branch cache: {broken.name}: {broken.message}")
