"""Where the quick proof of a first opening runs: in its own process, or in this one.

A graph that was changed inside can end its process from within onnxruntime: a division by zero in an operator's shape
arithmetic is a signal, not an exception. A program that opens a bundle must survive that with one clear line.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from draftwood.errors import BundleError, UserError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.choice import default_engine, open_engine
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.engines.opening import Opening
from draftwood.runtime.engines.registry import engine_kind, is_registered
from draftwood.runtime.proof import prove
from draftwood.runtime.tuned import processor_name, releases_here

_REFUSED = 3
_CHILD = "import sys; from draftwood.runtime.proving import main; sys.exit(main(*sys.argv[1:]))"

log = logging.getLogger("draftwood.opening")


def proved_engine(bundle: Bundle, opening: Opening) -> Engine:
    """The engine that an opening names, after the quick proof if this processor has not seen it pass with these files
    and releases. One that this process has registered is proved at every opening: its name does not tell what it is.

    Raises:
        BundleError: a gear differs from plain decoding, or ends the process that runs it.
        RequestError: no such engine or device.
    """
    kind = engine_kind(opening.engine or default_engine(bundle))
    releases = " ".join(f"{name} {release}" for name, release in releases_here(kind.name).items())
    proof = f"decoding {kind.name}, {processor_name()}, {releases}"
    own = is_registered(kind.name)
    if not own and bundle.files.proved(proof):
        return open_engine(bundle, opening)
    log.info("%s: first opening here, so every gear is compared with plain decoding once", bundle.folder)
    apart = kind.quick and not own and _prove_apart(bundle, opening)  # a device is not opened twice
    engine = open_engine(bundle, opening)
    if not apart:
        prove(engine)
    if not own:
        bundle.files.remember(proof)
    return engine


def main(folder: str, opening: str) -> int:
    """The process of its own: 0 if the proof passes; a refusal goes to standard output."""
    try:
        prove(open_engine(Bundle.open(Path(folder), "fast"), msgspec.json.decode(opening, type=Opening)))
    except UserError as error:
        sys.stdout.write(f"{error}\n")
        return _REFUSED
    return 0


def _prove_apart(bundle: Bundle, opening: Opening) -> bool:
    """Whether the proof ran in its own process, and passed; BundleError if it did not pass."""
    words = [sys.executable, "-P", "-c", _CHILD, str(bundle.folder), msgspec.json.encode(opening).decode()]
    paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    try:
        ended = subprocess.run(
            words, env={**os.environ, "PYTHONPATH": paths}, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
    except OSError:  # no interpreter to start, as in a program that was frozen into one file, or no memory for it
        return False
    if ended.returncode == _REFUSED:
        raise BundleError(ended.stdout.decode(errors="replace").strip())
    if ended.returncode < 0:
        raise BundleError(
            f"{bundle.folder}: running its graphs ends the process ({_signal(-ended.returncode)}); expected one step of"
            " every gear; build it again, or free memory if there is too little"
        )
    return ended.returncode == 0


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
