"""The options of opening a bundle, in one object from the command line, a server or Ray down to the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from draftwood.errors import RequestError
from draftwood.threads import MOST_THREADS

_Kind = TypeVar("_Kind")


class Opening(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a bundle is opened; what is left out follows from the bundle and the machine."""

    # ``cpu``, ``npu`` or another registered engine; None takes the best that machine and bundle allow.
    engine: str | None = None
    # ``full`` hashes every file, ``fast`` only what has changed since the last full verification on this machine. None
    # is full once and fast after that.
    verify: Literal["full", "fast"] | None = None
    # Processors to use; all if None.
    threads: Annotated[int, Meta(ge=1, le=MOST_THREADS)] | None = None
    # Of the caches of all texts together; a text for which there is no room waits. By default there is room for twice
    # as many texts of the whole context as a launch takes, in at most half of the machine's memory.
    cache_bytes: Annotated[int, Meta(ge=1)] | None = None
    # Keep the caches of ended texts, as far as there is room, for prompts that begin like them.
    prefixes: bool = True
    # Texts that may wait for room; one more is refused with BusyError. None allows any number.
    waiting: Annotated[int, Meta(ge=0)] | None = None
    # If the engine cannot be opened, or fails in its quick proof, decode with what there is. That is a CPU's engine, or
    # eager PyTorch for graphs of an NPU alone.
    fallback: bool = False

    def but(self, **options: Any) -> Opening:
        """A copy with some options replaced; RequestError for an unknown name, or a value that makes no sense."""
        if unknown := options.keys() - set(self.__struct_fields__):
            known = ", ".join(self.__struct_fields__)
            raise RequestError(f"{min(unknown)}: no such option of opening; expected one of {known}")
        return typed(msgspec.structs.asdict(self) | options, Opening)


def typed(options: Mapping[str, Any], kind: type[_Kind]) -> _Kind:
    """The options as a struct or a typed dictionary, numpy's numbers as Python's.

    Raises:
        RequestError: names the first whose value is of another type.
    """
    try:
        return msgspec.convert({name: _own(value) for name, value in options.items()}, kind)
    except Exception as error:  # what an odd object raises, too
        problem, _, where = str(error).partition(" - at ")
        raise RequestError(f"{where.rpartition('$.')[2].rstrip('`') or 'options'}: {problem}") from None


def _own(value: Any) -> Any:
    """Numpy's numbers and arrays, and any sequence, as those that msgspec knows."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray) else value


# Nothing said.
USUAL = Opening()
