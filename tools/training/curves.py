"""Pictures of a training and of what its drafters gain, as PNG."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftwood.tools.show.pictures import panels


def draw_losses(log: Path, path: Path) -> None:
    """The parts of the loss, level by level, and the held-out accuracy over the steps of a training's log."""
    records = [json.loads(line) for line in log.read_text().splitlines()]
    trained = {r["step"]: r for r in records if "of" in r}  # a resumed run may have logged a step twice
    steps = sorted(trained)
    held = {r["step"]: r.get("final", r) for r in records if "greedy" in r.get("final", r)}
    parts = [name for name in ("nats", "feature") if steps and name in trained[steps[0]]]
    with panels(path, len(parts) + 1) as axes:
        for part, panel in zip(parts, axes, strict=False):
            for level in range(len(trained[steps[0]][part])):
                panel.plot(steps, [trained[step][part][level] for step in steps], label=f"level {level + 1}")
            title = "cross-entropy, nats" if part == "nats" else "distance from the teacher's state, smooth L1"
            panel.set(xlabel="step", title=title)
            panel.legend(frameon=False, fontsize=8)
        for name, style in (("greedy", "-o"), ("sampled", "--s")):
            shares = {step: record[name]["top1"] for step, record in sorted(held.items()) if name in record}
            for level in range(len(next(iter(shares.values()), []))):
                values = [share[level] for share in shares.values()]
                axes[-1].plot(
                    list(shares), values, style, color=f"C{level}", markersize=3, label=f"{level + 1}, {name}"
                )
        axes[-1].set(xlabel="step", title="held out: true token is the first candidate", ylim=(0, 1))
        axes[-1].legend(frameon=False, fontsize=7, ncols=2)


def draw_positions(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Accepted shares by position: the chain of best tokens (lines), and the truth among candidates (dotted).

    Args:
        found: what ``rank_paths.compare`` returns.
    """
    with panels(path, 2) as axes:
        for panel, name in zip(axes, ("greedy", "sampled"), strict=True):
            for number, (drafter, kinds) in enumerate(found.items()):
                positions = range(1, len(kinds[name]["chain"]) + 1)
                panel.plot(positions, kinds[name]["chain"], "-o", color=f"C{number}", markersize=4, label=drafter)
                panel.plot(positions, kinds[name]["among"], ":", color=f"C{number}")
            panel.set(xlabel="position", ylabel="share of contexts", title=f"{name} text", ylim=(0, 1))
            panel.set_xticks(range(1, 1 + max(len(kinds[name]["chain"]) for kinds in found.values())))
            panel.legend(frameon=False, fontsize=8)


def draw_vocabularies(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Speed against acceptance over sizes of the draft vocabulary.

    Args:
        found: what ``vocabulary_sizes.measure`` returns.
    """
    with panels(path, 1) as (panel,):
        for name, style in (("greedy", "-o"), ("sampled", "--s")):
            panel.plot([r["head_ms"] for r in found], [r[name] for r in found], style, markersize=4, label=name)
        for record in found:
            label, place = (
                f"{record['size']} ids, {100 * record['coverage']:.1f} %",
                (record["head_ms"], record["greedy"]),
            )
            panel.annotate(label, place, (-5, 4), textcoords="offset points", ha="right", fontsize=7)
        panel.margins(x=0.25, y=0.15)
        panel.set(xlabel="output matrix and candidates, ms a draft", ylabel="accept length, best tree of 16 rows")
        panel.legend(frameon=False, fontsize=8)
