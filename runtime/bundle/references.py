"""Whether a manifest holds together: what refers to what, and every size that follows from another.

An engine allocates by the manifest's sizes and binds that memory to graphs, so no size is taken on trust. Each must
equal one that a tree, a signature or another field gives. Signatures are compared with the graphs themselves when those
are opened (`sessions`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod

from draftwood.contract import (
    BRANCH,
    GIVES,
    NEXT_BRANCH,
    REPEATED,
    TAKES,
    Sizes,
    ends_of,
    names_of,
    pooled_signature,
    sized,
    texts_signature,
)
from draftwood.errors import BundleError
from draftwood.manifest import (
    BLOCK_SLOTS,
    MANIFEST_FILE,
    Gear,
    GraphSet,
    GraphSignature,
    Manifest,
    StepSignature,
    TensorSignature,
    TokenRows,
    Tree,
    of_rank,
    settled_name,
    whole_name,
)
from draftwood.trees.spec import grown_nodes

# Kinds that are always static; a draft is static if it has a KV length.
_STATIC = ("prefill", "decode", "verify", "accept", "whole", "texts", "accept-texts")
# Results of a draft. A graph has one of these forms.
_DRAFTS = ("heads", "drafted", "chosen")


def check_references(manifest: Manifest, where: str) -> None:
    """Raises BundleError for the first fault, beginning with ``where``."""
    for fault in faults(manifest):
        raise BundleError(f"{where}: {fault}; build the bundle again")


def faults(manifest: Manifest) -> Iterator[str]:
    """Everything that does not hold together, each as one line."""
    yield from _names(manifest)
    yield from _sets(manifest)
    yield from _listed(manifest)
    yield from _dims(manifest)
    yield from _kept(manifest)
    for lowered in manifest.graph_sets:
        for graph in lowered.graphs:
            # One that repeats another is held to that, below.
            apart = [] if graph.kind in REPEATED else [*_kind(graph, manifest), *_shapes(graph, manifest, lowered)]
            aliases = [*_aliases(graph), *apart]
            yield from (f"graph {graph.name}: {fault}" for fault in aliases)
    for graphs in graph_sets(manifest):
        for gear in manifest.gears:
            yield from (f"gear {gear.name}: {fault}" for fault in _gear(gear, graphs, manifest))
        for graph in graphs:
            yield from (f"graph {graph.name}: {fault}" for fault in _repeats(graph, graphs))
    plain = {gear.slots for gear in manifest.gears if gear.tree == "plain"}
    for slots in sorted({gear.slots for gear in manifest.gears} - plain):
        yield f"no gear decodes plainly at KV length {slots}; expected one at every length"


def graph_sets(manifest: Manifest) -> list[tuple[GraphSignature, ...]]:
    """The graphs of each target and rank; each set serves every gear by itself."""
    return [lowered.graphs for lowered in manifest.graph_sets if lowered.graphs]


def _names(manifest: Manifest) -> Iterator[str]:
    named = [("tree", [tree.name for tree in manifest.trees]), ("gear", [gear.name for gear in manifest.gears])]
    named += [("graph", [graph.name for graph in graphs]) for graphs in graph_sets(manifest)]
    for what, names in named:
        yield from (f"two {what}s are named {name!r}" for name in _twice(names))
    if not manifest.gears or not graph_sets(manifest):
        yield "has no gear or no graph; expected at least one of each"
    if not any(tree.name == "plain" and (tree.rows, tree.depth) == (1, 0) for tree in manifest.trees):
        yield "has no tree 'plain' of one row; every bundle decodes plainly, too"


def _listed(manifest: Manifest) -> Iterator[str]:
    """Every file that is referred to is one that the manifest vouches for."""
    files = [graph.file for graphs in graph_sets(manifest) for graph in graphs]
    files += [tree.file for tree in manifest.trees if tree.file]
    files += [lowered.index or lowered.weights for lowered in manifest.graph_sets]
    files += ["tokenizer/tokenizer.json"] if manifest.tokenizer else []
    yield from (
        f"refers to {name}, which it does not list among its files" for name in files if name not in manifest.files
    )
    if MANIFEST_FILE in manifest.files:
        yield f"lists {MANIFEST_FILE}, itself, among its files"


def _sets(manifest: Manifest) -> Iterator[str]:
    """Every target has its ranks once each, alike in number; every set has graphs."""
    yield from (
        f"two graph sets are of {name}" for name in _twice(f"{s.target}, rank {s.rank}" for s in manifest.graph_sets)
    )
    for lowered in manifest.graph_sets:
        if not lowered.graphs:
            yield f"graph set {lowered.target}, rank {lowered.rank}, has no graphs"
        if lowered.rank >= lowered.ranks:
            last = lowered.ranks - 1
            yield f"graph set {lowered.target}: rank {lowered.rank} of {lowered.ranks}; expected 0 to {last}"
        if lowered.target == "ge" and lowered.index is None:
            yield "graph set ge has no weight index; expected the file that says where each weight lies"
    ranks = {(lowered.target, lowered.ranks) for lowered in manifest.graph_sets}
    yield from (f"graph sets of {name} disagree about their number of ranks" for name in _twice(t for t, _ in ranks))
    for target in dict.fromkeys(lowered.target for lowered in manifest.graph_sets):
        sets = manifest.rank_sets(target)
        if len(sets) < sets[0].ranks:
            yield f"{len(sets)} graph sets of {target}; expected one for each of {sets[0].ranks} ranks"
        if any(lowered.graphs != sets[0].graphs or lowered.precision != sets[0].precision for lowered in sets):
            yield f"graph sets of {target} differ from rank to rank; expected the same graphs of all"


def _kept(manifest: Manifest) -> Iterator[str]:
    """The buffers of a sequence: some of the teacher, each named once."""
    buffers = [*manifest.teacher.buffers, *(manifest.drafter.buffers if manifest.drafter else ())]
    yield from (f"two buffers are named {name!r}" for name in _twice(rows.name for rows in buffers))
    if not manifest.teacher.buffers:
        yield "the teacher has no buffers; expected its caches"


def _dims(manifest: Manifest) -> Iterator[str]:
    dims, trees, teacher = manifest.dims, manifest.trees, manifest.teacher
    if (rows := max((tree.rows for tree in trees), default=1)) != dims.branch_rows:
        yield f"dims.branch_rows is {dims.branch_rows}; expected {rows}, the rows of the largest tree"
    if (depth := max((tree.depth for tree in trees), default=0)) + 1 != dims.path_rows:
        yield f"dims.path_rows is {dims.path_rows}; expected {depth + 1}, the deepest tree's depth and 1"
    if dims.context >= (slots := max((gear.slots for gear in manifest.gears), default=0)):
        yield f"dims.context is {dims.context}; expected less than {slots}, the largest KV length"
    if ids := [i for i in (*teacher.eos, teacher.bos or 0) if i >= dims.vocabulary]:
        yield f"token {ids[0]} begins or ends a text; expected ids below {dims.vocabulary}"
    yield from (f"tree {tree.name}: {fault}" for tree in trees for fault in _tree(tree))
    yield from manifest.planning.faults({tree.name: tree.depth for tree in trees}) if manifest.planning else ()


def _tree(tree: Tree) -> Iterator[str]:
    grown = grown_nodes(tree.depth, tree.width)
    if tree.file is None and not 0 < tree.rows - 1 <= grown:
        yield f"a budget of {tree.rows - 1} nodes; expected 1 to {grown}, which depth and width give"


def _aliases(graph: GraphSignature) -> Iterator[str]:
    ends = {what: {spec.name: spec for spec in specs} for what, specs in (("in", graph.inputs), ("out", graph.outputs))}
    names = [spec.name for spec in (*graph.inputs, *graph.outputs)]
    yield from (f"two of its inputs and outputs are named {name!r}" for name in _twice(names))
    yield from (f"two outputs are written into {name!r}" for name in _twice(graph.aliases.values()))
    for out, into in graph.aliases.items():
        source, other = ends["out"].get(out), ends["in"].get(into)
        if source is None or other is None:
            yield f"alias {out} -> {into}: expected an output and an input of the graph"
        elif (source.dtype, source.shape) != (other.dtype, other.shape):
            yield f"alias {out} -> {into}: {_shown(source)} into {_shown(other)}; expected the same of both"


def _repeats(graph: GraphSignature, graphs: tuple[GraphSignature, ...]) -> Iterator[str]:
    """A graph that steps or drafts for several texts takes and gives for each what some graph does for one."""
    if graph.kind in REPEATED:
        alone = (single for single in graphs if single.kind == REPEATED[graph.kind] and graph.batch > 1)
        forms = (form(single, graph.batch) for single in alone for form in _several(single))
        if graph not in (form.frozen_in(graph.file) for form in forms):
            yield f"serves {graph.batch} texts; expected 2 or more, and of each what a graph of one takes and gives"


def _several(single: GraphSignature) -> list[Callable[[StepSignature, int], StepSignature]]:
    """How the signature of several texts is made of that of one: static ones may have their rows together."""
    return [texts_signature, *([pooled_signature] if single.kind == "draft" and single.static else [])]


def _kind(graph: GraphSignature, manifest: Manifest) -> Iterator[str]:
    """The inputs and outputs that the graph's kind is called with."""
    small = [spec.name for spec in graph.inputs if spec.name not in graph.aliases.values()]
    if graph.kind == "bitwise":  # it reads a settled part of every cache that it writes
        settled = {settled_name(cache) for cache in graph.aliases.values()}
        small = [name for name in small if name not in settled]
    takes, gives = _forms(graph, {rows.name for rows in manifest.drafter.buffers} if manifest.drafter else set())
    if sorted(small) != sorted(takes):
        yield f"takes {sorted(small)} besides caches; expected {sorted(takes)} of kind {graph.kind}"
    if set(graph.results) not in [set(form) for form in gives]:
        yield f"gives {sorted(graph.results)} besides caches; expected {' or '.join(str(sorted(o)) for o in gives)}"
    if (graph.kind in ("texts", "accept-texts")) != (graph.batch > 1):
        yield f"serves {graph.batch} texts; expected 2 or more of graphs for several, else 1"
    if not graph.static and (graph.slots or graph.kind in _STATIC):
        yield f"has sizes that are chosen at run time; expected a static shape of kind {graph.kind}"
    if graph.static and graph.aliases and not graph.slots:
        yield "has caches of a fixed size, and no KV length; expected both or neither"


