"""The parts of Ascend's stack on this machine, found without importing any of it.

torch_npu installs on any Linux machine but loads only where CANN is. Without CANN it breaks its neighbours. torch loads
it as a backend while torch itself is imported, and transformers imports any torch_npu that it finds. ``shield_torch``
and ``hide_torch_npu`` keep both working.
"""

import os
import re
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
# The ids of the NPUs that CANN's runtime shows, counted from 0 among those of the machine or container.
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
# Names of chips have no blanks.
NAME_NPUS = "import torch, torch_npu as _; print(*map(torch.npu.get_device_name, range(torch.npu.device_count())))"
# The libraries that libtorch_npu.so is linked with.
CANN_LIBRARIES = ("libhccl.so", "libascendcl.so", "libge_runner.so", "libgraph.so", "libacl_op_compiler.so")
# 8.1.RC1, 8.5.0, 8.5.0.alpha002, 9.2.0-beta.2. A number of a repair may follow; a build (7.7.0.1.238) is longer.
_RELEASE = r"(\d+\.\d+\.\w+(?:[.-](?:alpha|beta)[\w.]*)?)(?:\.\d+)?"
# The files below CANN's folder that state its release, and how, of 8.1 to 9.2. If `version.info` has both, `Version` is
# a build.
CANN_VERSIONS = (
    ("*-linux/ascend_toolkit_install.info", rf"^version={_RELEASE}\s*$"),
    ("version.cfg", rf"^\w+_running_version=\[[^:\]]*:{_RELEASE}\]"),
    ("*/version.info", rf"^version_dir=(?:cann-)?{_RELEASE}\s*$"),
    ("*/version.info", rf"^Version={_RELEASE}\s*$"),
)


def torch_npu_folder() -> Path | None:
    """Where torch_npu is installed, None if it is not; found even while it is hidden."""
    # Not importlib.util.find_spec: that believes sys.modules, into which hide_torch_npu writes.
    spec = PathFinder.find_spec("torch_npu")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def torch_npu_installed() -> bool:
    """Whether torch_npu is on the import path, loadable or not."""
    return torch_npu_folder() is not None


def cann_folder() -> Path | None:
    """The library folder that ``ASCEND_HOME_PATH`` (CANN's set_env.sh) points to, if there is one."""
    home = os.environ.get("ASCEND_HOME_PATH")
    folder = Path(home) / "lib64" if home else None
    return folder if folder is not None and _is_folder(folder) else None


def cann_available() -> bool:
    """Whether torch_npu would find CANN's libraries; never raises.

    Without a library path all of them are taken from ``ASCEND_HOME_PATH``. A loaded library satisfies those that are
    linked with its name, so torch_npu then loads too.
    """
    if _loads(CANN_LIBRARIES[0]):
        return True
    folder = cann_folder()
    return folder is not None and all(_loads(str(folder / name)) for name in CANN_LIBRARIES)


def cann_lacks() -> str:
    """The library that those of ``ASCEND_HOME_PATH`` need and the loader does not find, such as the driver's
    libascend_hal.so; "" if there are none, or nothing is missing."""
    import ctypes

    try:
        if folder := cann_folder():
            ctypes.CDLL(str(folder / CANN_LIBRARIES[0]))
    except OSError as error:
        name = str(error).partition(":")[0]  # with a path, if it is the one that was asked for
        return "" if "/" in name else name
    return ""


def npu_chips() -> tuple[str, ...]:
    """The chips that torch_npu sees, in its own process; none if it or CANN is missing."""
    if not (torch_npu_installed() and cann_available()):
        return ()
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", NAME_NPUS], capture_output=True, text=True, timeout=120, check=True
        )
        return tuple((done.stdout.splitlines() or [""])[-1].split())
    except (OSError, subprocess.SubprocessError):
        return ()


def npu_count() -> int:
    """How many `npu_chips` there are."""
    return len(npu_chips())


def cann_version() -> str | None:
    """The release of the CANN that ``ASCEND_HOME_PATH`` points to; None if no file states one."""
    home = os.environ.get("ASCEND_HOME_PATH", "")
    for pattern, stated in CANN_VERSIONS if home and _is_folder(Path(home)) else ():
        for path in sorted(Path(home).glob(pattern)):
            try:
                text = path.read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            if match := re.search(stated, text, re.MULTILINE):
                return match[1]
    return None


def shield_torch() -> None:
    """Makes ``import torch`` work if torch_npu is installed but CANN is not; a choice of the user stands.

    Goes through the environment, so that processes started from this one are shielded as well.
    """
    if AUTOLOAD not in os.environ and torch_npu_installed() and not cann_available():
        os.environ[AUTOLOAD] = "0"


def hide_torch_npu() -> None:
    """Makes torch_npu look absent if CANN is absent; to be called before transformers is imported."""
    shield_torch()
    if torch_npu_installed() and not cann_available():
        # The import system takes None for "no such module".
        sys.modules.setdefault("torch_npu", None)  # type: ignore[arg-type]


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long
        return False


def _loads(library: str) -> bool:
    import ctypes  # only machines with torch_npu pay for it

    try:
        ctypes.CDLL(library)
    except (OSError, ValueError):
        return False
    return True
