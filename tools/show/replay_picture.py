"""The picture of a replay: every text's speed-up, and which gears the policies used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from draftwood.tools.show.pictures import panels


def draw_replay(report: dict[str, Any], path: Path) -> None:
    """Left the texts' speed-ups over plain decoding, sorted; right the share of steps by gear."""
    with panels(path, 2) as (texts, shares):
        texts.set_title(f"{report['texts']} texts, {report['tokens']} tokens")
        plain = np.array([one["plain_us"] for one in report["per_text"]])
        for name in (*report["policies"], "oracle"):
            us = np.array([one[f"{name}_us"] for one in report["per_text"]])
            texts.plot(np.arange(1, len(us) + 1), np.sort(plain / us), label=name)
        texts.axhline(1.0, color="gray", linewidth=0.8)
        texts.set_xlabel("text, slowest first")
        texts.set_ylabel("speed-up over plain decoding")
        texts.legend()
        gears = sorted({gear for one in report["policies"].values() for gear in one["share"]})
        for place, one in enumerate(report["policies"].values()):
            left = 0.0
            for color, gear in enumerate(gears):
                share = one["share"].get(gear, 0.0)
                shares.barh(place, share, left=left, color=f"C{color}", label=gear if place == 0 else None)
                left += share
        shares.set_yticks(range(len(report["policies"])), list(report["policies"]))
        shares.set_xlabel("share of steps")
        shares.legend()
