"""The contract of a bundle's graphs: what each kind takes and gives, of what size and type, and what of it persists.

Steps are built from it, bundles are checked against it, engines and drafting read it. The caches, which follow all
other inputs and outputs, are declared by the teacher and the drafter (`draftwood.manifest`).

A size is a number or a letter. A letter is replaced if the step has a number for it, else it is chosen at run time:

* of all steps: T rows, R rows with logits, X rows with features, V vocabulary, W width of the features, P places of a
  path, L levels of the draws, B sequences
* of drafts: N rows that the drafter has not seen, G rows of features that are kept, D levels, U its vocabulary, K
  candidates a level, M nodes, H width and Q rows of its states
* of steps of any size: A rows in attention, S seen slots; in grouped ones E heads of such a row, Q query heads
* of bitwise steps: I rows written, F settled blocks, O open slots, Z blocks of open tokens and Y = 1 + Z
* J the sizes of a branch
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from typing import Literal, NamedTuple

from draftwood.manifest import GraphKind, StepSignature, TensorSignature, text_name
from draftwood.noise import ROUNDS

# In the type in which the graph computes.
NUMBER = ""
# Its place between two launches. "host": the host fills or reads it at every launch. "device": it stays there for the
# step's next launch. "either": one of both. "sequence": it stays on the device as long as the sequence.
Lives = Literal["host", "device", "either", "sequence"]
Sizes = Mapping[str, int | str | tuple[int, ...]]

# Tokens of a row that a graph ranks for top-k and top-p.
KEPT = 64
# How far ahead a winner must be for a graph to be sure of it, in units of the noise. Also how near a kept mass may come
# to top-p. fp32 is off by some 1e-5 here; a device's logarithm may be a hundred times worse. A draw is this near with
# about this probability.
MARGIN = 2.0**-10

# The length of the text after the step's commit; how many rows of the path are valid; how many waiting rows of a
# drafter are valid.
COMMITTED, ACCEPTED, WAITING = "committed", "accepted", "waiting"


class End(NamedTuple):
    """An input or output. ``part`` names an option of a graph that brings it. ``each``: in a graph of several
    sequences, every sequence has its own."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    lives: Lives = "host"
    part: str = ""
    each: bool = False


# The rows of the last tree that a step moves into place before it writes its own.
BRANCH, NEXT_BRANCH = (End(name, NUMBER, ("J",), "sequence", each=True) for name in ("branch", "branch.out"))
COMMIT = (
    End(COMMITTED, "int64", (1,)),
    End(ACCEPTED, "int64", (1,)),
    End("path", "int64", ("P",), each=True),
    BRANCH,
)
_ROWS = (End("tokens", "int64", ("T",)), End("depths", "int64", ("T",)), End("visible", "bool", ("T", "T")))
# What a step of the teacher gives.
LOGITS, CHOICE, FEATURES = RESULTS = (
    End("logits", NUMBER, ("R", "V"), "device"),
    End("choice", "int64", ("R",)),
    End("features", NUMBER, ("X", "W"), "device"),
)
# How rows are drawn, if not the likeliest.
DRAWS = (
    End("keys", "int32", (2, ROUNDS, "L"), part="draws"),
    End("temperature", "float32", (1,), part="draws"),
    End("free", "bool", (1,), part="draws"),
    End("mass", "float32", (2, KEPT), part="draws"),
    End("limit", "float32", (2, KEPT), part="draws"),
)
_DRAWN = (
    End("drawn", "int64", ("T",)),
    End("sure", "bool", ("T",)),
    End("path", "int64", ("P",)),
    End("length", "int64", (1,)),
)
# Features of the path's rows, or of its last one, which the next draft reads.
_PATH_FEATURES = End("features.out", NUMBER, ("G", "W"), "either", part="features", each=True)
# Rows that a drafter has not seen. One without caches reads the features of the last row alone.
_UNSEEN = (
    End("tokens", "int64", ("N",), part="cached"),
    End("features", NUMBER, ("N", "W"), "either"),
    End(COMMITTED, "int64", (1,), part="cached"),
    End(ACCEPTED, "int64", (1,), part="cached"),
)
# The outputs of a draft: ranked candidates of every level (Medusa's heads in their own type), a tree's tokens, or a
# chosen tree and its tokens.
_RANKED, _TREE = "ranked heads", "drafted chosen"
_DRAFT = (
    End("candidates", "int64", ("D", "K"), part=_RANKED),
    End("scores", "float32", ("D", "K"), part="ranked"),
    End("scores", NUMBER, ("D", "K"), part="heads"),
    End("drafted", "int64", ("M",), part=_TREE),
    End("parents", "int64", ("T",), part="chosen"),
    End("depths", "int64", ("T",), part="chosen"),
    End("mask", "bool", ("T", "T"), part="chosen"),
    End("paths", "int64", ("T", "P"), part="chosen"),
    End("scores", "float32", ("M",), part=_TREE),
)
# The draft's outputs that the host needs after a whole step; the rest of a tree follows from its parents.
TOLD = {"candidates", "drafted", "parents", "scores"}
# `draftwood.trees.acceptance.WalkTables`.
_OF_TREE = (
    *_ROWS[:2],
    End("parents", "int64", ("T",)),
    End("demands", "float32", ("T", "T")),
    End("start", "float32", ("T",)),
    End("paths", "int64", ("T", "P")),
)
# In a whole step two parts would have an input of one name, and the path is input and output.
RENAMED = {"features": "features.in", ACCEPTED: WAITING}
_ACCEPT = (LOGITS, *_OF_TREE, FEATURES._replace(part="features"), *DRAWS)


