"""Everything that belongs to one text while it is decoded; an engine holds as many of these as it decodes texts.

Between two steps the text is two things: ``length`` committed tokens, whose keys and values lie in ``kv``, and
``root``, the pending token. The root was drawn last and is not yet in any cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import InvariantError
from draftwood.runtime.speculation.adjustment import Adjustment
from draftwood.runtime.speculation.constraint import Constraint, constrained_draw
from draftwood.runtime.speculation.draft_cache import DeviceRows, DraftCache
from draftwood.runtime.speculation.guide import Guiding
from draftwood.runtime.speculation.logprobs import TokenLogprobs
from draftwood.runtime.speculation.lookup import TextIndex
from draftwood.runtime.speculation.sampling import Logits, Sampling, draw

# n committed tokens, T tree rows, F features


class SequenceState:
    """The caches of one text, its pending root and its sampling; teacher's and drafter's cache move together.

    ``kv`` is a `KvCache`, or a reference engine's replacement for it. ``draft`` is None if nothing drafts.
    """

    def __init__(
        self,
        kv: Any,
        draft: DraftCache | None = None,
        sampling: Sampling | None = None,
        corpus: TextIndex | None = None,
    ) -> None:
        self.kv, self.draft, self.sampling = kv, draft, sampling or Sampling()
        # The tokens that may be drawn, if not all, and the drafts that then suit.
        self.constraint: Constraint | None = None
        self.guide: Guiding | None = None
        # The changes to logits before a draw.
        self.adjustment: Adjustment | None = None
        self.root = 0
        # The committed tokens; their index, besides a corpus if one was given, is made when a gear looks tokens up.
        self.tokens: list[int] = []
        self._index: TextIndex | None = None
        self.corpus = corpus
        # How many of the likeliest tokens are wanted besides every drawn one; None if no logprobs are.
        self.top: int | None = None
        # Those of the tokens that the last step gained, of engines that give logits to the host.
        self.logprobs: list[TokenLogprobs] | None = None
        self._open: tuple[NDArray[np.int64], NDArray[np.float32] | None] | None = None

    @property
    def length(self) -> int:
        """Committed tokens."""
        return int(self.kv.length)

    @property
    def slots(self) -> int:
        """C, the KV length, the spare slot counted."""
        return int(self.kv.slots)

    @property
    def bytes(self) -> int:
        """Size of all buffers."""
        return int(self.kv.bytes) + (self.draft.bytes if self.draft else 0)

    def draw(self, logits_V: Logits, position: int) -> int:
        """The teacher's token at a position, by the text's sampling, adjustment and constraint.

        Raises:
            NumericError: the logits are no numbers.
        """
        if self.adjustment is not None:
            logits_V = self.adjustment.of(position, logits_V)
        if self.constraint is None:
            token = draw(logits_V, self.sampling, position)
        else:
            token = constrained_draw(logits_V, self.sampling, position, self.constraint)
        if self.adjustment is not None:
            self.adjustment.take(position, token)
        return token

    @property
    def drawn_by_host(self) -> bool:
        """Whether only the host can draw: a device knows no constraint, no adjustment and no min-p."""
        return self.constraint is not None or self.adjustment is not None or self.sampling.min_p > 0

    def extended(self, tokens_n: NDArray[np.int64], features: NDArray[np.float32]) -> None:
        """A prefill step has committed tokens; ``features`` of all or the last of them are copied."""
        self._open = None
        self.tokens += tokens_n.tolist()
        self.kv.extended(len(tokens_n))
        if self.draft:
            self.draft.append(tokens_n, features.copy())

    def branched(self, tokens_T: NDArray[np.int64], features_TF: NDArray[np.float32] | None = None) -> None:
        """A verify step has run the rows of a tree; ``commit`` chooses from them. Views are taken, not copies.

        Without ``features`` they stay on the engine's side, which gives those of the chosen rows to ``commit``.
        """
        self._open = tokens_T, features_TF
        self.kv.branched(len(tokens_T))

    def commit(
        self, rows: Sequence[int], root: int | None = None, features: NDArray[np.float32] | DeviceRows | None = None
    ) -> None:
        """Keeps the accepted path, row numbers from the root on, of the open branch; ``root`` is the new one.

        ``features`` are those of all rows of the path, or of its last ones.
        """
        if self._open is None:
            raise InvariantError("a commit without a verify step")
        tokens_T, features_TF = self._open
        self._open = None
        self.kv.commit(rows)
        chosen = list(rows)
        self.tokens += tokens_T[chosen].tolist()
        if self.draft:
            if features is None:
                assert features_TF is not None, "whoever keeps the features gives those of the path"
                features = features_TF[chosen]
            self.draft.append(tokens_T[chosen], features)
        if root is not None:
            self.root = root

    def rollback(self, length: int) -> None:
        """Drops the open branch, and committed tokens from the end down to ``length``."""
        self._open = None
        if length < len(self.tokens):
            del self.tokens[length:]
            self._index = self.guide = None
        self.kv.rollback(length)
        if self.draft:
            self.draft.rollback(length)

    def index(self) -> TextIndex:
        """The committed text and its root, for drafts that are looked up there."""
        index = self._index
        if index is None or index.tokens[-1] != [*self.tokens[len(index.tokens) - 1 :], self.root][0]:
            index = self._index = TextIndex(self.corpus)  # or another root was set than the text went on with
        if len(index.tokens) <= len(self.tokens):
            index.extend([*self.tokens[len(index.tokens) :], self.root])
        return index

    def let_go(self) -> None:
        """Drops what only a text that goes on needs; its grammar holds a socket."""
        self._index = self.constraint = self.guide = self.adjustment = None

    def rewind(self, length: int) -> None:
        """Goes back to the text's first ``length`` tokens; the next one to be read is the one that followed them."""
        self.let_go()
        self._open = self.logprobs = None
        del self.tokens[length:]
        self.kv.rollback(length)
        if self.draft:
            self.draft.rewind(length)

    def copied(self, length: int, slots: int) -> SequenceState:
        """A separate text, of the first ``length`` tokens, all in place, as ``rewind`` leaves it."""
        draft = self.draft.copied(length) if self.draft else None
        other = SequenceState(self.kv.copied(length, slots), draft, corpus=self.corpus)
        other.tokens = self.tokens[:length]
        return other

    def grow(self, slots: int) -> None:
        """Moves the teacher's cache to a larger KV length; a drafter's grows by itself."""
        self.kv.grow(slots)

    def check(self) -> None:
        """Raises InvariantError if the bookkeeping contradicts itself; for reference mode and tests."""
        self.kv.check()
        if self.draft:
            self.draft.check(self.length)
