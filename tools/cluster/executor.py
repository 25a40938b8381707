"""Calls that a Ray cluster makes, with the interface of Python's own executors."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import ray


class RayExecutor(Executor):
    """Each call takes a processor of the cluster; one whose process or machine dies is made again.

    So a call has to give the same at any time, and to leave nothing but its result.
    """

    def submit(self, call: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        return ray.remote(num_cpus=1, max_retries=-1)(call).remote(*given, **named).future()
