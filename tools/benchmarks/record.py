"""A run's manifest: what was run, on what, with which versions; written before the first row."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from draftwood.errors import RequestError
from draftwood.files import read_text, write_whole
from draftwood.manifest import MANIFEST_FILE
from draftwood.runtime.tuned import machine_name
from draftwood.tools.benchmarks.suite import Suite
from draftwood.tools.machine import memory, processor
from draftwood.tools.made_from import MadeFrom, changed, made_from
from draftwood.tools.prompts import split_family
from draftwood.version import __version__

FILE = "manifest.json"
VERSION = 3
PACKAGES = (
    *("numpy", "onnxruntime", "tokenizers", "torch"),
    *("transformers", "onnxruntime-genai", "llama-cpp-python", "openvino-genai"),
)


def machine() -> dict[str, Any]:
    """This machine and its installed packages."""
    versions = {"draftwood": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "name": machine_name(),
        "system": platform.platform(),
        "processor": processor(),
        "memory_bytes": memory()["total_bytes"],
        "versions": versions,
    }


def begin(folder: Path, suite: Suite) -> None:
    """Writes the manifest of a run, or adds this machine and command to the one that goes on.

    Raises:
        RequestError: the folder holds a run of another suite or of files that have changed, whose rows would not fit.
    """
    command = {"command": shlex.join(["python", "-m", "draftwood.tools.benchmarks", *sys.argv[1:]]), "began": _now()}
    if not (folder / FILE).exists():
        fresh = {
            "version": VERSION,
            "suite": suite.builtins(),
            "from": measured_from(suite),
            "machines": [machine()],
            "commands": [command],
        }
        write_record(folder, fresh)
        return
    value = read_record(folder)
    recorded = value["suite"]
    for name, ask in suite.builtins()["sections"].items():
        if recorded["name"] != suite.name or recorded["sections"].setdefault(name, ask) != ask:
            raise RequestError(
                f"--out {folder}: holds a run that asked otherwise of {name!r}, suite {recorded['name']}; give its"
                " arguments again, or another --out"
            )
    settled = ("seed", "prompts", "bundles", "engine", "model", "checkpoint")
    fixed = {name: value for name, value in suite.builtins().items() if name in settled}
    if any((recorded.get(name) or None) != (value or None) for name, value in fixed.items()):
        raise RequestError(
            f"--out {folder}: holds a run of other prompts, bundles, another model, engine or seed; take another --out"
        )
    if reason := changed(value.get("from"), measured_from(suite)):
        raise RequestError(f"--out {folder}: holds rows of other files: {reason}; take another --out")
    here = machine()
    value["machines"] += [here] if here not in value["machines"] else []
    value["commands"].append(command)
    write_record(folder, value)


def measured_from(suite: Suite) -> MadeFrom:
    """The files that rows are measured from; a manifest stands for its bundle."""
    files = {f"--prompts {name}": Path(split_family(name)[1]) for name in suite.prompts}
    files |= {f"--bundle {name}": Path(folder) / MANIFEST_FILE for name, folder in suite.bundles.items()}
    return made_from(files | {"--model": Path(suite.checkpoint) if suite.checkpoint else None}, {})


def make_folder(folder: Path) -> None:
    """Makes a run's folder if it is not there; RequestError if there can be none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error


def write_record(folder: Path, value: dict[str, Any]) -> None:
    """Writes the manifest, whole; RequestError if the folder does not take it."""
    make_folder(folder)
    try:
        write_whole(folder / FILE, json.dumps(value, indent=1).encode() + b"\n")
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> RequestError:
    return RequestError(f"--out {folder}: {error.strerror}; choose another folder")


def read_record(folder: Path) -> dict[str, Any]:
    """The manifest of a run; RequestError if there is none or it is of another version."""
    path = folder / FILE
    try:
        value: dict[str, Any] = json.loads(read_text(path))
        if value["version"] != VERSION or not value["suite"]["sections"] or not value["machines"]:
            raise ValueError(f"version {value['version']}, expected {VERSION}")
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}; expected a folder of evaluate --out") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RequestError(f"{path}: not a manifest of an evaluation ({error})") from error
    return value


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
