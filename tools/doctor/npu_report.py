"""Findings of ``draftwood doctor --npu`` for readers who have no device: one file that may be sent to anybody.

It is for somebody who has a device for an hour and may not debug. Probes come first, in the order of risk, each in its
own process with a limit, since a failure on a device may take its process along. Then come bundles, built, checked and
timed on every engine. Names of people, machines and folders are removed from the report.
"""

from __future__ import annotations

import contextlib
import csv
import getpass
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from draftwood.environment import cann_version
from draftwood.tools.doctor.npu_steps import TrialCommand, steps
from draftwood.tools.machine import ended, probed, read_text

ACL_PROBE, GRAPH_PROBE, RANKS_PROBE = (f"draftwood.tools.doctor.{name}_probe" for name in ("acl", "npu", "ranks"))
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
# Characters that are kept of the words of a failed command.
_LAST = 1500
# Seconds that a probe of a piece may take.
PIECE_SECONDS = 180.0
OVER = "not tried: the time was over"


def npu_report(
    doctor: dict[str, Any],
    keep: Callable[[dict[str, Any]], None],
    minutes: float = 60.0,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The doctor's own report, CANN's parts, probes, and steps (`npu_steps`), without private data.

    ``keep`` is given the report before and after each of them: it names the running and the remaining ones. So whenever
    the process is ended, all findings are there. A failure ends only the steps that need its result.
    """
    npus, chips = doctor["ascend"]["npus"], doctor["ascend"]["chips"]
    report: dict[str, Any] = {
        "doctor": doctor,
        "cann": cann_version(),
        "driver": match[0] if (match := _NUMBER.search(read_text(Path(_DRIVER)))) else None,
        "atc": shutil.which("atc") is not None,
        "npu_smi": shutil.which("npu-smi") is not None,
        "minutes": minutes,
        "running": None,
        "left": [],
        "probes": {name: [] for name in TITLES},
        "commands": [],
    }
    ends = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="draftwood-npu-", ignore_cleanup_errors=True) as name:
        device = bool(npus or doctor["ascend"]["npu_device_files"])
        tasks = [*_probes(npus), *_commands(Path(name), npus, next(iter(chips), ""), device)]
        for number, task in enumerate(tasks):
            report |= {"running": task.name, "left": [later.name for later in tasks[number + 1 :]]}
            keep(without_names(report))
            say(task.name)
            task.run(report, ends - time.monotonic())
    report["running"] = None
    cleaned: dict[str, Any] = without_names(report)
    keep(cleaned)
    return cleaned


class Trial(NamedTuple):
    """A trial: it takes the report and the seconds that are left, and adds its findings."""

    name: str
    run: Callable[[dict[str, Any], float], None]


def _probes(npus: int) -> Iterator[Trial]:
    if not npus:
        absent = [{"ability": "an NPU", "works": False, "seen": "torch_npu finds none"}]
        yield Trial("NPUs", lambda report, left: report["probes"]["graphs"].extend(absent))
    for piece in PIECES if npus else ():
        yield _probe(f"probe {piece}", "graphs", partial(probed, GRAPH_PROBE, piece))
    yield _probe("probe of AscendCL", "acl", partial(probed, ACL_PROBE))
    if npus > 1:
        yield _probe("two devices", "ranks", partial(two_devices, "hccl"))


def _probe(name: str, place: str, run: Callable[..., list[dict[str, Any]]]) -> Trial:
    def judged(report: dict[str, Any], left_s: float) -> None:
        if left_s <= 0:
            report["probes"][place].append({"ability": name, "works": False, "seen": OVER})
        else:
            report["probes"][place].extend(run(limit_s=min(PIECE_SECONDS, left_s)))

    return Trial(name, judged)


def two_devices(backend: str, limit_s: float = PIECE_SECONDS) -> list[dict[str, Any]]:
    """The verdict of two processes over a backend of torch.distributed."""
    launcher = ("--standalone", "--nproc-per-node=2", "--module", RANKS_PROBE, backend)
    return probed("torch.distributed.run", *launcher, limit_s=limit_s)


def _commands(folder: Path, npus: int, chip: str, device: bool) -> Iterator[Trial]:
    for step in steps(folder, npus, chip) if device else ():
        yield Trial(step.name, partial(_done, step, folder))


def _done(step: TrialCommand, folder: Path, report: dict[str, Any], left_s: float) -> None:
    if left_s <= 0:
        outcome: dict[str, Any] = {"left_out": OVER}
    elif step.needs is not None and not step.needs.exists():
        outcome = {"left_out": f"{step.needs.name} is not there"}
    else:
        outcome = tried(step.command, min(step.limit_s, left_s), step.report)
    rows = operators(folder / "msprof") if step.name.startswith("msprof") else []
    report["commands"].append({"name": step.name, **outcome, **({"seconds_by_operator": rows} if rows else {})})


def tried(command: Sequence[str], limit_s: float, report: Path | None = None) -> dict[str, Any]:
    """One command: its end, its time, and its JSON, which it prints or writes to ``report``. Its last words, if it has
    none or has failed."""
    if report is not None:
        report.unlink(missing_ok=True)
    start = time.perf_counter()
    code, out, words = ended(command, limit_s)
    outcome: dict[str, Any] = {"code": code, "seconds": round(time.perf_counter() - start, 1)}
    with contextlib.suppress(ValueError, OSError):
        outcome["json"] = json.loads(report.read_text() if report else out)
    if code or "json" not in outcome:
        outcome["said"] = (out + words)[-_LAST:]
    return outcome


def operators(folder: Path) -> list[dict[str, str]]:
    """The rows of msprof's ``op_statistic`` files: operators with their core, count and microseconds."""
    rows = []
    for path in sorted(folder.rglob("op_statistic_*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            rows += list(csv.DictReader(file))
    return rows


def without_names(value: Any) -> Any:
    """The report with folders cut off in front of names of files, and neither user nor machine in it."""
    if isinstance(value, dict):
        return {key: without_names(part) for key, part in value.items()}
    if isinstance(value, list):
        return [without_names(part) for part in value]
    if not isinstance(value, str):
        return value
    for folder in _blank_folders():
        value = value.replace(f"{folder}/", "/./")
    text = _FOLDERS.sub(".../", value)
    for name, instead in ((_user(), "USER"), (socket.gethostname(), "MACHINE")):
        text = re.sub(rf"\b{re.escape(name)}\b", instead, text) if len(name) > 2 else text
    return text


def _blank_folders() -> list[str]:
    """The folders that a report may name and `_FOLDERS` ends too early in, the longest first: a blank is in them."""
    folders = (tempfile.gettempdir(), os.environ.get("HOME", ""), str(Path.cwd()), sys.prefix)
    return sorted((folder for folder in folders if re.search(r"\s", folder)), key=len, reverse=True)


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user without an entry, as containers have
        return ""


def describe(report: dict[str, Any]) -> str:
    """The report in words: the present parts, the missing parts, and the trials."""
    state = {True: "found", False: "absent"}
    lines = [
        f"CANN          {report['cann'] or 'absent: install it and source its set_env.sh'}",
        f"driver        {report['driver'] or 'absent'}",
        f"atc           {state[report['atc']]}",
        f"npu-smi       {state[report['npu_smi']]}",
    ]
    for name, title in TITLES.items():
        lines += ["", title]
        for verdict in report["probes"][name]:
            lines.append(f"  {'works' if verdict['works'] else 'no   '}  {verdict['ability']}: {verdict['seen']}")
    lines += ["", "bundles on this machine"] if report["commands"] else []
    for entry in report["commands"]:
        how = f"{entry['seconds']} s" if "code" in entry else entry["left_out"]
        lines.append(f"  {'no   ' if entry.get('code', 1) else 'works'}  {entry['name']}, {how}")
    return "\n".join(lines)
