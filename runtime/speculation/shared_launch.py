"""Inputs and outputs of a draft launch of several texts: each has its own, or the rows of all follow each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftwood.manifest import GraphSignature, text_name
from draftwood.runtime.speculation.kv_cache import Buffer

# Small inputs by name, in the host's memory, and buffers by name, where the graphs run.
Given = tuple[dict[str, NDArray], dict[str, Buffer]]


def together(graph: GraphSignature, of_texts: Sequence[Given]) -> Given:
    """Inputs and buffers of a launch from those of its texts; of caches those of each alone."""
    names = {spec.name for spec in graph.inputs}
    rows = {name: [each[name] for each, _ in of_texts] for name in of_texts[0][0] if name in names}
    inputs: dict[str, NDArray] = {name: np.concatenate(arrays) for name, arrays in rows.items()}
    buffers = dict[str, Buffer]()
    for text, pair in enumerate(of_texts):
        for all_of, each in zip((inputs, buffers), pair, strict=True):
            all_of |= {text_input: each[name] for name in each if (text_input := text_name(text, name)) in names}
    return inputs, buffers


def of_line(outputs: dict[str, NDArray], name: str, line: int, lines: int) -> NDArray:
    """One text's part of an output."""
    output = outputs.get(text_name(line, name))
    return np.split(outputs[name], lines)[line] if output is None else output
