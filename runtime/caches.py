"""Memory for the caches of texts: a budget, the admission of texts, and the kept caches of ended ones.

A text is admitted only with room for all that it may need at its end. So no admitted text is ever stopped for lack of
room. The rest of the budget keeps ended texts; the least recently used goes first. A prompt that begins like one of
them starts after the shared part. A prompt that goes on with nearly all of the ended text takes its caches over, as a
chat's next turn does. Any other prompt copies the shared part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import RequestError
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.engines.memory import machine_memory
from draftwood.runtime.speculation.drafting import LEAST_SLOTS
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.runtime.speculation.sequence import SequenceState

# Tokens below which a shared beginning is not worth it.
LEAST_SHARED = 16
# A text that continues a kept one may throw away this many of its tokens. If it would lose more, it copies the shared
# part.
MOST_LOST = 32
# By default there is room for this many texts of the whole context, for each text of a launch.
TEXTS_A_PLACE = 2

# n tokens


@dataclass(frozen=True, slots=True)
class Wanted:
    """A text's need of memory: its prompt, its largest length, and the KV length that its prompt goes into."""

    prompt: Sequence[int]
    longest: int
    slots: int
    sampling: Sampling


@dataclass(frozen=True, eq=False, slots=True)
class _Kept:
    """An ended text."""

    tokens_n: NDArray[np.int64]
    state: SequenceState


class Caches:
    """The caches of one engine; callers hold a lock.

    Args:
        budget: bytes of all caches. The default is room for twice as many texts of the whole context as a launch takes,
            in at most half of the machine's memory. There is room for one text in any case.
        keep: whether ended texts are kept; only engines that say so do (`Engine.keeps`).
    """

    def __init__(self, engine: Engine, budget: int | None = None, keep: bool = True) -> None:
        self._engine, self._sizes = engine, dict[tuple[int, int], int]()
        self._keeps = keep and engine.keeps
        self._asked = budget
        self._running: dict[SequenceState, int] = {}
        # The least recently used first.
        self._kept: list[_Kept] = []
        self.prompts = self.hits = self.shared_tokens = 0

    @cached_property
    def budget(self) -> int:
        """Bytes of all caches together."""
        return self._default() if self._asked is None else self._asked

    @property
    def running_bytes(self) -> int:
        """Bytes that admitted texts may come to need."""
        return sum(self._running.values())

    @property
    def kept_bytes(self) -> int:
        """Bytes of ended texts."""
        return sum(ended.state.bytes for ended in self._kept)

    def check(self, wanted: Wanted) -> None:
        """Raises RequestError if the budget is too small for the text even without others."""
        if (need := self._need(wanted.longest, wanted.slots)) > self.budget:
            raise RequestError(
                f"caches for {wanted.longest} tokens take {need} bytes; expected at most the budget of {self.budget};"
                " ask for fewer new tokens, or open the bundle with more cache_bytes"
            )

    def admit(self, wanted: Wanted) -> SequenceState | None:
        """A state with the beginning of the prompt that is known; None while there is no room."""
        need = self._need(wanted.longest, wanted.slots)
        if self.running_bytes + need > self.budget:
            return None
        place, length = self._longest(wanted.prompt)
        if place is None:
            state = self._engine.begin(wanted.slots, wanted.sampling)
        else:
            state = self._shared(place, length, need, wanted.slots)
            state.sampling = wanted.sampling
            self.hits += 1
            self.shared_tokens += length
        self.prompts += 1
        self._running[state] = need
        self._evict()
        return state

    def leave(self, state: SequenceState, keep: bool) -> None:
        """A text has ended: its room is free at once. It may be kept for others, or is forgotten."""
        if self._running.pop(state, None) is None or not (keep and self._keeps) or len(state.tokens) <= LEAST_SHARED:
            return
        state.let_go()
        ended = _Kept(np.array(state.tokens, np.int64), state)
        # Those that it continues say nothing more.
        self._kept = [other for other in self._kept if _common(other.tokens_n, ended.tokens_n) < len(other.tokens_n)]
        self._kept.append(ended)
        self._evict()

    def clear(self) -> None:
        """Forgets the kept texts."""
        self._kept.clear()

    def _longest(self, prompt: Sequence[int]) -> tuple[_Kept | None, int]:
        """The kept text that shares most with a prompt, and the tokens to start after, one less than they share.

        So at least one is read, for its logits, and a drafter's last slot stands for a token that stays the same.
        """
        prompt_n = np.array(prompt, np.int64)
        shared = [(_common(ended.tokens_n, prompt_n) - 1, number) for number, ended in enumerate(self._kept)]
        length, number = max(shared, default=(0, 0))
        return (self._kept[number], length) if length >= LEAST_SHARED else (None, 0)

    def _shared(self, kept: _Kept, length: int, need: int, slots: int) -> SequenceState:
        """The state of a text that starts after a part of a kept one."""
        self._kept.remove(kept)
        state, cache = kept.state, kept.state.kv
        in_place = length <= cache.placed
        both_fit = self.running_bytes + need + state.bytes <= self.budget
        lost = len(kept.tokens_n) - length
        # A text takes the caches over if memory is short, if it loses few tokens, or if the shared part is not yet in
        # place.
        if state.slots <= slots and state.bytes <= need and (lost <= MOST_LOST or not both_fit or not in_place):
            state.rewind(length)
            return state
        length = min(length, cache.placed)
        copied = state.copied(length, slots)
        self._kept.append(kept)  # used just now
        return copied

    def _evict(self) -> None:
        """Keeps as many as there is room for besides running texts."""
        while self._kept and self.running_bytes + self.kept_bytes > self.budget:
            del self._kept[0]

    def _need(self, longest: int, slots: int) -> int:
        """Bytes of a text of that many tokens, at its end. ``slots`` is the least KV length that it has."""
        manifest = self._engine.bundle.manifest
        most = longest + manifest.dims.branch_rows
        # Before the end of a text a tree may reach beyond it. A policy then goes to the KV length that has room for
        # that. Not every length has trees: drafts may need a larger one than plain decoding.
        kinds = [[gear.slots for gear in manifest.gears if bool(gear.draft) == drafts] for drafts in (False, True)]
        ends = [
            min((end for end in kind if end >= slots and end > most), default=max(kind, default=0)) for kind in kinds
        ]
        return self._size(max(slots, *ends), longest)

    def _size(self, slots: int, longest: int) -> int:
        most = longest + self._engine.bundle.manifest.dims.branch_rows
        # A drafter's caches double (`draftwood.runtime.speculation.drafting`), or are as long as the teacher's.
        reserved = max(LEAST_SLOTS, 1 << most.bit_length(), slots)
        if (slots, reserved) not in self._sizes:
            state = self._engine.begin(slots)
            if state.draft:
                state.draft.reserve(reserved)
            self._sizes[slots, reserved] = state.bytes
        return self._sizes[slots, reserved]

    def _default(self) -> int:
        manifest = self._engine.bundle.manifest
        alone = self._need(manifest.dims.context, max(gear.slots for gear in manifest.gears))
        return max(alone, min(TEXTS_A_PLACE * self._engine.max_batch * alone, machine_memory() // 2))


def _common(one_n: NDArray[np.int64], other_n: NDArray[np.int64]) -> int:
    """Tokens that both begin with."""
    most = min(len(one_n), len(other_n))
    differ_n = one_n[:most] != other_n[:most]
    return int(differ_n.argmax()) if differ_n.any() else most
