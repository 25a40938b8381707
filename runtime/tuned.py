"""Step times measured on this machine, kept in the user's cache by machine, bundle, engine and threads.

They name the releases that they were measured with. Another release may take other times, so theirs are not used.

A bundle stays as it was built, so facts of one machine alone lie next to it.
"""

from __future__ import annotations

import hashlib
import platform
import warnings
from collections.abc import Sequence
from pathlib import Path

import msgspec

from draftwood.environment import cann_version
from draftwood.errors import RequestError
from draftwood.files import cache_home, read_regular, write_whole
from draftwood.manifest import DAMAGED, encode
from draftwood.planned import StepTime
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.registry import engine_kind
from draftwood.threads import default_threads
from draftwood.version import __version__

VERSION = 2
MOST_BYTES = 1 << 20
# No step of any bundle is quicker; a quicker one was not measured.
LEAST_STEP_US = 1.0


class OldTimes(UserWarning):
    """Step times that were measured with other releases."""


class Tuned(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file: the measurements, and their subject, for its readers."""

    version: int
    machine: str
    bundle: str
    engine: str
    threads: int
    # By package, and "CANN".
    releases: dict[str, str]
    times: tuple[StepTime, ...]


def processor_name() -> str:
    """The processor's model, as the system names it."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    except OSError:  # not Linux
        pass
    return model


def machine_name() -> str:
    """Host, processor and how many of them this process may use."""
    return f"{platform.node()}, {processor_name()}, {default_threads()} processors"


def releases_here(engine: str) -> dict[str, str]:
    """The releases of this package, onnxruntime and an engine's packages, as far as they are installed."""
    import onnxruntime

    kind = engine_kind(engine)
    releases = {"draftwood": __version__, "onnxruntime": onnxruntime.__version__}
    for package in kind.packages:
        if release := _release(package):
            releases[package] = release
    if kind.npu and (cann := cann_version()):
        releases["CANN"] = cann
    return releases


def _release(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version  # takes a thirtieth of an opening to be imported

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def bundle_digest(bundle: Bundle) -> str:
    """SHA-256, in hex, of the manifest, which vouches for everything else."""
    return hashlib.sha256(encode(bundle.manifest)).hexdigest()


def tuned_file(bundle: Bundle, engine: str, threads: int | None) -> Path:
    """Where the times of an engine with that many threads are kept; None means all processors."""
    threads = threads or default_threads()
    key = f"{machine_name()} {bundle_digest(bundle)} {engine} {threads}"
    return cache_home() / "draftwood" / "tuned" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def tuned_times(bundle: Bundle, engine: str, threads: int | None) -> tuple[StepTime, ...]:
    """The times that were measured here with these releases.

    There are none without a file, or if it is damaged: it is a cache. If the times are of other releases, a warning
    says so.
    """
    try:
        tuned = msgspec.json.decode(read_regular(tuned_file(bundle, engine, threads), MOST_BYTES), type=Tuned)
    except (OSError, *DAMAGED):
        return ()
    if tuned.version != VERSION or not _of(tuned, bundle):
        return ()
    here = releases_here(engine)
    if tuned.releases == here:
        return tuned.times
    others = [
        f"{name} {tuned.releases.get(name, 'absent')} (here {here.get(name, 'absent')})"
        for name in sorted(tuned.releases.keys() | here.keys())
        if tuned.releases.get(name) != here.get(name)
    ]
    warnings.warn(
        f"{bundle.folder}: its step times were measured with {', '.join(others)}; they are measured again while it"
        f" decodes, and at once by draftwood tune",
        OldTimes,
        stacklevel=2,
    )
    return ()


def _of(tuned: Tuned, bundle: Bundle) -> bool:
    """Whether every gear of the bundle has its times, and none that it cannot have."""
    slots = {gear.name: gear.slots for gear in bundle.manifest.gears}
    possible = all(
        max(time.length, time.late) <= slots.get(time.gear, 0) and time.us >= LEAST_STEP_US for time in tuned.times
    )
    return tuned.bundle == bundle_digest(bundle) and slots.keys() == {time.gear for time in tuned.times} and possible


def prepare_times(bundle: Bundle, engine: str, threads: int | None) -> None:
    """Makes the folder of the file; RequestError if it cannot be written, before the minutes that measuring takes."""
    from tempfile import TemporaryFile  # takes a tenth of an opening to be imported

    try:
        folder = tuned_file(bundle, engine, threads).parent
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _unkept(error) from error


def keep_times(bundle: Bundle, engine: str, threads: int | None, times: Sequence[StepTime]) -> Path:
    """Writes the file, whole or not at all; RequestError if it cannot be written."""
    tuned = Tuned(
        version=VERSION,
        machine=machine_name(),
        bundle=bundle_digest(bundle),
        engine=engine,
        threads=threads or default_threads(),
        releases=releases_here(engine),
        times=tuple(times),
    )
    try:
        path = tuned_file(bundle, engine, threads)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, msgspec.json.format(msgspec.json.encode(tuned)) + b"\n")
    except OSError as error:
        raise _unkept(error) from error
    return path


def _unkept(error: OSError) -> RequestError:
    return RequestError(f"step times cannot be kept ({error}); set XDG_CACHE_HOME to a folder of yours")
