"""The parts of this machine, as far as its system names them; the others are None or left out."""

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from draftwood import environment
from draftwood.threads import cgroup_limits, default_threads

# What decides which matrix kernels run, x86 and Arm.
FEATURES = (
    *("avx2", "avx512f", "avx512_bf16", "avx_vnni", "avx512_vnni", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimddp", "sve", "i8mm", "bf16"),
)
PROBE_SECONDS = 300
OPENVINO = """
import json
from draftwood.telemetry import import_openvino
core = import_openvino().Core()
print(json.dumps({name: core.get_property(name, "FULL_DEVICE_NAME") for name in core.available_devices}))
"""
HTP = """
import json
from draftwood.runtime.engines.qnn import Htp
print(json.dumps(Htp().emulated))
"""
# In CANN 8.5.0 and later, and before.
SET_ENV = tuple(
    f"{root}/Ascend/{name}/set_env.sh" for root in ("/usr/local", "~") for name in ("cann", "ascend-toolkit")
)


def processor(cpuinfo: str | None = None) -> dict[str, object]:
    """Model, threads this process may use, and matrix features; `cpuinfo` as in ``/proc/cpuinfo``."""
    text = read_text(Path("/proc/cpuinfo")) if cpuinfo is None else cpuinfo
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.split("\n"))}
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return {
        "model": fields.get("model name") or platform.processor() or platform.machine(),
        "threads": default_threads(),
        "features": [name for name in FEATURES if name in flags],
    }


def memory() -> dict[str, int | None]:
    """Total and available memory in bytes; the limit of a container or a service counts as its total."""
    fields: dict[str, int] = {}
    for line in read_text(Path("/proc/meminfo")).splitlines():
        name, _, value = line.partition(":")
        fields[name] = 1024 * int(value.removesuffix("kB"))
    total = fields.get("MemTotal")
    limits = [int(limit) for limit in cgroup_limits("memory.max") if limit.isdecimal()]
    if total is not None:
        total = min([total, *limits])
    return {"total_bytes": total, "available_bytes": fields.get("MemAvailable")}


def ascend(countable: bool) -> dict[str, Any]:
    """CANN, torchair, the NPUs that torch_npu counts (if `countable`) and the driver's device files."""
    cann, folder = environment.cann_available(), environment.torch_npu_folder()
    chips = environment.npu_chips() if countable else ()
    torchair = folder is not None and (folder / "dynamo" / "torchair").is_dir()
    return {
        "cann": cann,
        "cann_folder": _cann_folder() if cann else None,
        "cann_lacks": "" if cann else environment.cann_lacks(),
        "cann_version": environment.cann_version(),
        "torchair": ("real" if cann else "offline") if torchair else None,
        "npus": len(chips),
        "chips": sorted(set(chips)),
        "npu_device_files": len(list(Path("/dev").glob("davinci[0-9]*"))),
        "set_env": _set_env(),
    }


def openvino_devices() -> dict[str, str]:
    """Full names of the devices that OpenVINO finds, by its short ones."""
    return _told(OPENVINO) or {}


def htp() -> str | None:
    """Whether Qualcomm's library has an HTP here or its emulator alone; None if it has neither."""
    emulated = _told(HTP)
    return None if emulated is None else "emulated" if emulated else "found"


def _told(code: str) -> Any:
    """The JSON that code prints, None if it fails; run in a process of its own, since drivers take part."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=PROBE_SECONDS, check=True
        )
        return json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def _set_env() -> str | None:
    with contextlib.suppress(OSError, RuntimeError):  # no home folder, or one that may not be read
        return next((path for path in SET_ENV if Path(path).expanduser().exists()), None)
    return None


def _cann_folder() -> str | None:
    """Where the libraries that ``cann_available`` loaded lie."""
    for line in read_text(Path("/proc/self/maps")).splitlines():
        if line.endswith("/" + environment.CANN_LIBRARIES[0]):
            return str(Path(line[line.index("/") :]).parent)
    folder = environment.cann_folder()
    return str(folder) if folder else None


class CommandEnd(NamedTuple):
    """How a command ended; its code is -1 if it could not be started or took too long."""

    code: int
    out: str
    words: str


def ended(command: Sequence[str], limit_s: float) -> CommandEnd:
    """Runs a command, and ends it with all that it has started when its time is over or this process is interrupted."""
    silent, pipe = subprocess.DEVNULL, subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, stdin=silent, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True
        )
    except OSError as error:
        return CommandEnd(-1, "", str(error))
    try:
        out, words = process.communicate(timeout=limit_s)
        return CommandEnd(process.returncode, out, words)
    except subprocess.TimeoutExpired:
        return CommandEnd(-1, "", f"took longer than {limit_s:g} s")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def probed(module: str, *arguments: str, limit_s: float = PROBE_SECONDS) -> list[dict[str, Any]]:
    """The verdicts of a probe, from its last line, or how it ended. It has a process of its own: what fails on a device
    may take its process along."""
    done = ended([sys.executable, "-P", "-m", module, *arguments], limit_s)
    with contextlib.suppress(ValueError, IndexError):
        verdicts: list[dict[str, Any]] = json.loads(done.out.splitlines()[-1])
        return verdicts
    last = (done.words.strip().splitlines() or ["no output"])[-1][:200]
    why = last if done.code == -1 else f"exit code {done.code}: {last}"
    return [{"ability": f"the probe {' '.join(arguments)}".strip(), "works": False, "seen": why}]


def read_text(path: Path) -> str:
    """The text of a file of the system, empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