def _stacked(end: End) -> End:
    """Sizes for several sequences, stacked along a first axis B. Ends that each has of its own, and those that lie on
    the device as rows of all, stay as they are."""
    if end.each or end.lives == "device" or end.name == "keys":
        return end
    return end._replace(shape=("B",) if end.shape == (1,) else ("B", *end.shape))


_VERIFY, _VERIFIED = (*_ROWS, *COMMIT), (*RESULTS, NEXT_BRANCH)
_ANY_SIZE = (
    End("rows", "int64", ("R",)),
    End("tokens", "int64", ("T",)),
    End("queries", "int64", (1, "A")),
    End("results", "int64", ("T", 2)),
    End("positions", "int64", (1, "A")),
    End("bias", NUMBER, (1, 1, "A", "S")),
    End("last", "int32", (1,)),
    End("total", "int32", ()),
)
# Of `draftwood.kernels.rows_attention` with heads as rows.
_GROUPED = {"queries": (1, "A", "E", 2), "results": ("T", "Q", 3)}
TAKES: dict[GraphKind, tuple[End, ...]] = {
    "step": _ANY_SIZE,
    "grouped": tuple(end._replace(shape=_GROUPED.get(end.name, end.shape)) for end in _ANY_SIZE),
    "bitwise": (
        End("tokens", "int64", ("T",)),
        End("positions", "int64", ("T",)),
        End("rows", "int64", ("R",)),
        End("index", "int64", ("I", 3)),
        End("bias", NUMBER, ("T", "O")),
        End("home", NUMBER, ("Z", 1, 1, "T", "O")),
        End("weight", NUMBER, (1, "F")),
        End("chain", NUMBER, (1, "Y")),
        End("nothing", NUMBER, (1,)),
    ),
    "prefill": (End("tokens", "int64", ("T",)), End("last", "int64", (1,)), *COMMIT),
    "decode": _VERIFY,
    "verify": _VERIFY,
    "texts": tuple(map(_stacked, _VERIFY)),
    "accept": _ACCEPT,
    "accept-texts": tuple(map(_stacked, _ACCEPT)),
    "extend": _UNSEEN,
    "draft": (*_UNSEEN, End("noise", NUMBER, ("D", "U"), "either", part="noise")),
    "whole": (
        End("root", "int64", (1,)),
        End("tokens", "int64", ("P",), part="cached"),
        End("features.in", NUMBER, ("G", "W"), "either", part="drafts"),
        End(WAITING, "int64", (1,), part="cached"),
        *COMMIT,
        *DRAWS,
    ),
}
GIVES: dict[GraphKind, tuple[End, ...]] = {
    **dict.fromkeys(("step", "grouped", "bitwise", "prefill"), RESULTS),
    **dict.fromkeys(("decode", "verify", "texts"), _VERIFIED),
    "accept": (*_DRAWN, _PATH_FEATURES),
    "accept-texts": (*map(_stacked, _DRAWN), _PATH_FEATURES),
    "extend": (End("hidden", NUMBER, ("Q", "H")),),
    "draft": _DRAFT,
    "whole": (
        *(end for end in _DRAFT if end.name in TOLD),
        *(end._replace(name="path.out") if end.name == "path" else end for end in _DRAWN),
        _PATH_FEATURES,
        LOGITS,
        FEATURES._replace(part="features"),
        NEXT_BRANCH,
    ),
}
# Kinds of several sequences that have for each what the graph of one has; the step's results are of all rows together.
REPEATED: dict[GraphKind, GraphKind] = {"batch": "grouped", "draft-texts": "draft"}


