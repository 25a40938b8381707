"""The threads of onnxruntime's sessions: one pool of a process, or one of each session. And what a container or a
service may take, by which they are counted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from draftwood.errors import RequestError

if TYPE_CHECKING:
    import onnxruntime as ort

# More than any machine has; onnxruntime starts what it is asked for.
MOST_THREADS = 1024
CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_shared = False


def default_threads(mounted: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """The processors this process may use: the scheduler's mask counts, and the quotas of a container or a service."""
    if not hasattr(os, "sched_getaffinity"):  # macOS
        return os.cpu_count() or 1
    most = len(os.sched_getaffinity(0))
    for limit in cgroup_limits("cpu.max", mounted, own):
        quota, _, period = limit.partition(" ")
        if quota.isdecimal() and period.isdecimal():
            most = min(most, int(quota) // int(period))
    return max(1, most)


def cgroup_limits(name: str, mounted: Path = CGROUPS, own: Path = OWN_CGROUP) -> Iterator[str]:
    """What a file says in this process's control group and in each that holds it; all of them count. A container sees
    its own as the outermost one, a service of systemd lies deeper."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    group = mounted / next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), "")
    for folder in (group, *group.parents):
        if folder.is_relative_to(mounted):
            with contextlib.suppress(OSError):
                yield (folder / name).read_text().strip()


def counted_threads(threads: int | None) -> int:
    """The number of threads, None meaning all processors; RequestError if there cannot be so many."""
    if threads is None:
        return default_threads()
    if not 1 <= threads <= MOST_THREADS:
        raise RequestError(f"threads {threads}: expected 1 to {MOST_THREADS}")
    return threads


def share_threads(threads: int | None = None) -> None:
    """One thread pool for all sessions of this process, which is fastest if several sessions take turns.

    For programs that own their process, such as the command line: from then on onnxruntime refuses every session, also
    one made elsewhere, without ``use_per_session_threads = False``. Only the first call counts; ``threads`` None means
    all processors.
    """
    import onnxruntime as ort

    global _shared
    if not _shared:
        ort.set_global_thread_pool_sizes(counted_threads(threads), 1)
        _shared = True


def pool_options(threads: int | None, spins: bool) -> ort.SessionOptions:
    """Options of a session on the shared pool, or with one of its own, which ``spins`` while it waits."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    if _shared:
        options.use_per_session_threads = False
    else:
        options.intra_op_num_threads = counted_threads(threads)
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spins else "0")
    return options
