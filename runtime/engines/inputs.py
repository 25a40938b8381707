"""The small inputs of static graphs: what the host writes there before a launch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftwood.contract import ACCEPTED, BRANCH, COMMITTED, NEXT_BRANCH, Lives, lives
from draftwood.manifest import GraphSignature, text_name
from draftwood.noise import keys_of
from draftwood.runtime.engines.sessions import allocate
from draftwood.runtime.speculation.deferred_cache import DeferredKvCache
from draftwood.runtime.speculation.kv_cache import Buffer
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.trees import TreeBuffers

# T rows of a graph

# No mass reaches it, so top-p is off.
_ALL_MASS = 2.0


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


def fill_tree(inputs: dict[str, NDArray], tokens_T: NDArray[np.int64], tree: TreeBuffers) -> None:
    """The tree's rows into a graph's inputs; a padded row repeats the root's token and place, and sees itself."""
    rows = tree.rows
    inputs["tokens"][:rows], inputs["tokens"][rows:] = tokens_T, tokens_T[0]
    inputs["depths"][:rows], inputs["depths"][rows:] = tree.depths, 0
    visible = inputs["visible"]
    visible[:] = np.eye(len(visible), dtype=np.bool_)
    visible[:rows, :rows] = tree.mask


def fill_settings(inputs: dict[str, NDArray], sampling: Sampling, position: int, vocabulary: int) -> None:
    """Fills how a graph draws from ``position`` on, if it draws with noise: ``keys``, ``temperature``, ``top_k`` and
    ``top_p``."""
    keys = inputs.get("keys")
    if keys is None:
        return
    for part, numbers in zip(keys, keys_of(sampling.seed, range(position, position + keys.shape[-1])), strict=True):
        part[:] = numbers[..., 0]
    inputs["temperature"][0] = sampling.temperature
    inputs["top_k"][0] = sampling.top_k if 0 < sampling.top_k < vocabulary else vocabulary
    inputs["top_p"][0] = sampling.top_p if sampling.top_p < 1 else _ALL_MASS
