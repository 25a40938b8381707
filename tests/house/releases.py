"""Which graphs other releases of torch and torch_npu make of the same models: byte for byte, or the node that differs.

    python -m draftwood.tests.house.releases PYTHON [PYTHON ...]

The Pythons are those of environments with torch, torch_npu and the extra device. Each lowers two small models with
every form of draft and acceptance; the others' graphs are compared with the first one's.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from draftwood.compiler.ge.graph import Graph
from draftwood.compiler.ge.sameness import fingerprints

ROOT = Path(__file__).resolve().parents[2]
MODEL = "-m draftwood.tools.doctor.npu_models small {folder}/small"
BUILDS = {
    "medusa": "--tree full:3x2x1",
    "eagle3": "--tree chain:3,budget:6x3x3",
}
BUILD = (
    "-m draftwood.tools.cli build {folder}/small --drafter {folder}/small/{drafter} {words} --kv 128"
    " --target ge --out {folder}/{number}-{drafter}"
)
RELEASES = "-c import importlib.metadata as m; print(m.version('torch').split('+')[0], m.version('torch_npu'))"


def compared(one: Path, other: Path) -> str:
    """ "equal", or the first node of ``one`` that ``other`` does not compute."""
    if one.read_bytes() == other.read_bytes():
        return "equal"
    graph, theirs = Graph.load(one), {*fingerprints(Graph.load(other)).values()}
    lost = next((graph.nodes[name] for name, print_ in fingerprints(graph).items() if print_ not in theirs), None)
    return "other bytes, the same nodes" if lost is None else f"parts at {lost.type} {lost.name}"


def table(columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    """Markdown; graphs that fare alike share a row."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, found in rows.items():
        alike.setdefault(tuple(found), []).append(name)
    lines = [f"| graphs | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    return "\n".join([*lines, *(f"| {', '.join(names)} | {' | '.join(found)} |" for found, names in alike.items())])


def main(arguments: Sequence[str] | None = None) -> None:
    """Compares the graphs of each of the Pythons; they are named on the command line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("pythons", nargs="+", metavar="PYTHON", help="of an environment with a torch of its own")
    pythons: list[str] = parser.parse_args(arguments).pythons
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "draftwood").symlink_to(ROOT)

        def run(python: str, words: str) -> str:
            code = words.split(" ", 1) if words.startswith("-c") else words.split()
            variables = {"PYTHONPATH": name, "PYTHONSAFEPATH": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
            return subprocess.check_output([python, *code], env=variables, text=True)

        run(pythons[0], MODEL.format(folder=folder))
        for number, python in enumerate(pythons):
            for drafter, words in BUILDS.items():
                run(python, BUILD.format(folder=folder, drafter=drafter, words=words, number=number))
        rows = {
            f"{drafter}: {path.stem}": [
                compared(path, folder / f"{number}-{drafter}" / "npu" / path.name) for number in range(1, len(pythons))
            ]
            for drafter in BUILDS
            for path in sorted((folder / f"0-{drafter}" / "npu").glob("*.air"))
        }
        releases = [run(python, RELEASES).strip() for python in pythons]
        print(f"compared with {releases[0]} (torch, torch_npu)\n")
        print(table(releases[1:], rows))


if __name__ == "__main__":
    main()
