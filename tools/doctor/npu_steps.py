"""Runs of the hour on a device after the probes, the most instructive first.

First they check what the graphs compute, on both engines. Then the same at the widths of a 7B model, in bf16 and W8A8.
Then runs that take longer or tell less. All models but the last are made on the spot.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Devices that a model is split over: the demo's has 9 query and 3 key/value heads.
RANKS = 3
# What is built of a model that is made here: name -> (model, drafter, tree, more of build's words).
BUNDLES = {
    "medusa": ("small", "medusa", "full:3x2x1", ""),
    "eagle3": ("small", "eagle3", "chain:3", "--one-launch"),
    "wide": ("wide", "eagle3", "chain:3", ""),
    "wide-w8a8": ("wide", "medusa", "full:3x2x1", "--precision w8a8"),
    "wide-8": ("wide-8", "medusa", "full:3x2x1", ""),
}
_DRAFTWOOD: tuple[str, ...] = (sys.executable, "-P", "-m", "draftwood.tools.cli")


@dataclass(frozen=True, slots=True)
class TrialCommand:
    """A command with its limit.

    ``report`` is the JSON file that it writes, None if it prints its JSON or has none. An earlier step makes ``needs``;
    without that file the command is left out.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    report: Path | None = None
    needs: Path | None = None


def steps(folder: Path, npus: int = 1, chip: str = "") -> list[TrialCommand]:
    """All steps; what they make lies in ``folder``, compiled for ``chip``."""
    commands = [*_built(folder, "medusa"), *_checked(folder, "medusa", "npu"), _atc(folder, "medusa", chip)]
    commands += _checked(folder, "medusa", "acl")
    commands += [*_built(folder, "eagle3"), *_checked(folder, "eagle3", "npu")]
    commands += [*_built(folder, "wide"), *_checked(folder, "wide", "npu"), _bench(folder, "wide", "npu")]
    commands += [
        *_built(folder, "wide-w8a8"),
        *_checked(folder, "wide-w8a8", "npu"),
        _bench(folder, "wide-w8a8", "npu"),
    ]
    commands += [_atc(folder, "wide", chip), *_checked(folder, "wide", "acl"), _bench(folder, "wide", "acl")]
    commands += [*_built(folder, "wide-8"), *_checked(folder, "wide-8", "npu")]
    commands += [*_checked(folder, "wide", "npu-captured"), _bench(folder, "wide", "npu-captured")]
    commands += [_bench(folder, name, "npu") for name in ("medusa", "eagle3")]
    return [*commands, *_profiled(folder), *_demo(folder, npus), *_msprof(folder)]


def _built(folder: Path, name: str) -> Iterator[TrialCommand]:
    model, drafter, tree, more = BUNDLES[name]
    teacher, bundles = folder / "models" / model, [bundle for bundle, parts in BUNDLES.items() if parts[0] == model]
    if name == bundles[0]:
        making = (sys.executable, "-P", "-m", "draftwood.tools.doctor.npu_models", model, str(teacher))
        yield TrialCommand(f"make {model}", making, 300)
    words = f"--tree {tree} --kv 1024 --target ge {more} --out".split()
    command = (*_DRAFTWOOD, "build", str(teacher), "--drafter", str(teacher / drafter), *words, str(folder / name))
    yield TrialCommand(f"build {name}", command, 900, needs=teacher)


def _checked(folder: Path, name: str, engine: str) -> Iterator[TrialCommand]:
    command = (*_DRAFTWOOD, "check", str(folder / name), "--engine", engine)
    yield TrialCommand(
        f"check {name} {engine}", command, 900, folder / name / f"check-{engine}.json", _made(folder, name, engine)
    )


def _bench(folder: Path, name: str, engine: str) -> TrialCommand:
    command = (*_DRAFTWOOD, "bench", str(folder / name), "--max-new-tokens", "32", "--json", "--engine", engine)
    return TrialCommand(f"bench {name} {engine}", command, 300, needs=_made(folder, name, engine))


def _made(folder: Path, name: str, engine: str) -> Path:
    """The bundle that an engine opens."""
    return folder / name / "npu" / "om" if engine == "acl" else folder / name


def _atc(folder: Path, name: str, chip: str) -> TrialCommand:
    # Without a chip's name for the usual one, whatever the session's own variable says.
    command = ("env", f"SOC_VERSION={chip}", "sh", str(folder / name / "npu" / "atc.sh"))
    return TrialCommand(f"atc {name}", command, 1200, needs=folder / name)


def _profiled(folder: Path) -> Iterator[TrialCommand]:
    # ``profile`` times a CPU's graphs alone, so ``tune`` takes the times that the model is held against.
    measured, model = (*_DRAFTWOOD, "tune", str(folder / "wide"), "--engine", "npu"), folder / "modelled.json"
    yield TrialCommand("tune wide", measured, 600, needs=folder / "wide")
    words = ["--device", "ascend-910b3", "--drafter", "medusa:3", "--kv", "1024", "--rows", "1,10", "--out"]
    modelled = (*_DRAFTWOOD, "profile", str(folder / "models" / "wide"), *words, str(model))
    yield TrialCommand("model wide", modelled, 120, model, folder / "models" / "wide")


def _demo(folder: Path, npus: int) -> Iterator[TrialCommand]:
    """SmolLM2, which is downloaded, and the same over several devices."""
    words = "build demo --tree lookup:chain:3 --kv 1024 --target ge --out"
    build = (*_DRAFTWOOD, *words.split())
    yield TrialCommand("build demo", (*build, str(folder / "demo")), 900)
    yield _bench(folder, "demo", "npu")
    if npus >= RANKS:
        split = folder / "split"
        yield TrialCommand("build split", (*build, str(split), "--ranks", str(RANKS)), 900)
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", "-m", "--")
        check = ("draftwood.tools.cli", "check", str(split), "--engine", "ranks")
        yield TrialCommand("check split", (sys.executable, *torchrun, *check), 900, split / "check-ranks.json", split)


def _msprof(folder: Path) -> Iterator[TrialCommand]:
    if shutil.which("msprof"):
        run = shlex.join([*_DRAFTWOOD, "run", str(folder / "wide"), "--engine", "acl", "--prompt", "The cat sat"])
        command = ("msprof", f"--output={folder / 'msprof'}", f"--application={run}")
        yield TrialCommand("msprof wide", command, 600, needs=_made(folder, "wide", "acl"))
