"""The bundles that are evaluated: a shipped pair of a size with planned trees or given ones, built once and kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

import draftwood
from draftwood.compiler.bundle.request import SLOT_MULTIPLE
from draftwood.compiler.teachers.kept import Precision
from draftwood.runtime.bundle import Bundle
from draftwood.tools import demo
from draftwood.tools.demo import counted
from draftwood.tools.demo.sizes import bundle_name, models
from draftwood.tools.lab.four_bits import in_four_bits
from draftwood.trees import Topology, tensorize
from draftwood.trees.plan_file import Limits
from draftwood.trees.spec import LONG_ROWS, LOOKUPS, MAX_ROWS, Budget, Specs

NODES = 15
# Of a teacher in four or eight bits, whose step takes longer for every row: 4 rows 1.7 times a plain step, 16 rows 2.8
# times in eight bits and 4.5 in four (500 M, two cores with VNNI).
FEW_NODES = 5
LEAST_SLOTS = 1024
PREFILL_ROWS = (128,)  # the CPU's engine prefills with the step of any size
# Candidates of a level that a shared bundle ranks are a multiple of this.
WIDTH_MULTIPLE = 16

Trees = tuple[tuple[str, Topology | Budget], ...]


def planned_specs(drafter: str, nodes: int, chains: bool = False, lookups: bool = False) -> tuple[str, Specs]:
    """A plan from the shipped counts for greedy and sampled text together: its file's text, and what a build takes.

    Beside plain decoding it has trees of ``nodes`` nodes at most, of half as many, and of half of that, or ``chains``.
    ``lookups`` adds the trees that are looked up in the text, as `draftwood make` does.
    """
    from draftwood.trees.plan_file import format_plan
    from draftwood.trees.spec import read_specs

    greedy, sampled = counted(drafter, sampled=False), counted(drafter, sampled=True)
    limits = Limits(nodes=nodes, children=1 if chains else None)
    text = format_plan(draftwood.plan(greedy, limits, sampled=sampled))
    with TemporaryDirectory(prefix="draftwood-plan-") as work:
        file = Path(work) / "plan.json"
        file.write_text(text)
        looked_up = [spec for rows, spec in LOOKUPS.items() if lookups and rows >= LONG_ROWS]
        return text, read_specs(",".join((f"plan:{file}", *looked_up)))


def planned_bundle(
    size: str,
    drafter: str,
    reach: int,
    work: Path,
    say: Callable[[str], None],
    texts: int = 1,
    precision: Precision | None = None,
) -> Path:
    """The pair with planned trees of up to `NODES` nodes, for texts of ``reach`` tokens, of which a launch takes
    ``texts``; built unless it is there.

    With a ``precision`` its teacher is the one in four bits, kept so, and planned trees have up to `FEW_NODES`. A
    bundle for one text then has trees that are looked up, too. One for several texts has chains alone, since trees
    that branch are decoded one text at a time there.
    """
    few, alone = precision is not None, texts == 1
    lookups = few and alone
    text, specs = planned_specs(drafter, FEW_NODES if few else NODES, chains=few and not alone, lookups=lookups)
    name = "-".join(["planned", *([f"b{texts}"] if texts > 1 else []), *([f"w4-{precision}"] if precision else [])])
    folder = work / bundle_name(name, size, drafter, (kv_lengths(reach), text, lookups))
    if not folder.exists():
        _build(size, drafter, reach, folder, say, trees=specs.trees, plan=specs.plan, texts=texts, precision=precision)
    return folder


def tree_bundle(size: str, drafter: str, reach: int, trees: Trees, work: Path, say: Callable[[str], None]) -> Path:
    """The pair with ``trees``, plain decoding first; of a drafter that ranks levels the largest one alone."""
    if not demo.follows_nodes(drafter):
        trees = (trees[0], largest(trees))
    folder = work / bundle_name("trees", size, drafter, (kv_lengths(reach), trees))
    if not folder.exists():
        _build(size, drafter, reach, folder, say, trees=distinct(trees))
    return folder


def largest(trees: Trees) -> tuple[str, Topology]:
    """A tree that has the depth and the ranks of any of ``trees``, and rows enough for all: sections whose trees reach
    equally far share one bundle."""
    depth, width = (max(getattr(tree, of) for _, tree in trees) for of in ("depth", "width"))
    width = -(-width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    ranked = [(0,) * level + (rank,) for level in range(depth) for rank in range(width)]
    more = [(above, rank) for above in range(1, width) for rank in range(width)] if depth > 1 else []
    return "largest", Topology.from_paths([*ranked, *more][: MAX_ROWS - 1])


def distinct(trees: Trees) -> Trees:
    """Each tree once, under its first name."""
    names: dict[Topology | Budget, str] = {}
    for name, tree in trees:
        names.setdefault(tree, name)
    return tuple((name, tree) for tree, name in names.items())


def windowed_bundle(size: str, drafter: str, reach: int, window: int, work: Path, say: Callable[[str], None]) -> Path:
    """The planned pair whose drafter's layers see the last ``window`` tokens alone, 0 for all; the teacher sees all."""
    trees = one_tree(drafter)
    folder = work / bundle_name(f"window{window}", size, drafter, (kv_lengths(reach), trees))
    if not folder.exists():
        own = models(size, work, drafter)[1]
        if window:
            sliding = {"sliding_window": window, "use_sliding_window": True, "layer_types": ["sliding_attention"]}
            own = with_fields(own, work / f"{own.name}-window{window}", **sliding)
        _build(size, drafter, reach, folder, say, trees=trees, own=own)
    return folder


