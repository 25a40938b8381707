"""Workers of a Dask cluster, for what spreads over machines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from draftwood.errors import RequestError


@contextmanager
def cluster(address: str) -> Iterator[Any]:
    """A client of the scheduler at ``HOST:PORT``.

    Raises:
        RequestError: Dask is not installed, or nobody answers.
    """
    try:
        from distributed import Client
    except ImportError as error:
        raise RequestError(f"--scheduler {address}: needs the package distributed; pip install distributed") from error
    try:
        client = Client(address, timeout="10s")
    except (OSError, ValueError, TimeoutError) as error:
        raise RequestError(f"--scheduler {address}: nobody answers ({error}); expected HOST:PORT of Dask") from error
    with client:
        yield client