def _forms(graph: GraphSignature, of_drafter: set[str]) -> tuple[list[str], list[list[str]]]:
    """Inputs of a graph of this kind besides caches, and its outputs in every form that goes with these inputs."""
    has = {spec.name for spec in graph.inputs}
    reads = any(name in has for name in ("features", "features.in"))
    parts = {
        "draws": "keys" in has,
        "noise": "noise" in has,
        "drafts": reads,
        "features": reads if graph.kind != "whole" else any(spec.name == "features.out" for spec in graph.outputs),
        "cached": any(name in of_drafter for name in graph.caches),
    }
    there = {part for part, has_part in parts.items() if has_part}
    drafts = graph.kind == "draft" or (graph.kind == "whole" and reads)
    drafted = [{form} for form in _DRAFTS] if drafts else [set[str]()]
    takes, gives = TAKES[graph.kind], GIVES[graph.kind]
    return names_of(takes, there, graph.batch), [names_of(gives, there | form, graph.batch) for form in drafted]


def _shapes(graph: GraphSignature, manifest: Manifest, lowered: GraphSet) -> Iterator[str]:
    """Sizes and types by the contract of the graph's kind; of caches and branch a rank has its own heads."""
    if graph.kind in ("draft", "extend") and manifest.drafter is None:
        yield "drafts, but the manifest has no drafter"
        return
    buffers = of_rank(_buffers(graph, manifest), lowered.ranks)
    if graph.caches != [rows.name for rows in buffers]:
        yield f"has caches {graph.caches}; expected {[rows.name for rows in buffers]}"
    slots = BLOCK_SLOTS if graph.kind == "bitwise" else graph.slots or 1
    pooled = graph.batch if graph.kind == "texts" else 1
    caches = {rows.name: rows.elements(slots * pooled) for rows in buffers}
    caches |= {settled_name(name): size for name, size in caches.items()}
    branch = sum(rows.elements() for rows in of_rank(manifest.teacher.buffers, lowered.ranks)) or 1
    ends, sizes = ends_of(graph), _sizes(graph, manifest)
    for spec in (*graph.inputs, *graph.outputs):
        end = ends.get(spec.name)
        if end is None:
            cache = spec.name.removesuffix(".out")
            if cache in caches and _elements(spec) != caches[cache]:
                yield f"{_shown(spec)}; expected {caches[cache]} elements, run-time sizes aside"
        elif end.name in (BRANCH.name, NEXT_BRANCH.name):
            # An NPU pads that of a bundle without trees.
            rows = max(_elements(spec) // branch, manifest.dims.branch_rows)
            if _elements(spec) != rows * branch:
                yield f"{_shown(spec)}; expected {rows * branch} elements"
        elif not _fits(spec, sized(end, sizes)) or (end.dtype and spec.dtype != end.dtype):
            yield f"{_shown(spec)}; expected {f'{end.dtype} {list(sized(end, sizes))}'.lstrip()}"


def _fits(spec: TensorSignature, shape: Sequence[int | str]) -> bool:
    """Whether a tensor has these sizes; a letter stands for any."""
    pairs = zip(spec.shape, shape, strict=False)
    return len(spec.shape) == len(shape) and all(
        isinstance(expected, str) or actual == expected for actual, expected in pairs
    )


def _buffers(graph: GraphSignature, manifest: Manifest) -> tuple[TokenRows, ...]:
    """The caches that a graph has to have, the drafter's first."""
    if graph.kind in ("accept", "accept-texts"):
        return ()
    of_drafter = manifest.drafter.buffers if manifest.drafter else ()
    if graph.kind in ("draft", "extend"):
        return of_drafter
    drafts = graph.kind == "whole" and any(spec.name == "features.in" for spec in graph.inputs)
    return (*(of_drafter if drafts else ()), *manifest.teacher.buffers)


def _sizes(graph: GraphSignature, manifest: Manifest) -> Sizes:
    """The sizes of inputs and outputs that the manifest tells, by their letters in the contract."""
    dims, drafter, rows = manifest.dims, manifest.drafter, graph.rows
    sizes: dict[str, int] = {"W": drafter.features} if drafter else {}
    if drafter and "candidates" in graph.results:
        sizes |= {"D": drafter.levels, "K": drafter.candidates}
    if graph.kind in ("draft", "extend"):  # of a draft's tree see `_draft`
        return sizes | ({"N": rows} if rows else {})
    sizes |= {"V": dims.vocabulary, "P": dims.path_rows, "L": dims.path_rows * graph.batch}
    if graph.kind == "grouped" and (buffers := manifest.teacher.buffers):
        sizes |= {"E": 3 * buffers[0].heads, "Q": dims.heads}
    if graph.static:
        kept_rows = dims.path_rows if drafter and drafter.buffers else 1  # one without caches reads a path's last row
        sizes |= {"B": graph.batch, "T": rows, "M": rows - 1, "G": kept_rows}
        # Features of a prompt's rows may be those of any of them.
        sizes |= {"R": 1} if graph.kind == "prefill" else dict.fromkeys("RX", rows * graph.batch)
    return sizes


def _gear(gear: Gear, graphs: tuple[GraphSignature, ...], manifest: Manifest) -> Iterator[str]:
    named = {graph.name: graph for graph in graphs}
    tree = next((tree for tree in manifest.trees if tree.name == gear.tree), None)
    graph = named.get(gear.graph)
    if tree is None or graph is None:
        yield f"refers to tree {gear.tree!r} and graph {gear.graph!r}, which the manifest does not describe"
        return
    kind = "decode" if tree.rows == 1 else "verify"
    fits = graph.rows >= 1 if tree.rows == 1 else graph.rows == tree.rows
    if graph.kind != kind or graph.slots != gear.slots or not fits:
        yield (
            f"graph {graph.name} is of kind {graph.kind}, {graph.rows} rows and KV length {graph.slots}; expected"
            f" {kind}, {tree.rows} and {gear.slots}"
        )
    accepts = [accept for accept in graphs if accept.kind == "accept" and accept.rows == graph.rows]
    draws = sorted(any(spec.name == "keys" for spec in accept.inputs) for accept in accepts)
    if draws != [False, True] and any(each.kind == "accept" for each in graphs):
        yield f"expected two graphs that accept {graph.rows} rows, greedy and sampled, got {len(accepts)}"
    yield from _whole(gear, graph, graphs)
    if tree.rows + tree.depth + 1 >= gear.slots:
        yield f"a tree of {tree.rows} rows does not fit {gear.slots} slots"
    if (gear.draft is None) != (tree.rows == 1):
        yield f"draft is {gear.draft!r} next to a tree of {tree.rows} rows; expected a draft graph exactly for trees"
    elif gear.looks_up and tree.file is None:
        yield f"looks up tree {tree.name}; expected one of a fixed shape"
    elif gear.draft is not None and not gear.looks_up:
        yield from _drafts(gear, gear.draft, tree, named, manifest)


def _whole(gear: Gear, verify: GraphSignature, graphs: tuple[GraphSignature, ...]) -> Iterator[str]:
    """Graphs that do whole steps of a gear, if the set has such: greedy and sampled, with the sizes of its verify
    graph."""
    wholes = {whole.name: whole for whole in graphs if whole.kind == "whole"}
    for draws in ("greedy", "sampled") if wholes and not gear.looks_up else ():
        whole = wholes.get(whole_name(gear.name, draws))
        sampled = whole is not None and any(spec.name == "keys" for spec in whole.inputs)
        drafts = whole is not None and any(spec.name == "features.in" for spec in whole.inputs)
        if whole is None or (whole.rows, whole.slots) != (verify.rows, verify.slots):
            yield f"expected a graph {whole_name(gear.name, draws)} of {verify.rows} rows and KV length {verify.slots}"
        elif (sampled, drafts) != (draws == "sampled", gear.draft is not None):
            yield f"graph {whole.name} draws or drafts otherwise than its name and the gear say"


def _drafts(
    gear: Gear, name: str, tree: Tree, named: Mapping[str, GraphSignature], manifest: Manifest
) -> Iterator[str]:
    """The graphs that draft a gear's tree: a static one, and besides a step of any size one of any KV length."""
    drafting = [
        named[each] for each in (f"{name}-kv{gear.slots}", name) if each in named and named[each].kind == "draft"
    ]
    if not drafting:
        yield f"refers to draft graph {name!r}, which the manifest does not describe"
    elif not any(graph.static for graph in drafting):
        yield f"no static graph {name} of KV length {gear.slots}; expected one besides that of any size"
    elif drafting[-1].slots and any(graph.kind == "step" for graph in named.values()):
        yield f"no graph {name} of any size; expected one besides the step of any size"
    for graph in drafting:
        yield from _draft(graph, tree, manifest.drafter.levels if manifest.drafter else 0)


def _draft(draft: GraphSignature, tree: Tree, levels: int) -> Iterator[str]:
    """Whether a graph drafts this very tree; ``levels`` are the drafter's."""
    outputs = {spec.name: spec for spec in draft.outputs}
    noise = next((spec for spec in draft.inputs if spec.name == "noise"), None)
    if noise is not None and not _per_level(noise, tree, levels):
        yield f"graph {draft.name} takes {_shown(noise)}; expected a row for each of {tree.depth} to {levels} levels"
    if (tree.file is None) != ("parents" in outputs):
        yield f"graph {draft.name} gives {sorted(draft.results)}; expected a tree exactly where it has no file"
    rows, nodes = tree.rows, tree.rows - 1
    expected = {"drafted": (nodes,), "parents": (rows,), "depths": (rows,), "mask": (rows, rows)}
    expected |= {"paths": (rows, tree.depth + 1)} | ({"scores": (nodes,)} if "drafted" in outputs else {})
    expected = {name: shape for name, shape in expected.items() if name in outputs}
    for part, shape in expected.items():
        if prod(shape) != _elements(outputs[part]):
            yield f"graph {draft.name} gives {_shown(outputs[part])}; expected {list(shape)} for tree {tree.name}"
    candidates = outputs.get("candidates")
    if candidates is not None and (len(candidates.shape) < 2 or not _reaches(candidates, tree)):
        yield f"graph {draft.name} gives {_shown(candidates)}; expected {tree.depth} levels of {tree.width} or more"


def _per_level(noise: TensorSignature, tree: Tree, most: int) -> bool:
    rows, *width = noise.shape or (0,)
    return isinstance(rows, int) and tree.depth <= rows <= most and len(width) == 1 and isinstance(width[0], int)


def _reaches(candidates: TensorSignature, tree: Tree) -> bool:
    levels, width = candidates.shape[-2:]
    return isinstance(levels, int) and isinstance(width, int) and tree.depth <= levels and tree.width <= width


def _elements(spec: TensorSignature) -> int:
    return prod(size for size in spec.shape if isinstance(size, int))


def _twice(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _shown(spec: TensorSignature) -> str:
    return f"{spec.name} {spec.dtype} {list(spec.shape)}"