def one_tree(drafter: str) -> Trees:
    """Plain decoding, and the tree of `NODES` nodes that counted paths call best."""
    return (("plain", Topology.plain()), ("tree", counted(drafter, sampled=False).rank_paths().best_tree(NODES)))


def with_trees(bundle: Bundle, trees: Trees) -> Bundle:
    """An opened bundle with more trees, without building them: one draft graph serves every tree of a drafter that
    ranks levels, and the CPU's step takes any size up to the largest tree that was built."""
    manifest = bundle.manifest
    like = next(gear for gear in manifest.gears if gear.draft)
    fixed = [(name, tree) for name, tree in trees if isinstance(tree, Topology) and name not in bundle.trees]
    assert all(tree.rows <= manifest.dims.branch_rows and tree.depth < manifest.dims.path_rows for _, tree in fixed)
    held = next(tree for tree in manifest.trees if tree.name == like.tree)
    new_trees = tuple(
        msgspec.structs.replace(held, name=name, rows=t.rows, depth=t.depth, width=t.width) for name, t in fixed
    )
    new_gears = tuple(msgspec.structs.replace(like, name=name, tree=name) for name, _ in fixed)
    found = msgspec.structs.replace(manifest, trees=manifest.trees + new_trees, gears=manifest.gears + new_gears)
    topologies = bundle.trees | {name: (tree, tensorize(tree)) for name, tree in fixed}
    return Bundle(bundle.folder, found, topologies, bundle.files, bundle.verified)


def kv_lengths(reach: int) -> tuple[int, ...]:
    """``LEAST_SLOTS``, and a length at which ``reach`` tokens and a tree fit: on a CPU a longer one costs nothing."""
    needed = -(-(reach + 2 * NODES + 2) // SLOT_MULTIPLE) * SLOT_MULTIPLE
    return (LEAST_SLOTS, needed) if needed > LEAST_SLOTS else (LEAST_SLOTS,)


def with_fields(model: Path, out: Path, **fields: object) -> Path:
    """The same weights under a configuration with other ``fields``."""
    out.mkdir(exist_ok=True)
    for path in model.iterdir():
        if path.name != "config.json":
            (out / path.name).unlink(missing_ok=True)  # it may lead to a checkout that is gone
            (out / path.name).symlink_to(path.resolve())
    config = json.loads((model / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | fields))
    return out


def _build(
    size: str,
    drafter: str,
    reach: int,
    folder: Path,
    say: Callable[[str], None],
    *,
    trees: Sequence[tuple[str, Topology | Budget]],
    plan: object = None,
    own: Path | None = None,
    texts: int = 1,
    precision: Precision | None = None,
) -> None:
    """Builds ``folder``; ``own`` takes the place of the shipped drafter."""
    say(f"building {folder.name}")
    slots = kv_lengths(reach)
    teacher, shipped = models(size, folder.parent, drafter)
    teacher = in_four_bits(teacher, folder.parent) if precision else teacher
    config = json.loads((teacher / "config.json").read_text())
    if config["max_position_embeddings"] < slots[-1]:  # more than the teacher was trained for
        longer = folder.parent / f"{teacher.name}-{slots[-1]}"
        teacher = with_fields(teacher, longer, max_position_embeddings=slots[-1])
    request = draftwood.BuildRequest(
        model=teacher,
        drafter=own or shipped,
        trees=tuple(trees),
        slots=slots,
        int8_drafter=demo.in_int8(drafter),
        prefill_rows=PREFILL_ROWS,
        plan=plan,  # type: ignore[arg-type]
        texts=texts,
        precision=precision or "exact",
    )
    draftwood.build(request, folder)
