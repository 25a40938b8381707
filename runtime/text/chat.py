"""The chat templates of a bundle, rendered in their own process, which is kept warm.

See `draftwood.runtime.text.rendering` for the reason, and for the limits.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwood.errors import BundleError, RequestError
from draftwood.runtime.text import rendering

if TYPE_CHECKING:
    import jinja2

# The longest published templates have some 20 000 characters.
_MOST_SOURCE = 1 << 20
# Until an answer comes: far beyond the processor time that it may take, because the machine may be busy.
_PATIENCE_SECONDS = 60.0


class Templates:
    """Templates by name; ``path`` is the file that holds them. May be used from several threads at once.

    Those that are ``known`` to be templates are not parsed again.

    Raises:
        BundleError: one is no valid template; ``path`` and the line are named.
    """

    def __init__(self, sources: Mapping[str, str], path: Path, known: bool = False) -> None:
        self._sources = dict(sources)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        if self._sources and not known:
            environment = rendering.environment()
            for source in self._sources.values():
                _parse(environment, source, path)

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def source(self, name: str) -> str | None:
        """A template as it was given."""
        return self._sources.get(name)

    def warm(self) -> None:
        """Starts the process, without waiting until it is ready: the first text then need not wait for it either."""
        with self._lock:
            if self._sources:
                with contextlib.suppress(OSError):  # the next request says so
                    self._started()

    def render(self, name: str, values: Mapping[str, Any]) -> str:
        """The text that a template makes of values of JSON.

        Raises:
            RequestError: the template refuses them, fails, or takes too long or too much.
        """
        with self._lock:
            try:
                answer = self._asked({"name": name, "values": values})
            except BaseException:  # an interrupt, too: an answer that nobody has read would be the next text's
                self._stop()
                raise
        given = "messages or the tools" if values.get("tools") else "messages"
        if "refused" in answer:
            raise RequestError(f"chat: the template refuses the {given}: {answer['refused']}")
        if "failed" in answer:
            raise RequestError(f"chat: the template fails on the {given}: {answer['failed']}")
        text: str = answer["text"]
        return text

    def _asked(self, question: dict[str, Any]) -> dict[str, Any]:
        for _ in range(2):
            try:
                process = self._started()
                assert process.stdin is not None and process.stdout is not None, "both are pipes"
                rendering.write(process.stdin, question)
            except BrokenPipeError:  # something else has ended it since the last text
                self._stop()
                continue
            waiting = select.poll()  # select.select knows files up to number 1023 alone
            waiting.register(process.stdout, select.POLLIN)
            if not waiting.poll(_PATIENCE_SECONDS * 1e3):
                self._stop()
                return {"failed": f"no answer within {_PATIENCE_SECONDS:.0f} seconds"}
            answer: dict[str, Any] | None = rendering.read(process.stdout)
            if answer is not None:
                return answer
            self._stop()
            return {"failed": f"it takes more than {rendering.MOST_SECONDS} seconds, or all memory"}
        return {"failed": "the process that renders it has been ended twice; ask again"}

    def _started(self) -> subprocess.Popen[bytes]:
        """The process that renders; one of this process, not of one that it was forked from."""
        if self._process is None or self._owner != os.getpid():
            self._owner = os.getpid()
            # -I: neither the working folder nor variables decide its imports. jinja2 may lie where this program alone
            # looks (pip install --user, --target). Its own session: an interrupt at the terminal is for the asker.
            self._process = subprocess.Popen(
                [sys.executable, "-I", rendering.__file__, *filter(None, map(str, sys.path))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            weakref.finalize(self, _end, self._process, self._owner)
            assert self._process.stdin is not None
            rendering.write(self._process.stdin, self._sources)
        return self._process

    def _stop(self) -> None:
        if self._process is not None:
            _end(self._process, self._owner)
        self._process = None


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """Ends a process that this one has started, and lets go of its pipes."""
    if owner != os.getpid():
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # the unwritten rest
            pipe.close()


def _parse(environment: jinja2.Environment, source: str, path: Path) -> None:
    """Raises BundleError if it is no template. Parsing computes nothing; compiling would."""
    import jinja2

    if len(source) > _MOST_SOURCE:
        raise BundleError(f"{path}: chat template of {len(source)} characters; expected at most {_MOST_SOURCE}")
    try:
        environment.parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise BundleError(f"{path}: chat template, line {error.lineno}: {error.message}") from error
    except Exception as error:  # nested too deep, say
        raise BundleError(f"{path}: chat template: {str(error) or type(error).__name__}") from error
