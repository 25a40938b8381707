"""What ``draftwood doctor --npu`` finds out for whoever has no device: one file that may be sent to anybody.

For somebody who has a device for an hour and may not debug: probes in the order of risk, each in a process of its own
with a limit, since what fails on a device may take its process along; then the demo, built, checked and timed on every
engine. Of names of people, machines and folders nothing is left in the report.
"""

from __future__ import annotations

import contextlib
import csv
import getpass
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from draftwood.environment import cann_version
from draftwood.tools.lab.machine import probed, read_text

ACL_PROBE, GRAPH_PROBE, RANKS_PROBE = (f"draftwood.tools.lab.{name}_probe" for name in ("acl", "npu", "ranks"))
TITLES = {
    "graphs": "pieces of the graphs, through torchair and GE",
    "acl": "AscendCL, the runtime of .om files",
    "ranks": "two devices together",
}
# Of the probes of pieces, in the order of risk.
PIECES = (
    *("topk-bf16", "topk-fp32", "attention-16", "attention-17", "attention-2", "in-place", "rotary", "int32"),
    *("slices", "products", "int8"),
)
_DRIVER = "/usr/local/Ascend/driver/version.info"
_NUMBER = re.compile(r"\d+\.\d+[\w.]*")
_FOLDERS = re.compile(r"(?<![\w.])(?:~|\.{0,2})/(?:[^\s/:;,'\"()<>]+/)+")
# What is kept of the words of a command that failed.
_LAST = 1500
# Devices that the demo's model is split over: it has 9 query and 3 key/value heads.
RANKS = 3


def npu_report(doctor: dict[str, Any], say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """The doctor's own report, CANN's parts, all probes and the demo's commands, without private data."""
    npus = doctor["ascend"]["npus"]
    found = {
        "doctor": doctor,
        "cann": cann_version(),
        "driver": match[0] if (match := _NUMBER.search(read_text(Path(_DRIVER)))) else None,
        "atc": shutil.which("atc") is not None,
        "npu_smi": shutil.which("npu-smi") is not None,
        "probes": dict(_probes(npus, say)),
        "commands": list(_commands(npus, say)) if npus or doctor["ascend"]["npu_device_files"] else [],
    }
    cleaned: dict[str, Any] = without_names(found)
    return cleaned


def _probes(npus: int, say: Callable[[str], None]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    graphs = [{"ability": "an NPU", "works": False, "seen": "torch_npu finds none"}]
    if npus:
        graphs = []
        for name in PIECES:
            say(f"probe {name}")
            graphs += probed(GRAPH_PROBE, name)
    yield "graphs", graphs
    say("probe of AscendCL")
    yield "acl", probed(ACL_PROBE)
    yield "ranks", two_devices("hccl") if npus > 1 else []


def two_devices(backend: str) -> list[dict[str, Any]]:
    """The verdict of two processes over a backend of torch.distributed."""
    launcher = ("--standalone", "--nproc-per-node=2", "--module", RANKS_PROBE, backend)
    return probed("torch.distributed.run", *launcher)


def demo_commands(folder: Path, npus: int = 1) -> dict[str, tuple[list[str], int, Path | None]]:
    """What is run of the demo, in order: name -> command, its limit in seconds, the report that it writes, if any."""
    bundle, draftwood = str(folder / "bundle"), [sys.executable, "-m", "draftwood.tools.cli"]
    demo = "--model demo --tree lookup:chain:3,lookup:chain:7 --kv 1024 --target onnx,ge --out"
    device = "--device ascend-910b3 --model demo --drafter medusa:2 --kv 1024 --rows 1,13 --out"
    build, modelled = ["build", *demo.split()], ["profile", *device.split()]
    bench = ["bench", bundle, "--max-new-tokens", "32", "--json", "--engine"]
    table, model = folder / "measured.json", folder / "modelled.json"
    checked, captured = (folder / "bundle" / f"{name}.json" for name in ("check", "check-npu-captured"))
    found: dict[str, tuple[list[str], int, Path | None]] = {
        "build": ([*draftwood, *build, bundle], 600, None),
        "check": ([*draftwood, "check", bundle], 1200, checked),
        "bench npu": ([*draftwood, *bench, "npu"], 600, None),
        "check captured": ([*draftwood, "check", bundle, "--engine", "npu-captured"], 600, captured),
        "bench captured": ([*draftwood, *bench, "npu-captured"], 600, None),
        "profile": ([*draftwood, "profile", bundle, "--out", str(table)], 600, table),
        "modelled": ([*draftwood, *modelled, str(model)], 120, model),
        "atc": (["sh", f"{bundle}/npu/atc.sh"], 1800, None),
        "check om": ([*draftwood, "check", bundle], 1200, checked),
        "bench acl": ([*draftwood, *bench, "acl"], 600, None),
    }
    if npus >= RANKS:
        split, torchrun = folder / "split", ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        check = ["-m", "--", "draftwood.tools.cli", "check", str(split), "--engine", "ranks"]
        found["build split"] = ([*draftwood, *build, str(split), "--ranks", str(RANKS)], 600, None)
        found["check split"] = ([sys.executable, *torchrun, *check], 1200, split / "check-ranks.json")
    if shutil.which("msprof"):
        run = " ".join([*draftwood, "run", bundle, "--engine", "acl", "--prompt", "'The cat sat'"])
        found["msprof"] = (["msprof", f"--output={folder / 'msprof'}", f"--application={run}"], 600, None)
    return found


def _commands(npus: int, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="draftwood-npu-") as name:
        folder = Path(name)
        for title, given in demo_commands(folder, npus).items():
            say(title)
            yield {"name": title, **tried(*given)}
        yield {"name": "operators", "seconds_by_operator": operators(folder / "msprof")}


def tried(command: Sequence[str], limit_s: float, report: Path | None = None) -> dict[str, Any]:
    """One command: how it ended, how long it took, and its JSON, which it prints or writes to ``report``; its last
    words where it has none or has failed."""
    if report is not None:
        report.unlink(missing_ok=True)
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=limit_s)
        code, out, words = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired:
        code, out, words = -1, "", f"took longer than {limit_s:g} s"
    except OSError as error:
        code, out, words = -1, "", str(error)
    found: dict[str, Any] = {"code": code, "seconds": round(time.perf_counter() - start, 1)}
    with contextlib.suppress(ValueError, OSError):
        found["json"] = json.loads(report.read_text() if report else out)
    if code or "json" not in found:
        found["said"] = (out + words)[-_LAST:]
    return found


def operators(folder: Path) -> list[dict[str, str]]:
    """The rows of msprof's ``op_statistic`` files: operators with their core, count and microseconds."""
    rows = []
    for path in sorted(folder.rglob("op_statistic_*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            rows += list(csv.DictReader(file))
    return rows


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
    lines += ["", "the demo on this machine"] if found["commands"] else []
    for one in found["commands"]:
        if "code" in one:
            ended = "works" if not one["code"] else "no   "
            lines.append(f"  {ended}  {one['name']}, {one['seconds']} s")
    return "\n".join(lines)
