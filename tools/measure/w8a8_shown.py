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
    rows = ", ".join(map(str, report["sizes"][0]["bundles"]["fp32"]["step_ms"]))
    columns = f"{'plain/s':>8} {'tree/s':>8} {'equal':>9} {'ties':>4} {'draft':>6}"
    lines = [f"{'size':10} {'':9} {columns}  ms a step of {rows} rows"]
    for row in report["sizes"]:
        lines += [
            f"{row['size']:10} {name:9} {_texts(one)}  {_times(one['step_ms'])}" for name, one in row["bundles"].items()
        ]
        if row["dense"]:
            lines += [
                f"{row['size']:10} {f'{name}, dense':56} {_times(ms)}" for name, ms in row["dense"]["step_ms"].items()
            ]
            lines.append(f"{row['size']:10} a dense step of one row, fp32 over W8A8: {_range(row['dense']['one_row'])}")
        shares = " ".join(f"{100 * share:6.1f}%" for share in row["reached"].values())
        lines.append(f"{row['size']:10} of the integer peak, {row['peak_gops']:.0f} Gop/s:".ljust(63) + shares)
        lines += [f"{row['size']:10} {what}: {_range(one)}" for what, one in row["paired"].items()]
        lines += _race_lines(row["size"], row["race"]) if row["race"] else []
    return "\n".join([*lines, f"{report['machine']['model']}, {', '.join(report['machine']['features'])}"])


def _texts(one: Mapping[str, Any]) -> str:
    return (
        f"{one['plain_tokens_per_s']:8.1f} {one['speculative_tokens_per_s']:8.1f}"
        f" {one['identical']:4}/{one['turns']:<4} {one['ties']:4} {one['draft_ms']:6.2f}"
    )


def _times(step_ms: Mapping[int, float]) -> str:
    return " ".join(f"{ms:7.2f}" for ms in step_ms.values())


def _range(one: Mapping[str, float]) -> str:
    return f"{one['median']:.2f} ({one['low']:.2f} to {one['high']:.2f})"


def _race_lines(size: str, found: Mapping[str, Any]) -> list[str]:
    """Every program, fastest first, prompts counted; ours over the best peer; and who is missing."""
    rates = sorted(found["tokens_per_s"].items(), key=lambda pair: -pair[1])
    lines = [f"{size:10} {name:40} {rate:8.1f} tokens/s, prompt counted" for name, rate in rates]
    for name, one in found["over_best_peer"].items():
        best = f"{name} over the best CPU peer at any precision, {found['best_peer']}"
        lines.append(f"{size:10} {best}: {_range(one)}")
    return lines + [f"{size:10} {name}: missing, {why}" for name, why in found["missing"].items()]


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Programs by their speed, and steps by their rows over a step of one, at the last size."""
    row = report["sizes"][-1]
    raced = dict(row["race"]["tokens_per_s"]) if row["race"] else {
        f"{name} {kind}": one[f"{key}_tokens_per_s"]
        for name, one in row["bundles"].items()
        for kind, key in (("plain", "plain"), ("tree", "speculative"))
    }  # fmt: skip
    with panels(path, 2) as (bars, lines):
        names = sorted(raced, key=raced.__getitem__)
        bars.barh(names, [raced[name] for name in names])
        bars.tick_params(axis="y", labelsize=6)
        bars.set(xlabel="tokens a second", title=row["size"])
        for name in NAMES[:2]:
            ms = {int(rows): value for rows, value in row["bundles"][name]["step_ms"].items()}
            lines.plot(list(ms), [value / ms[1] for value in ms.values()], "o-", markersize=3, label=name)
        lines.set(xlabel="rows of a step", ylabel="time over that of one row", ylim=(0, None), xticks=list(ms))
        lines.legend()
