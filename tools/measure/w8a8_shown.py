"""What `draftwood.tools.measure.w8a8` found, as text and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftwood.tools.show.pictures import panels

BOTH = "w8a8 both"  # the drafter in W8A8, too
NAMES = ("fp32", "w8a8", BOTH)


def table(report: Mapping[str, Any]) -> str:
    """The report for people."""
    rows = ", ".join(map(str, report["sizes"][0]["fp32"]["step_ms"]))
    lines = [f"{'size':10} {'':9} {'plain/s':>8} {'tree/s':>8} {'equal':>9} {'ties':>4}  ms a step of {rows} rows"]
    for row in report["sizes"]:
        for name in (name for name in NAMES if name in row):
            one = row[name]
            times = " ".join(f"{ms:7.2f}" for ms in one["step_ms"].values())
            lines.append(
                f"{row['size']:10} {name:9} {one['plain_tokens_per_s']:8.1f} {one['speculative_tokens_per_s']:8.1f}"
                f" {one['identical']:4}/{one['turns']:<4} {one['ties']:4}  {times}"
            )
        shares = " ".join(f"{100 * share:6.1f}%" for share in row["reached"].values())
        lines.append(f"{row['size']:10} of the integer peak, {row['peak_gops']:.0f} Gop/s:".ljust(55) + shares)
        lines += [f"{row['size']:10} {what}: {_range(one)}" for what, one in row["paired"].items()]
        lines += _race_lines(row["size"], row["race"]) if row["race"] else []
    return "\n".join([*lines, f"{report['machine']['model']}, {', '.join(report['machine']['features'])}"])


def _range(one: Mapping[str, float]) -> str:
    return f"{one['median']:.2f} ({one['low']:.2f} to {one['high']:.2f})"


def _race_lines(size: str, found: Mapping[str, Any]) -> list[str]:
    """Greedy texts, prompts counted: every program, fastest first, and who is missing."""
    rates = sorted(found["tokens_per_s"].items(), key=lambda pair: -pair[1])
    lines = [f"{size:10} {name:40} {rate:8.1f} tokens/s, prompt counted" for name, rate in rates]
    if found["over_best_peer"]:
        best = f"{found['best']} over the best CPU peer at any precision, {found['best_peer']}"
        lines.append(f"{size:10} {best}: {_range(found['over_best_peer'])}")
    return lines + [f"{size:10} {name}: missing, {why}" for name, why in found["missing"].items()]


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Programs by their speed, and steps by their rows over a step of one, at the last size."""
    row = report["sizes"][-1]
    raced = dict(row["race"]["tokens_per_s"]) if row["race"] else {
        f"{name} {kind}": row[name][f"{key}_tokens_per_s"]
        for name in NAMES for kind, key in (("plain", "plain"), ("tree", "speculative"))
    }  # fmt: skip
    with panels(path, 2) as (bars, lines):
        names = sorted(raced, key=raced.__getitem__)
        bars.barh(names, [raced[name] for name in names])
        bars.tick_params(axis="y", labelsize=6)
        bars.set(xlabel="tokens a second", title=row["size"])
        for name in NAMES[:2]:
            ms = {int(rows): value for rows, value in row[name]["step_ms"].items()}
            lines.plot(list(ms), [value / ms[1] for value in ms.values()], "o-", markersize=3, label=name)
        lines.set(xlabel="rows of a step", ylabel="time over that of one row", ylim=(0, None))
        lines.legend()
