"""Step times measured on this machine, kept in the user's cache by machine, bundle, engine and threads.

A bundle stays as it was built, so facts of one machine alone lie next to it.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import msgspec

from draftwood.errors import RequestError
from draftwood.files import cache_home, read_regular, write_whole
from draftwood.manifest import DAMAGED, encode
from draftwood.planned import StepTime
from draftwood.runtime.bundle import Bundle

VERSION = 1
MOST_BYTES = 1 << 20
# No step of any bundle is quicker; a quicker one was not measured.
LEAST_STEP_US = 1.0


class Tuned(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file: the measurements, and their subject, for its readers."""

    version: int
    machine: str
    bundle: str
    engine: str
    threads: int
    times: tuple[StepTime, ...]


def machine_name() -> str:
    """Host, processor and how many of them this process may use."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    except OSError:  # not Linux
        pass
    return f"{platform.node()}, {model}, {len(os.sched_getaffinity(0))} processors"


def bundle_digest(bundle: Bundle) -> str:
    """SHA-256, in hex, of the manifest, which vouches for everything else."""
    return hashlib.sha256(encode(bundle.manifest)).hexdigest()


def tuned_file(bundle: Bundle, engine: str, threads: int | None) -> Path:
    """Where the times of an engine with that many threads are kept; None means all processors."""
    threads = threads or len(os.sched_getaffinity(0))
    key = f"{machine_name()} {bundle_digest(bundle)} {engine} {threads}"
    return cache_home() / "draftwood" / "tuned" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def tuned_times(bundle: Bundle, engine: str, threads: int | None) -> tuple[StepTime, ...]:
    """The times that were measured here; nothing without any, or if the file is damaged: it is a cache."""
    try:
        tuned = msgspec.json.decode(read_regular(tuned_file(bundle, engine, threads), MOST_BYTES), type=Tuned)
    except (OSError, *DAMAGED):
        return ()
    return tuned.times if tuned.version == VERSION and _of(tuned, bundle) else ()


def _of(tuned: Tuned, bundle: Bundle) -> bool:
    """Whether every gear of the bundle has its times, and none that it cannot have."""
    slots = {gear.name: gear.slots for gear in bundle.manifest.gears}
    possible = all(
        max(time.length, time.late) <= slots.get(time.gear, 0) and time.us >= LEAST_STEP_US for time in tuned.times
    )
    return tuned.bundle == bundle_digest(bundle) and slots.keys() == {time.gear for time in tuned.times} and possible


def keep_times(bundle: Bundle, engine: str, threads: int | None, times: Sequence[StepTime]) -> Path:
    """Writes the file, whole or not at all; RequestError if it cannot be written."""
    tuned = Tuned(
        version=VERSION,
        machine=machine_name(),
        bundle=bundle_digest(bundle),
        engine=engine,
        threads=threads or len(os.sched_getaffinity(0)),
        times=tuple(times),
    )
    try:
        path = tuned_file(bundle, engine, threads)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, msgspec.json.format(msgspec.json.encode(tuned)) + b"\n")
    except OSError as error:
        raise RequestError(f"step times cannot be kept ({error}); set XDG_CACHE_HOME to a folder of yours") from error
    return path
