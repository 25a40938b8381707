"""``draftwood inspect``: a draft tree, a bundle or a checkpoint, as text and as JSON."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwood.errors import RequestError
from draftwood.files import json_text

if TYPE_CHECKING:
    from draftwood.manifest import GraphSet, GraphSignature
    from draftwood.runtime.bundle import Bundle
    from draftwood.trees import Topology


MANIFEST = "manifest.json"
DESCRIBED = (MANIFEST, "config.json")
TENSOR_FILES = (".safetensors", ".pt", ".pth", ".bin", ".gguf")
# The columns of a graph: texts of a launch, rows of each.
GRAPH = ("name", "kind", "texts", "rows", "slots", "bytes")
# How names of models and shapes begin.
NAMED = ("demo", "shape:")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "subject",
        metavar="TREE|BUNDLE|CHECKPOINT",
        help="a tree file, a tree such as full:3x2 or medusa:FILE, a bundle's folder, or a teacher's or a drafter's as"
        " build takes it",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="the teacher of a drafter, to say whether they fit")
    parser.add_argument("--npu", action="store_true", help="a bundle's NPU graphs: operators, proofs, findings")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def main(args: argparse.Namespace) -> int:
    path = _checkpoint(args.subject)
    if path is not None:
        return _show_checkpoint(path, args)
    path = _existing(args.subject)
    if args.model:
        raise RequestError(f"{args.model}: goes with a drafter's checkpoint, which {args.subject} is not")
    if path is not None and path.is_dir():
        from draftwood.runtime.bundle import Bundle

        bundle = Bundle.open(path)
        if args.npu:
            from draftwood.tools.show.npu_graphs import npu_figures, npu_text

            figures, text = npu_figures(bundle), npu_text
        else:
            figures, text = bundle_figures(bundle), bundle_text
    elif args.npu:
        raise RequestError(f"{args.subject}: --npu shows the NPU graphs of a bundle; name one")
    else:
        name, topology = read_tree_or_spec(args.subject, path)
        figures, text = tree_figures(name, topology), tree_text
    print(json_text(figures, indent=2) if args.json else text(figures))
    return 0


def _checkpoint(subject: str) -> Path | None:
    """The teacher or drafter of a name or path that is neither a bundle nor a tree's file.

    Bundles and trees can be inspected without the compiler's packages, so nothing of it is imported for them.
    """
    path = _existing(subject)
    if path is None and subject.startswith(NAMED):
        from draftwood.tools.demo import resolve

        path = _existing(str(resolve(subject)))
    return path if path is not None and not (path / MANIFEST).is_file() and _is_checkpoint(path) else None


def _is_checkpoint(path: Path) -> bool:
    """Whether a path looks like one: a folder with a config.json or tensors, or a file of tensors."""
    if not path.is_dir():
        return path.suffix in TENSOR_FILES
    return (path / "config.json").is_file() or any(child.suffix in TENSOR_FILES for child in path.iterdir())


def _show_checkpoint(path: Path, args: argparse.Namespace) -> int:
    from draftwood.tools.demo import resolve
    from draftwood.tools.show.checkpoints import checkpoint_figures, checkpoint_text

    if args.npu:
        raise RequestError(f"--npu: {path} is a checkpoint, which holds no graphs; build it first")
    figures = checkpoint_figures(path, resolve(args.model) if args.model else None)
    print(json_text(figures, indent=2) if args.json else checkpoint_text(figures))
    return 0


def _existing(subject: str) -> Path | None:
    path = Path(subject)
    try:
        # A bundle and a checkpoint are also known by the file that describes them.
        return (path.parent if path.name in DESCRIBED else path) if path.exists() else None
    except OSError as error:
        raise RequestError(f"{subject}: cannot be opened: {error.strerror}") from error


def read_tree_or_spec(subject: str, path: Path | None) -> tuple[str, Topology]:
    """A tree and its name, from the file at `path` or else from a spec of the command line.

    Raises:
        RequestError: neither a file nor one spec.
        TreeError: a file or spec that is wrong.
    """
    from draftwood.trees import Topology, parse_specs, read_tree

    if path is not None:
        return path.stem, read_tree(path)
    if subject != "plain" and ":" not in subject:
        raise RequestError(
            f"{subject}: no such file or folder, nor a tree; expected a bundle, a tree file or a tree such as full:3x2"
        )
    trees = parse_specs(subject)
    if len(trees) > 2:  # plain decoding always comes first
        named = ", ".join(name for name, _ in trees[1:])
        raise RequestError(
            f"{subject}: names {len(trees) - 1} trees, {named}; expected one; those of a plan have pictures next to it"
        )
    name, tree = trees[-1]
    if not isinstance(tree, Topology):
        raise RequestError(f"{subject}: has no shape to show, because the drafter chooses one at every step")
    return name, tree


def tree_figures(name: str, topology: Topology) -> dict[str, Any]:
    """Sizes, rank paths, drawing and invariants of a tree, as plain values."""
    from draftwood.trees import draw_text, tensorize, violations

    broken = violations(tensorize(topology))
    by_depth = Counter(topology.depths)
    return {
        "kind": "tree",
        "name": name,
        "rows": topology.rows,
        "nodes": topology.nodes,
        "depth": topology.depth,
        "width": topology.width,
        "leaves": sum(not topology.children(row) for row in range(topology.rows)),
        "nodes_by_depth": [by_depth[depth] for depth in range(1, topology.depth + 1)],
        "rank_paths": [list(path) for path in topology.paths],
        "drawing": draw_text(topology),
        "invariants_hold": not broken,
        "violations": [f"{fault.name} at row {fault.row}: {fault.message}" for fault in broken],
    }


def tree_text(figures: dict[str, Any]) -> str:
    """`tree_figures` for people."""
    hold = "invariants    all hold" if figures["invariants_hold"] else "\n".join(figures["violations"])
    per_depth = " ".join(map(str, figures["nodes_by_depth"])) or "none"
    return "\n".join(
        [
            f"tree          {figures['name']}",
            f"nodes         {figures['nodes']} (root not counted), by depth: {per_depth}",
            f"leaves        {figures['leaves']}",
            hold,
            "",
            figures["drawing"],
        ]
    )


def bundle_figures(bundle: Bundle) -> dict[str, Any]:
    """The content of an opened, and so verified, bundle, as plain values."""
    import msgspec

    from draftwood.runtime.engines.choice import default_engine
    from draftwood.runtime.engines.registry import engines
    from draftwood.tools.show.gear_figures import gear_figures

    manifest = bundle.manifest
    # Through JSON's own types, so that tuples are lists and the answer is the one that a reader of the file sees.
    values = msgspec.to_builtins(manifest, builtin_types=())
    keep = ("schema_version", "dims", "drafter", "trees", "gears", "tokenizer", "provenance")
    cpu, npu = manifest.graph_set("onnx"), manifest.graph_set("ge")
    sizes = {name: file.bytes for name, file in manifest.files.items()}
    return {
        "kind": "bundle",
        "folder": str(bundle.folder),
        **{key: values[key] for key in keep},
        "teacher": values["teacher"],
        "engines": [name for name, kind in engines().items() if kind.runs(manifest)],
        "gear_figures": gear_figures(bundle, default_engine(bundle)),
        "graphs": [_graph(graph, sizes) for graph in manifest.graphs_of("onnx")],
        "weights": {"file": cpu.weights, "bytes": sizes[cpu.weights]} if cpu else None,
        "npu": _npu(manifest.rank_sets("ge"), sizes) if npu else None,
        "files_verified": len(sizes),
        "bytes": sum(sizes.values()),
        "invariants_hold": True,  # or the bundle had not opened
    }


def _npu(sets: Sequence[GraphSet], sizes: dict[str, int]) -> dict[str, Any]:
    """Facts that all ranks share, and the weights of each."""
    npu = sets[0]
    return {
        "ranks": npu.ranks,
        "dtype": npu.precision.weights,
        "soc": npu.soc,
        "graphs": [_graph(graph, sizes) for graph in npu.graphs],
        "weights": {"file": npu.weights, "bytes": sizes.get(npu.weights)},
        "rank_weights": [{"file": each.weights, "bytes": sizes.get(each.weights)} for each in sets],
    }


def _graph(graph: GraphSignature, sizes: dict[str, int]) -> dict[str, Any]:
    facts = {key: getattr(graph, key) for key in ("name", "kind", "rows", "slots", "file")}
    return {**facts, "texts": graph.batch, "bytes": sizes[graph.file]}


def bundle_text(figures: dict[str, Any]) -> str:
    """`bundle_figures` for people."""
    from draftwood.tools.show.gear_figures import gear_rows

    drafter = {key: value for key, value in (figures["drafter"] or {"kind": "none"}).items() if key != "config"}
    if "buffers" in drafter:
        drafter["buffers"] = _buffers(drafter["buffers"])
    tokenizer = "with" if figures["tokenizer"] else "without"
    layers = figures["teacher"]["config"].get("quantised", ())
    packed = figures["teacher"]["config"].get("packed", ())
    int8 = (figures["drafter"] or {}).get("config", {}).get("quantised", ())
    sections = {
        f"bundle {figures['folder']}, schema {figures['schema_version']}, {tokenizer} tokenizer": [
            ("files", f"{figures['files_verified']} verified, {figures['bytes'] / 1e6:.1f} MB"),
            *([("weights", _weights(figures["weights"]))] if figures["weights"] else []),
            ("engines", ", ".join(figures["engines"])),
        ],
        "teacher": [
            ("digest", figures["teacher"]["digest"]),
            *([("quantised", f"W8A8, {len(layers)} linear layers")] if layers else []),
            *([("packed", f"{len(packed)} linear layers")] if packed else []),
            *figures["dims"].items(),
        ],
        "drafter": [*drafter.items(), *([("quantised", f"W8A8, {len(int8)} linear layers")] if int8 else [])],
        "trees, all invariants hold": [
            ("name", "rows", "depth", "width"),
            *((tree["name"], tree["rows"], tree["depth"], tree["width"]) for tree in figures["trees"]),
        ],
        "gears: tokens a step, as expected; ms after half of the longest text": gear_rows(figures["gear_figures"]),
        "graphs, 0 = chosen at run time": [
            GRAPH,
            *(tuple(graph[key] for key in GRAPH) for graph in figures["graphs"]),
        ],
        **(_npu_section(figures["npu"]) if figures["npu"] else {}),
        "built with": list(figures["provenance"].items()),
    }
    return "\n\n".join("\n".join([title, *_columns(rows)]) for title, rows in sections.items())


def _buffers(buffers: Sequence[dict[str, Any]]) -> str:
    return ", ".join(f"{rows['name']} {rows['heads']} x {rows['width']}" for rows in buffers) or "none"


def _weights(weights: dict[str, Any]) -> str:
    return f"{weights['file']}, {weights['bytes'] / 1e6:.1f} MB" if weights["bytes"] else "not bound yet"


def _npu_section(npu: dict[str, Any]) -> dict[str, list[tuple[Any, ...]]]:
    ranks = f" of {npu['ranks']} ranks, each" if npu["ranks"] > 1 else ""
    title = f"NPU graphs{ranks}, {npu['dtype']} for {npu['soc']}, weights {_weights(npu['weights'])}; --npu tells more"
    return {title: [GRAPH, *(tuple(graph[key] for key in GRAPH) for graph in npu["graphs"])]}


def _columns(rows: list[tuple[Any, ...]]) -> list[str]:
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    cells = [[f"{cell!s:<{width}}" for cell, width in zip(row, widths, strict=True)] for row in rows]
    return ["  " + "  ".join(row).rstrip() for row in cells]
