"""How much memory there is."""

import os


def machine_memory() -> int:
    """Bytes of memory that this machine has, in use or not."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
