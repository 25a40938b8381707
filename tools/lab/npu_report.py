"""What ``draftwood doctor --npu`` finds out for whoever has no device: one file that may be sent to anybody.

A probe runs in a process of its own, for what fails on a device may take its process along. Of names of people,
machines and folders nothing is left in the report.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import socket
from pathlib import Path
from typing import Any

from draftwood.tools.lab.machine import probed, read_text

ACL_PROBE = "draftwood.tools.lab.acl_probe"
TITLES = {"acl": "AscendCL, the runtime of .om files", "attention": "the fused attention, through torch_npu"}
_NO_NPU = [{"ability": "an NPU", "works": False, "seen": "torch_npu finds none"}]
# The files, below CANN's folder, that state its version, of different releases; the first that is there counts.
_VERSIONS = ("version.cfg", "compiler/version.info", "runtime/version.info", "opp/version.info")
_DRIVER = "/usr/local/Ascend/driver/version.info"
_NUMBER = re.compile(r"\d+\.\d+[\w.]*")
_FOLDERS = re.compile(r"(?<![\w.])(?:~|\.{0,2})/(?:[^\s/:;,'\"()<>]+/)+")


def npu_report(doctor: dict[str, Any]) -> dict[str, Any]:
    """The doctor's own report, CANN's parts and all probes, without private data."""
    home = os.environ.get("ASCEND_HOME_PATH", "")
    found = {
        "doctor": doctor,
        "cann": _version(Path(home), _VERSIONS) if home else None,
        "driver": _version(Path("/"), (_DRIVER.lstrip("/"),)),
        "atc": shutil.which("atc") is not None,
        "npu_smi": shutil.which("npu-smi") is not None,
        "probes": {"acl": probed(ACL_PROBE), "attention": doctor["attention"] or _NO_NPU},
    }
    cleaned: dict[str, Any] = without_names(found)
    return cleaned


def _version(folder: Path, names: tuple[str, ...]) -> str | None:
    """The first number with a dot in the first of the files that is there."""
    texts = (read_text(folder / name) for name in names)
    return next((match[0] for text in texts if (match := _NUMBER.search(text))), None)


def without_names(value: Any) -> Any:
    """The same report with folders cut off in front of names of files, and neither user nor machine in it."""
    if isinstance(value, dict):
        return {key: without_names(one) for key, one in value.items()}
    if isinstance(value, list):
        return [without_names(one) for one in value]
    if not isinstance(value, str):
        return value
    text = _FOLDERS.sub(".../", value)
    for name, instead in ((_user(), "USER"), (socket.gethostname(), "MACHINE")):
        text = re.sub(rf"\b{re.escape(name)}\b", instead, text) if len(name) > 2 else text
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user without an entry, as containers have
        return ""


def describe(found: dict[str, Any]) -> str:
    """The report in words: what is here, what is absent, what was tried."""
    state = {True: "found", False: "absent"}
    lines = [
        f"CANN          {found['cann'] or 'absent: install it and source its set_env.sh'}",
        f"driver        {found['driver'] or 'absent'}",
        f"atc           {state[found['atc']]}",
        f"npu-smi       {state[found['npu_smi']]}",
    ]
    for name, title in TITLES.items():
        lines += ["", title]
        for verdict in found["probes"][name]:
            lines.append(f"  {'works' if verdict['works'] else 'no   '}  {verdict['ability']}: {verdict['seen']}")
    return "\n".join(lines)
