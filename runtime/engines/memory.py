"""How much memory there is."""

import os
from pathlib import Path

from draftwood.threads import CGROUPS, OWN_CGROUP, cgroup_limits


def machine_memory(mounted: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """Bytes of memory that this machine has, or lets a container or a service have, in use or not."""
    limits = [int(limit) for limit in cgroup_limits("memory.max", mounted, own) if limit.isdecimal()]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *limits])
