"""Modules that run as scripts (``python -m draftwood.tests.pangu``): a wrong request is one line."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec

from draftwood.errors import UserError

_Arguments = ParamSpec("_Arguments")


def refusing(main: Callable[_Arguments, int]) -> Callable[_Arguments, int]:
    """``main`` with a UserError turned into one line on stderr and exit code 2."""

    @functools.wraps(main)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> int:
        try:
            return main(*args, **kwargs)
        except UserError as error:
            print("draftwood: error:", error, file=sys.stderr)
            return 2

    return run
