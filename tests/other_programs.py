"""Other programs as `draftwood.tools.lab.peers` opens them, in a file that a process of their own can import."""

from __future__ import annotations

import os
from pathlib import Path

from draftwood.tools.lab.peers import Generate


def broken(model: Path, work: Path, threads: int) -> Generate:
    raise RuntimeError("reads no such checkpoint")


def crashing(model: Path, work: Path, threads: int) -> Generate:
    return lambda ids, count, temperature: os._exit(9)


def echoing(model: Path, work: Path, threads: int) -> Generate:
    return lambda ids, count, temperature: [*ids, *ids][:count]