def names_of(ends: Iterable[End], parts: Collection[str] = (), texts: int = 1) -> list[str]:
    """Names of what a graph with these parts has, in call order."""
    return [name for end in ends if _of(end, parts) for name in _names(end, texts)]


def tensors(
    ends: Iterable[End], sizes: Sizes, dtype: str, parts: Collection[str] = (), texts: int = 1
) -> list[TensorSignature]:
    """Signatures of what a step with these parts has, in call order; numbers are kept in ``dtype``."""
    return [
        TensorSignature(name=name, dtype=end.dtype or dtype, shape=sized(end, sizes))  # type: ignore[arg-type]
        for end in ends
        if _of(end, parts)
        for name in _names(end, texts)
    ]


def sized(end: End, sizes: Sizes) -> tuple[int | str, ...]:
    """The shape of an input or output, its letters replaced by the sizes that are known."""
    shape: list[int | str] = []
    for size in end.shape:
        known = sizes.get(size, size) if isinstance(size, str) else size
        shape += known if isinstance(known, tuple) else [known]
    return tuple(shape)


def ends_of(graph: StepSignature) -> dict[str, End]:
    """The contract of what a graph of its kind may take and give besides caches, by name."""
    kind = REPEATED.get(graph.kind, graph.kind)
    drafted = {"heads"} if any(spec.name.endswith("candidates") for spec in graph.outputs) else {"drafted", "chosen"}
    ends = [end for end in (*TAKES[kind], *GIVES[kind]) if end not in _DRAFT or _of(end, drafted)]
    if kind != graph.kind:
        ends += [end._replace(each=True) for end in ends]
    return {name: end for end in ends for name in _names(end, graph.batch)}


def lives(graph: StepSignature, *where: Lives) -> set[str]:
    """Names of a graph's inputs and outputs, besides caches, that are there between two launches."""
    return {name for name, end in ends_of(graph).items() if end.lives in where}


def _of(end: End, parts: Collection[str]) -> bool:
    return not end.part or any(part in parts for part in end.part.split())


def _names(end: End, texts: int) -> list[str]:
    return [text_name(text, end.name) for text in range(texts)] if end.each and texts > 1 else [end.name]


def texts_signature(single: StepSignature, texts: int) -> StepSignature:
    """The signature for so many texts at once, made from that for one. Every text has its own inputs and outputs, and
    the caches of all come last. Logits, choices and features of a step are those of all rows together."""
    every = [str(text) for text in range(texts)]
    together = [spec for spec in single.outputs if single.kind == "grouped" and spec.name in names_of(RESULTS)]

    def of_all(specs: Iterable[TensorSignature], caches: Container[str]) -> list[TensorSignature]:
        each = [spec for spec in specs if spec not in together]
        small, last = ([spec for spec in each if (spec.name in caches) is cached] for cached in (False, True))
        return [_of_text(spec, text) for part in (small, last) for text in every for spec in part]

    return StepSignature(
        name=f"{single.name}-b{texts}",
        kind="batch" if single.kind == "grouped" else "draft-texts",
        rows=single.rows,
        slots=single.slots,
        inputs=tuple(of_all(single.inputs, single.aliases.values())),
        outputs=(*together, *of_all(single.outputs, single.aliases)),
        aliases={text_name(text, out): text_name(text, into) for text in every for out, into in single.aliases.items()},
        batch=texts,
    )


def pooled_signature(single: StepSignature, texts: int) -> StepSignature:
    """The static form of `texts_signature`: rows of all texts follow each other in inputs, outputs and caches. A tensor
    that may stay on the device is not joined: each text has its own."""
    apart = lives(single, "either")

    def of_all(specs: Iterable[TensorSignature]) -> Iterable[TensorSignature]:
        for spec in specs:
            if spec.name in apart:
                yield from (_of_text(spec, str(text)) for text in range(texts))
            else:
                rows, *rest = spec.shape or (1,)
                assert isinstance(rows, int), "sizes of static graphs are numbers"
                yield TensorSignature(name=spec.name, dtype=spec.dtype, shape=(texts * rows, *rest))

    return StepSignature(
        name=f"{single.name}-b{texts}",
        kind="draft-texts",
        rows=single.rows,
        slots=single.slots,
        inputs=tuple(of_all(single.inputs)),
        outputs=tuple(of_all(single.outputs)),
        aliases=single.aliases,
        batch=texts,
    )


def _of_text(spec: TensorSignature, text: str) -> TensorSignature:
    """With a size of its own for every size that is chosen at run time."""
    shape = tuple(f"{size}{text}" if isinstance(size, str) else size for size in spec.shape)
    return TensorSignature(name=text_name(text, spec.name), dtype=spec.dtype, shape=shape)
