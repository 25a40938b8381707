"""The small inputs of static graphs: what the host writes there before a launch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftwood.contract import ACCEPTED, BRANCH, COMMITTED, KEPT, MARGIN, NEXT_BRANCH, Lives, lives
from draftwood.manifest import GraphSignature, text_name
from draftwood.noise import numbers_of
from draftwood.runtime.engines.sessions import allocate
from draftwood.runtime.speculation.deferred_cache import DeferredKvCache
from draftwood.runtime.speculation.kv_cache import Buffer
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.trees import TreeBuffers, walk_tables

# T rows of a graph

# As a limit it decides, whatever the sums are: with noise, which reaches 27, they are below 64 e^27.
_ALWAYS = 1e30


def draws_of(sampling: Sampling) -> str:
    """Which of a bundle's graphs draw so."""
    return "greedy" if sampling.greedy else "sampled"


def host_inputs(graph: GraphSignature, *besides: Lives) -> dict[str, NDArray]:
    """Memory of the host for the inputs that it fills at every launch; also for those that live where ``besides``
    says."""
    there = lives(graph, "host", *besides)
    return {spec.name: allocate(spec) for spec in graph.inputs if spec.name in there}


def branches(graph: GraphSignature, kv: DeferredKvCache, text: int | str = "") -> dict[str, Buffer]:
    """Where a graph, or its part for a ``text``, reads the rows of the last tree, and writes its own."""
    ends = {BRANCH.name: kv.branch, NEXT_BRANCH.name: kv.next_branch()}
    has = {spec.name for spec in (*graph.inputs, *graph.outputs)}
    return {name: buffer for end, buffer in ends.items() if (name := text_name(text, end)) in has}


def fill_commit(inputs: dict[str, NDArray], kv: DeferredKvCache) -> None:
    """The commit of a step before its own rows: the text's length, and the rows of the branch that are moved."""
    moved = len(kv.moved)
    inputs[COMMITTED][0], inputs[ACCEPTED][0] = kv.length, moved
    # Slots past the moved rows repeat the last: any valid row will do, they are written to the spare slot.
    inputs["path"][:] = kv.moved[-1] if moved else 0
    inputs["path"][:moved] = kv.moved


def _fill_rows(inputs: dict[str, NDArray], tokens_T: NDArray[np.int64], tree: TreeBuffers) -> int:
    """The tree's rows into a graph's inputs; a padded row repeats the root's token and place. Gives their number."""
    rows = tree.rows
    inputs["tokens"][:rows], inputs["tokens"][rows:] = tokens_T, tokens_T[0]
    inputs["depths"][:rows], inputs["depths"][rows:] = tree.depths, 0
    return rows


def fill_walk(inputs: dict[str, NDArray], tokens_T: NDArray[np.int64], tree: TreeBuffers) -> None:
    """The tree into the inputs of acceptance."""
    rows = _fill_rows(inputs, tokens_T, tree)
    inputs["parents"][:rows], inputs["parents"][rows:] = tree.parents, 0
    inputs["demands"][:], inputs["start"][:], inputs["paths"][:] = walk_tables(tree, *inputs["paths"].shape)


def fill_tree(inputs: dict[str, NDArray], tokens_T: NDArray[np.int64], tree: TreeBuffers) -> None:
    """The tree into the inputs of verification; a padded row sees itself."""
    rows, visible = _fill_rows(inputs, tokens_T, tree), inputs["visible"]
    visible[:] = np.eye(len(visible), dtype=np.bool_)
    visible[:rows, :rows] = tree.mask


def fill_settings(inputs: dict[str, NDArray], sampling: Sampling, position: int, vocabulary: int) -> None:
    """Fills how a graph draws from ``position`` on, if it draws with noise: ``keys``, ``temperature``, ``free``,
    ``mass`` and ``limit``."""
    keys = inputs.get("keys")
    if keys is None:
        return
    keys[:] = numbers_of(sampling.seed, range(position, position + keys.shape[-1]))
    inputs["temperature"][0] = sampling.temperature
    ranks = sampling.top_k if 0 < sampling.top_k < vocabulary else vocabulary
    inputs["free"][0] = ranks == vocabulary and sampling.top_p >= 1
    _fill_kept(inputs["mass"], inputs["limit"], ranks, vocabulary, sampling.top_p)


def _fill_kept(
    mass: NDArray[np.float32], limit: NDArray[np.float32], ranks: int, vocabulary: int, top_p: float
) -> None:
    """Fills which of the 64 best tokens, in order, top-k and top-p may keep and certainly keep, float32 [2, 64] each.

    A token is kept if the mass before it is less than ``limit`` plus the sum of the 64 probabilities times ``mass``.
    top-p is a share of all mass, which is 1, or of that of the k best tokens. It is met by less than the margin, or
    more. The best token is always kept.
    """
    mass[:], limit[:] = 0, _ALWAYS
    shares = top_p + MARGIN, top_p - MARGIN
    if top_p < 1 and ranks == vocabulary:
        limit[0], limit[1] = shares
    elif top_p < 1 and ranks <= KEPT:
        limit[:], mass[0, :ranks], mass[1, :ranks] = 0, *shares
    # If the k best are more than those, all of them may be kept, and no row is sure.
    limit[:, ranks:], limit[:, 0] = -_ALWAYS, _ALWAYS
