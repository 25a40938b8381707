"""``draftwood doctor``: this machine's parts, its abilities, and the missing parts.

Packages are looked up, not imported, so that a broken one cannot break the report. Only onnxruntime is imported, for
its providers. An NPU is counted in its own process.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from pathlib import Path
from typing import Any

from draftwood import environment
from draftwood.errors import RequestError
from draftwood.files import json_text, write_whole
from draftwood.runtime.engines.registry import engines
from draftwood.tools import machine
from draftwood.tools.doctor.npu_report import describe, npu_report
from draftwood.tools.packages import BUILD, EXTRAS, RUN, SERVE, install, version
from draftwood.version import __version__
from draftwood.versions import LEAST, acl_problem, npu_problem, unsupported

# The needs of each ability besides packages: "cann" and "npu".
NEEDS = {
    "run bundles": RUN,
    "serve bundles": (*RUN, *SERVE),
    "deploy on Ray": (*RUN, *SERVE, "ray"),
    "build bundles": (*RUN, *BUILD),
    "lower for the NPU": (*RUN, *BUILD, "torch_npu"),
    **{
        kind.ability: (*RUN, *kind.packages, *(("cann", "npu") if kind.npu else ()))
        for kind in engines().values()
        if kind.ability
    },
    "train": (*RUN, *BUILD),
    "check --teacher": (*RUN, *BUILD, "transformers"),
}
CPU_TORCH = "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--npu", nargs="?", type=Path, const=Path("npu-report.json"), metavar="FILE",
        help="try what an NPU can do, and write a report to send (default npu-report.json)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def main(args: argparse.Namespace) -> int:
    facts = report()
    if args.npu:
        return _npu(facts, args)
    print(json_text(facts, indent=2) if args.json else render(facts))
    return 0


def _npu(report: dict[str, Any], args: argparse.Namespace) -> int:
    """Tries the device and keeps the file up to date; 0 if all that was tried works."""

    def keep(tried: dict[str, Any]) -> None:
        try:
            write_whole(args.npu, json_text(tried, indent=2).encode() + b"\n")
        except OSError as error:
            raise RequestError(f"--npu {args.npu}: cannot be written ({error.strerror}); name another file") from None

    tried = npu_report(report, keep, say=lambda text: print(text, file=sys.stderr))
    text = json_text(tried, indent=2)
    print(text if args.json else f"{describe(tried)}\n\nwritten to {args.npu}; it holds no names and no folders")
    works = all(verdict["works"] for verdicts in tried["probes"].values() for verdict in verdicts)
    return 0 if works and not any(command.get("code") for command in tried["commands"]) else 1


def report() -> dict[str, Any]:
    """Everything the doctor knows, as plain values; see ``render`` for people."""
    packages = {name: {"version": version(name), "install": install(name)} for name in EXTRAS}
    ascend = machine.ascend(countable=bool(packages["torch"]["version"]))
    openvino = machine.openvino_devices() if packages["openvino"]["version"] else {}
    can = {name: _ability(name, packages, ascend) for name in NEEDS}
    return {
        "draftwood": __version__,
        "python": {"version": platform.python_version(), "platform": platform.platform(terse=True)},
        "packages": packages,
        "onnxruntime_providers": _providers() if packages["onnxruntime"]["version"] else [],
        "openvino_devices": openvino,
        "htp": machine.htp() if packages["onnxruntime_qnn"]["version"] else None,
        "ascend": ascend,
        "cpu": machine.processor(),
        "memory": machine.memory(),
        "can": can,
        "next_steps": _next_steps(packages, ascend, can) + _intel_steps(packages, openvino),
        "npu_needs": [need._asdict() for need in LEAST],
    }


def _providers() -> list[str]:
    try:
        import onnxruntime

        return list(onnxruntime.get_available_providers())
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return [f"broken: {error}"]


def _ability(name: str, packages: dict[str, Any], ascend: dict[str, Any]) -> dict[str, Any]:
    have = {package for package, facts in packages.items() if facts["version"]}
    have |= {"cann"} if ascend["cann"] else set()
    have |= {"npu"} if ascend["npus"] or ascend["npu_device_files"] else set()
    missing = [need for need in NEEDS[name] if need not in have]
    # Needs go from the base to the widest extra, and a wider one brings the narrower ones along.
    installs = [install(need) for need in missing if need in EXTRAS]
    why = _against(name, packages["torch_npu"]["version"], ascend)
    return {
        "ok": not missing and not why,
        "missing": missing,
        "install": installs[-1] if installs else None,
        "why": why,
    }


def _against(name: str, torch_npu: str | None, ascend: dict[str, Any]) -> str:
    """The reason against running on this machine's NPU although all is there; "" for nothing, or another ability."""
    if "npu" not in NEEDS[name]:
        return ""
    if "torch_npu" in NEEDS[name] and (files := ascend["npu_device_files"]) and not ascend["npus"]:
        return f"torch_npu finds none of the {files} NPUs: look at npu-smi info, and at {environment.VISIBLE}"
    chips = [problem for chip in ascend["chips"] if (problem := unsupported(chip))]
    cann = ascend["cann_version"] if ascend["cann"] else None
    return chips[0] if chips else npu_problem(torch_npu, cann) if "torch_npu" in NEEDS[name] else acl_problem(cann)


