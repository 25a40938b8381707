"""How SIGINT, SIGTERM and SIGHUP end a command: as an error would, so that servers that were started are ended and
half-written files go.

A compiled module that is interrupted while it sets itself up raises an ImportError instead, or ends the process
("terminate called"), as onnxruntime's does. So the end waits until it has been loaded.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from importlib.machinery import ExtensionFileLoader
from types import CodeType, FrameType

_AGAIN_S = 0.02
# What runs while a compiled module sets itself up.
_LOADS: set[CodeType] = {ExtensionFileLoader.create_module.__code__, ExtensionFileLoader.exec_module.__code__}


def end_on_signals() -> None:
    """Has the signals end this process's command, with the exit codes 130, 143 and 129."""
    signal.signal(signal.SIGTERM, _end)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # of a terminal that is closed; nohup has it ignored
        signal.signal(signal.SIGHUP, _end)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell has its background ignore it
        signal.signal(signal.SIGINT, _end)


def _end(number: int, frame: FrameType | None) -> None:
    if any(inner.f_code in _LOADS for inner in _frames(frame)):
        signal.signal(signal.SIGALRM, lambda _, later: _end(number, later))
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
    elif number == signal.SIGINT:
        raise KeyboardInterrupt
    else:
        raise SystemExit(128 + number)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back
