"""The cells of `draftwood.tools.measure.cells` as a table and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftwood.tools.show.pictures import panels

# Colours span this far around equal speed, on a scale of factors.
REACH = 2.0


def table(rows: list[dict[str, Any]]) -> str:
    """A line a cell: what texts gain, beside plain decoding measured against itself."""
    lines = [
        f"{'size':7} {'drafter':15} {'T':>4} {'length':>6} {'mean':>6} {'p1':>6} {'median':>6} {'floor p1':>8}"
        f" {'regret':>7} {'bound':>6} {'host':>6} {'tok/step':>8} {'equal':>7}  share of steps"
    ]
    for row in rows:
        regret = "-" if row["regret"] is None else f"{100 * row['regret']:.1f} %"
        ties = sum(one["tie"] for one in row["unequal"])
        equal = "NO" if ties < len(row["unequal"]) else f"{ties} ties" if ties else "all"
        share = ", ".join(f"{gear} {100 * part:.0f} %" for gear, part in row["share"].items())
        lines.append(
            f"{row['size']:7} {row['drafter'].removeprefix('demo-'):15} {row['temperature']:4} {row['length']:6}"
            f" {row['speedup_mean']:6.2f} {row['speedup_p1']:6.2f} {row['speedup_p50']:6.2f} {row['floor_p1']:8.2f}"
            f" {regret:>7} {row['of_bound']:6.2f} {100 * row['host_share']:4.1f} % {row['tokens_per_step']:8.2f}"
            f" {equal:>7}  {share}"
        )
    return "\n".join(lines)


def draw_cells(rows: list[dict[str, Any]], path: Path) -> None:
    """A panel a size: drafters and temperatures down, lengths across; mean and p1, and the colour of the mean."""
    from matplotlib.colors import LogNorm

    sizes = list(dict.fromkeys(row["size"] for row in rows))
    with panels(path, len(sizes)) as axes:
        for panel, size in zip(axes, sizes, strict=True):
            own = [row for row in rows if row["size"] == size]
            lengths = sorted({row["length"] for row in own})
            lines = list(dict.fromkeys((row["drafter"], row["temperature"]) for row in own))
            values = [[float("nan")] * len(lengths) for _ in lines]
            for row in own:
                x, y = lengths.index(row["length"]), lines.index((row["drafter"], row["temperature"]))
                values[y][x] = row["speedup_mean"]
                label = f"{row['speedup_mean']:.2f}\np1 {row['speedup_p1']:.2f}"
                panel.text(x, y, label, ha="center", va="center", fontsize=7)
            panel.imshow(values, aspect="auto", cmap="PuOr_r", norm=LogNorm(1 / REACH, REACH))
            panel.set_xticks(range(len(lengths)), [str(length) for length in lengths])
            panel.set_yticks(range(len(lines)), [f"{name.removeprefix('demo-')}, T {t:g}" for name, t in lines])
            panel.set(title=size, xlabel="tokens of text before the answer")
            panel.tick_params(labelsize=7)
