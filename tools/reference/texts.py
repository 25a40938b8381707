"""Does a bundle give the tokens that its teacher gives when transformers runs it?

Every prompt is decoded four times: by transformers (eager attention) and by the compiled CPU engine, each plain and
speculative. All four texts must be the same. Numeric ties are excused by the rule of ``draftwood bench``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from draftwood.runtime.decoding import Decoding, Options
from draftwood.runtime.engines import StagedEngine
from draftwood.runtime.policy import Policy, policy_for
from draftwood.tools.lab.counting import widest_gear
from draftwood.tools.lab.differences import TIES_PER_TOKEN, explain, logit_noise

Side = Literal["reference", "engine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextDifference:
    """Where a text leaves the reference's plain one, and how near its decision was to another.

    ``margin`` and ``tolerance`` are those of ``draftwood bench``: a ``tie`` is a decision closer than the noise of
    both engines' logits.
    """

    side: Side
    mode: str
    position: int
    expected: int
    got: int
    margin: float
    tolerance: float
    tie: bool


def check_texts(
    engine: StagedEngine,
    reference: StagedEngine,
    prompts: Mapping[str, Sequence[int]],
    options: Options,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """The report: ``ok``, and for every prompt its tokens and differences."""
    bundle, rows = reference.bundle, list[dict[str, Any]]()
    modes = {"plain": policy_for(bundle), "speculative": policy_for(bundle, widest_gear(bundle))}
    for name, ids in prompts.items():
        progress(f"texts of prompt {name}")
        tokens, found = compare_texts(engine, reference, ids, options, modes)
        differences = [asdict(difference) for difference in found]
        rows.append({"id": name, "tokens": len(tokens), "equal": not found, "differences": differences})
    ties = [difference["tie"] for row in rows for difference in row["differences"]]
    total = sum(row["tokens"] for row in rows)
    return {
        "ok": all(ties) and len(ties) <= math.ceil(total * TIES_PER_TOKEN),
        "temperature": options.sampling.temperature,
        "prompts": len(rows),
        "equal": sum(row["equal"] for row in rows),
        "tokens": total,
        "per_prompt": rows,
    }


def compare_texts(
    engine: StagedEngine,
    reference: StagedEngine,
    prompt: Sequence[int],
    options: Options,
    modes: Mapping[str, Policy],
) -> tuple[tuple[int, ...], list[TextDifference]]:
    """The reference's text in its first mode, plain decoding, and how all other texts differ from it.

    Args:
        modes: name -> policy; both engines decode in each.
    """
    (plain, policy), *_ = modes.items()
    base = Decoding(reference, prompt, options, policy).run().token_ids
    found = []
    sides: tuple[tuple[Side, StagedEngine, StagedEngine], ...] = (
        ("reference", reference, engine),
        ("engine", engine, reference),
    )
    for side, one, other in sides:
        for mode, policy in modes.items():
            if one is reference and mode == plain:
                continue
            text = Decoding(one, prompt, options, policy).run().token_ids
            if text != base:
                found.append(_difference(side, mode, one, other, prompt, base, text, options))
    return base, found


def _difference(
    side: Side,
    mode: str,
    one: StagedEngine,
    other: StagedEngine,
    prompt: Sequence[int],
    base: tuple[int, ...],
    text: tuple[int, ...],
    options: Options,
) -> TextDifference:
    whole = [*prompt, *base]
    noise = logit_noise(one, whole) + logit_noise(other, whole)
    found = explain(other if side == "engine" else one, mode, prompt, base, text, options, noise)
    return TextDifference(
        side=side,
        mode=mode,
        position=found.position,
        expected=found.plain_token,
        got=found.speculative_token,
        margin=found.margin,
        tolerance=found.tolerance,
        tie=found.tie,
    )


def print_texts(report: dict[str, Any]) -> None:
    """The report as lines."""
    print(f"{'prompt':24} {'tokens':>6}  all four texts")
    for row in report["per_prompt"]:
        print(f"{row['id']:24} {row['tokens']:6}  {'equal' if row['equal'] else 'differ'}")
        for found in row["differences"]:
            kind = "numeric tie" if found["tie"] else "DIFFERENCE"
            print(
                f"  {kind}: {found['side']}, {found['mode']}, token {found['position']}: {found['got']}, expected"
                f" {found['expected']}, margin {found['margin']:.2e}, tolerance {found['tolerance']:.2e}"
            )
    print(f"{report['equal']} of {report['prompts']} prompts equal, {report['tokens']} tokens")
    print("ok" if report["ok"] else "FAILED")