def _next_steps(packages: dict[str, Any], ascend: dict[str, Any], can: dict[str, Any]) -> list[str]:
    steps = []
    if not packages["torch"]["version"]:
        steps.append(f"to build bundles without an NVIDIA GPU, first: {CPU_TORCH}")
    for name in ("run bundles", "build bundles"):
        if can[name]["install"]:
            steps.append(f"to {name}: {can[name]['install']}")
    steps += _npu_steps(packages, ascend)
    if can["build bundles"]["ok"]:
        steps.append("see it work: draftwood demo")
    return steps


def _npu_steps(packages: dict[str, Any], ascend: dict[str, Any]) -> list[str]:
    torch, torch_npu = packages["torch"]["version"], packages["torch_npu"]["version"]
    steps = []
    if torch_npu and not ascend["cann"]:
        steps.append(
            "torch_npu is installed without CANN; Draftwood works, but for torch in other programs:"
            f" export {environment.AUTOLOAD}=0"
        )
    if torch and torch_npu and torch.split("+")[0] != ".".join(torch_npu.split(".")[:3]):
        steps.append(f"torch {torch} and torch_npu {torch_npu} do not fit: {install('torch_npu')}")
    if ascend["cann_lacks"]:
        steps.append(
            f"CANN does not load, because {ascend['cann_lacks']} is not found: source its set_env.sh; libascend_hal.so"
            " is the driver's, so a container needs the machine's /usr/local/Ascend/driver"
        )
    elif not ascend["cann"] and ascend["set_env"]:
        steps.append(f"CANN is installed but not on the library path: source {ascend['set_env']}")
    elif not ascend["cann"] and os.environ.get("ASCEND_HOME_PATH"):
        steps.append("no CANN loads from where ASCEND_HOME_PATH points: source the set_env.sh of one that is whole")
    elif not ascend["cann"] and ascend["npu_device_files"]:
        steps.append("the machine has an NPU but no CANN: https://www.hiascend.com/cann")
    visible = os.environ.get(environment.VISIBLE)
    if visible is not None and ascend["torchair"] == "real" and torch and len(visible.split(",")) != ascend["npus"]:
        steps.append(
            f"{environment.VISIBLE}={visible}, and torch_npu finds {ascend['npus']}: CANN leaves out an id that is not"
            " below the number of NPUs here and all after it, and finds none if they do not ascend"
        )
    if ascend["npus"]:
        steps.append("this machine has an NPU: draftwood doctor --npu tries it; docs/npu.md says what each step proves")
    return steps


def _intel_steps(packages: dict[str, Any], openvino: dict[str, str]) -> list[str]:
    """Intel's kernel driver makes a file of an NPU; OpenVINO needs a user-space driver besides."""
    if "NPU" in openvino:
        return ["this machine has an Intel NPU: draftwood check BUNDLE --engine openvino-npu"]
    if not any(Path("/dev/accel").glob("accel*")):
        return []
    if not packages["openvino"]["version"]:
        return [f"the machine may have an Intel NPU: {install('openvino')}"]
    return ["OpenVINO finds no NPU; if the machine has one: https://github.com/intel/linux-npu-driver/releases"]


def render(report: dict[str, Any]) -> str:
    """The report as text."""
    python, cpu, memory = report["python"], report["cpu"], report["memory"]
    lines = [f"draftwood {report['draftwood']}, Python {python['version']}, {python['platform']}", "", "packages"]
    for name, facts in report["packages"].items():
        lines.append(f"  {name:<17} {facts['version'] or 'not installed: ' + facts['install']}")
    sizes = [f"{memory[key] / 2**30:.1f} GiB" if memory[key] else "unknown" for key in memory]
    lines += ["", "machine"]
    lines.append(f"  cpu           {cpu['model']}, {cpu['threads']} threads usable")
    lines.append(f"  features      {' '.join(cpu['features']) or 'none known'}")
    lines.append(f"  memory        {sizes[0]}, {sizes[1]} available")
    lines.append(f"  onnxruntime   {', '.join(report['onnxruntime_providers']) or 'absent'}")
    devices = [f"{name} ({full})" for name, full in report["openvino_devices"].items()]
    lines.append(f"  OpenVINO      {', '.join(devices) or 'absent'}")
    lines.append(f"  HTP           {report['htp'] or 'absent'}")
    lines += [*_ascend_lines(report["ascend"]), "", "this machine can"]
    lines += [f"  {name:<20} {_answer(facts)}" for name, facts in report["can"].items()]
    lines += ["", "next steps", *(f"  - {step}" for step in report["next_steps"])]
    lines += ["", "graphs for an NPU need at least"]
    lines += [f"  CANN {need['cann']:<8} {need['feature']}" for need in report["npu_needs"]]
    return "\n".join(lines)


def _ascend_lines(ascend: dict[str, Any]) -> list[str]:
    torchair = {"real": "real", "offline": "offline: the stand-in can be used", None: "absent"}
    return [
        f"  CANN          {_cann(ascend)}",
        f"  torchair      {torchair[ascend['torchair']]}",
        f"  NPUs          {ascend['npus']} {' '.join(ascend['chips'])}".rstrip(),
    ]


def _cann(ascend: dict[str, Any]) -> str:
    if not ascend["cann"]:
        return "not found"
    return f"{ascend['cann_version'] or 'of unknown release'} {ascend['cann_folder'] or ''}".rstrip()


def _answer(facts: dict[str, Any]) -> str:
    if facts["ok"]:
        return "yes"
    if not facts["missing"]:
        return f"no   {facts['why']}"
    names = {"cann": "CANN", "npu": "an NPU"}
    how = f" ({facts['install']})" if facts["install"] else ""
    missing = "missing " + ", ".join(names.get(need, need) for need in facts["missing"]) + how
    return f"no   {missing}"
