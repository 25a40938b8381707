"""Does a bundle give the tokens that its teacher gives when transformers runs it?

Every prompt is decoded four times: by transformers (eager attention) and by an engine of the bundle, each plain and
speculative. All four texts must be the same. Numeric ties are excused by the rule of ``draftwood bench``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from draftwood.runtime.decoding import Decoding
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.options import Options
from draftwood.runtime.policy import FixedTree, Policy, widest_gear
from draftwood.tools.comparison.differences import TIES_PER_TOKEN, Difference, explain, logit_noise, told


def check_texts(
    engine: Engine,
    reference: Engine,
    prompts: Mapping[str, Sequence[int]],
    options: Options,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """The report: ``ok``, and for every prompt its tokens and differences."""
    bundle, rows = reference.bundle, list[dict[str, Any]]()
    modes = {"plain": FixedTree(bundle), "speculative": FixedTree(bundle, widest_gear(bundle))}
    for name, ids in prompts.items():
        progress(f"texts of prompt {name}")
        tokens, differing = compare_texts(engine, reference, ids, options, modes)
        differences = [asdict(difference) for difference in differing]
        rows.append({"id": name, "tokens": len(tokens), "equal": not differing, "differences": differences})
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
    engine: Engine,
    reference: Engine,
    prompt: Sequence[int],
    options: Options,
    modes: Mapping[str, Policy],
) -> tuple[tuple[int, ...], list[Difference]]:
    """The reference's text in its first mode, plain decoding, and how all other texts differ from it.

    Args:
        modes: name -> policy; both engines decode in each.
    """
    texts = {
        f"{side}, {mode}": Decoding(decoder, prompt, options, policy).run().token_ids
        for side, decoder in (("reference", reference), ("engine", engine))
        for mode, policy in modes.items()
    }
    base = next(iter(texts.values()))
    differences = []
    for name, text in texts.items():
        if text != base:
            noise = sum(logit_noise(decoder, [*prompt, *base]) for decoder in (reference, engine))
            differences.append(explain(reference, name, prompt, base, text, options, noise))
    return base, differences


def print_texts(report: dict[str, Any]) -> None:
    """The report as lines."""
    print(f"{'prompt':24} {'tokens':>6}  all four texts")
    for row in report["per_prompt"]:
        print(f"{row['id']:24} {row['tokens']:6}  {'equal' if row['equal'] else 'differ'}")
        for difference in row["differences"]:
            print(f"  {told(difference)}")
    print(f"{report['equal']} of {report['prompts']} prompts equal, {report['tokens']} tokens")
    print("ok" if report["ok"] else "FAILED")
