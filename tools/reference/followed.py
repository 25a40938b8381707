"""Eager PyTorch whose states between the blocks may be exchanged, and the engine that goes on from another's states.

Half a block, attention or MLP, then starts from the other engine's state there. So a difference is that of this one
half: its own rounding, without the results of earlier blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.opening import USUAL, Opening
from draftwood.runtime.speculation.deferred_cache import DeferredKvCache
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import TeacherOutput
from draftwood.tools.reference.eager import EagerEngine

# T rows, H hidden

# The states of one text in a launch that enter each norm: before attention and before the MLP of every layer, and
# before the last norm. The last one may have only the last rows.
States = list[NDArray[np.float32]]


def beyond_last_bits(got_TH: Tensor, want_TH: Tensor) -> Tensor:
    """How far two states are apart beyond a last bit. If a state is a thousand times as large as a half's addition to
    it, that bit would be the whole difference."""
    return ((got_TH - want_TH).abs() - torch.finfo(want_TH.dtype).eps * want_TH.abs()).clamp_min(0)


class Exchange(Protocol):
    """A change of the rows of norm ``number``."""

    def state(self, number: int, added_TH: Tensor, state_TH: Tensor) -> Tensor:
        """The state to go on from, instead of the one that half a block ``added`` to."""

    def normed(self, number: int, normed_TH: Tensor) -> Tensor:
        """The normed rows to go on from."""


class _Exchanged(nn.Module):
    """A norm before and after which rows are exchanged."""

    def __init__(self, norm: Any, number: int, engine: ExchangedEager) -> None:
        super().__init__()
        self.norm, self._number, self._engine = norm, number, engine

    def forward(self, x_TH: Tensor) -> Tensor:
        return self._of(x_TH, x_TH)[0]

    def added(self, x_TH: Tensor, residual_TH: Tensor) -> tuple[Tensor, Tensor]:
        return self._of(x_TH, x_TH + residual_TH)

    def _of(self, added_TH: Tensor, state_TH: Tensor) -> tuple[Tensor, Tensor]:
        exchange = self._engine.exchange
        if exchange is None:
            return self.norm(state_TH), state_TH
        state_TH = exchange.state(self._number, added_TH, state_TH)
        return exchange.normed(self._number, self.norm(state_TH)), state_TH


class ExchangedEager(EagerEngine):
    """Runs as `EagerEngine` does unless it has an ``exchange``."""

    def __init__(self, bundle: Bundle, opening: Opening = USUAL, npu: bool = False) -> None:
        super().__init__(bundle, opening, npu)
        self.exchange: Exchange | None = None
        layers: Sequence[Any] = list(self.decoder.layers)
        norms = [(layer, half) for layer in layers for half in ("attn_norm", "mlp_norm")]
        for number, (owner, name) in enumerate([*norms, (self.decoder, "norm")]):
            setattr(owner, name, _Exchanged(getattr(owner, name), number, self))


class Followed(Protocol):
    """Where an engine shows the states of its launches, the first one first."""

    waiting: list[States]


class FollowingEager(ExchangedEager):
    """Takes one launch of the engine that it follows at a time, each half of a block from that engine's state.

    ``halves`` are then how far the engine's state after each half is from this one's, and the half's addition. If no
    launch waits it runs freely.
    """

    def __init__(self, bundle: Bundle, followed: Followed) -> None:
        super().__init__(bundle)
        self._followed = followed
        self._states: States | None = None
        self.exchange = self
        self.halves: list[tuple[NDArray[np.float32], NDArray[np.float32]]] = []
        # The states of all launches since the last text was begun.
        self.followed: list[States] = []

    def begin(self, slots: int, sampling: Sampling | None = None) -> SequenceState:
        self._followed.waiting.clear()
        self.followed = []
        return super().begin(slots, sampling)

    def chunk(self, state: SequenceState, left: int) -> int:
        return len(self._followed.waiting[0][0]) if self._followed.waiting else left

    def replayed(self, slots: int, tokens_n: NDArray[np.int64], launches: Sequence[States]) -> SequenceState:
        """A fresh text of these tokens, read in one piece from the states that its rows had in several launches."""
        state = self.begin(slots)
        *inner, last = zip(*launches, strict=True)
        self._followed.waiting.append([*map(np.concatenate, inner), last[-1][-1:]])
        self.prefill(state, tokens_n)
        return state

    @property
    def taken(self) -> States:
        """The states of the last launch."""
        return self.followed[-1]

    def state(self, number: int, added_TH: Tensor, state_TH: Tensor) -> Tensor:
        if self._states is None:
            return state_TH
        given_TH = torch.from_numpy(self._states[number]).to(state_TH.dtype)
        rows = len(given_TH)
        apart_TH = beyond_last_bits(given_TH, state_TH[-rows:])
        self.halves.append((apart_TH.float().numpy(), added_TH[-rows:].float().numpy()))
        return torch.cat((state_TH[:-rows], given_TH))

    def normed(self, number: int, normed_TH: Tensor) -> Tensor:
        return normed_TH

    def _run(self, kv: DeferredKvCache, *given: Any) -> TeacherOutput:
        self._states = self._followed.waiting.pop(0) if self._followed.waiting else None
        self.followed += [self._states] if self._states else []
        self.halves = []
        return super()._run(kv, *given)
