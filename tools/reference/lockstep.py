"""Whole texts of two engines compared; where a token differs, the step at which it happened is written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from draftwood.manifest import Gear
from draftwood.runtime.decode import Decoding, Options
from draftwood.runtime.drafting import Draft
from draftwood.runtime.engine import Engine, StepResult
from draftwood.runtime.policy import Policy
from draftwood.runtime.sampling import draw, margin
from draftwood.tools.commands.bench import logit_noise, tolerance
from draftwood.tools.reference.dump import StepDump, observed
from draftwood.trees import TreeBuffers

Side = Literal["reference", "engine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextDifference:
    """Where a text leaves the reference's plain one, and how near its decision was to another.

    ``margin`` and ``tolerance`` are those of ``draftwood bench``: a ``tie`` is a decision closer than the noise of
    both engines' logits. ``dump`` is the folder of the step, where one was asked for and the step was found.
    """

    side: Side
    mode: str
    position: int
    expected: int
    got: int
    margin: float
    tolerance: float
    tie: bool
    dump: str | None


def compare_texts(
    engine: Engine,
    reference: Engine,
    prompt: Sequence[int],
    options: Options,
    modes: dict[str, Policy],
    dump: Path | None = None,
) -> tuple[tuple[int, ...], list[TextDifference]]:
    """The reference's text in its first mode, plain decoding, and how all other texts differ from it.

    Args:
        modes: name -> policy; both engines decode in each.
        dump: where the first step goes at which a text that differs by more than a tie goes wrong; the names of
            side and mode are added.
    """
    (plain, policy), *_ = modes.items()
    base = Decoding(reference, prompt, options, policy).run().token_ids
    found = []
    for side, one, other in (("reference", reference, engine), ("engine", engine, reference)):
        for mode, policy in modes.items():
            if one is reference and mode == plain:
                continue
            text = Decoding(one, prompt, options, policy).run().token_ids
            if text != base:
                found.append(_difference(side, mode, one, other, prompt, base, text, options, policy, dump))
    return base, found


def _difference(
    side: Side,
    mode: str,
    one: Engine,
    other: Engine,
    prompt: Sequence[int],
    base: tuple[int, ...],
    text: tuple[int, ...],
    options: Options,
    policy: Policy,
    dump: Path | None,
) -> TextDifference:
    pairs = zip(base, text, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(base), len(text)))
    expected, got = (ids[at] if at < len(ids) else -1 for ids in (base, text))
    whole = [*prompt, *base]
    allowed = tolerance(logit_noise(one, whole) + logit_noise(other, whole), options.sampling.temperature)
    reference = other if side == "engine" else one
    cache = reference.new_cache(max(gear.slots for gear in reference.bundle.manifest.gears))
    logits_V = reference.prefill(cache, np.array(whole[: len(prompt) + at])).logits_RV[0]
    distance = margin(logits_V, options.sampling, len(prompt) + at)
    tie = distance <= allowed and -1 not in (expected, got)
    step = None if tie or dump is None else first_difference(one, other, prompt, options, policy, allowed)
    folder = step.write(dump.with_name(f"{dump.name}-{side}-{mode}")) if step and dump else None
    return TextDifference(
        side=side,
        mode=mode,
        position=at,
        expected=expected,
        got=got,
        margin=distance,
        tolerance=allowed,
        tie=tie,
        dump=str(folder) if folder else None,
    )


def first_difference(
    engine: Engine, reference: Engine, prompt: Sequence[int], options: Options, policy: Policy, allowed: float = 0.0
) -> StepDump | None:
    """Decodes with ``engine`` while ``reference`` runs every step too; the first step that draws another token.

    A row's draw may differ where the reference's own margin is within ``allowed``.
    """
    try:
        Decoding(_Lockstep(engine, reference, options, allowed), prompt, options, policy).run()
    except _Found as found:
        return found.dump
    return None


class _Found(Exception):
    def __init__(self, dump: StepDump) -> None:
        super().__init__(dump.message)
        self.dump = dump


class _BothCaches:
    """The cache of each engine, committed alike, and the text that is in them."""

    def __init__(self, engine: Any, reference: Any) -> None:
        self.engine, self.reference = engine, reference
        self.text: list[int] = []
        self.tokens_T: NDArray[np.int64] = np.zeros(0, np.int64)

    @property
    def length(self) -> int:
        return len(self.text)

    @property
    def slots(self) -> int:
        return int(self.engine.slots)

    def grow(self, slots: int) -> None:
        for cache in (self.engine, self.reference):
            cache.grow(slots)

    def commit(self, rows: Sequence[int]) -> None:
        for cache in (self.engine, self.reference):
            cache.commit(rows)
            cache.check()
        self.text += self.tokens_T[list(rows)].tolist()


class _Lockstep:
    """Two engines that a decoding takes for one: what it sees is the first's."""

    def __init__(self, engine: Engine, reference: Engine, options: Options, allowed: float) -> None:
        self.bundle = engine.bundle
        self._engine, self._reference, self._allowed = engine, reference, allowed
        self._sampling = options.sampling

    def new_cache(self, slots: int) -> Any:
        return _BothCaches(self._engine.new_cache(slots), self._reference.new_cache(slots))

    def prefill(self, cache: Any, tokens: NDArray[np.int64]) -> StepResult:
        self._reference.prefill(cache.reference, tokens)
        cache.text += tokens.tolist()
        return self._engine.prefill(cache.engine, tokens)

    def verify(self, cache: Any, tokens_T: NDArray[np.int64], tree: TreeBuffers) -> StepResult:
        cache.tokens_T = tokens_T
        want = self._reference.verify(cache.reference, tokens_T, tree)
        got = self._engine.verify(cache.engine, tokens_T, tree)
        for row in np.flatnonzero(tree.valid):
            position = cache.length + int(tree.depths[row]) + 1
            drawn = [draw(result.logits_RV[row], self._sampling, position) for result in (want, got)]
            if drawn[0] != drawn[1] and margin(want.logits_RV[row], self._sampling, position) > self._allowed:
                message = f"row {row} draws {drawn[1]} for position {position}, expected {drawn[0]}"
                raise _Found(self._dump(cache, tree, message, want, got))
        return got

    def draft(self, cache: Any, gear: Gear, root: int) -> Draft:
        return self._engine.draft(cache.engine, gear, root)

    def _dump(self, cache: Any, tree: TreeBuffers, message: str, want: StepResult, got: StepResult) -> StepDump:
        rows = cache.length + tree.rows
        return StepDump(
            reason="tokens",
            message=message,
            teacher=self.bundle.manifest.teacher.digest,
            slots=cache.slots,
            text=tuple(cache.text),
            tokens=cache.tokens_T,
            tree=tree,
            expected=observed(cache.reference, rows, want),
            got=observed(cache.engine, rows, got),
        )
