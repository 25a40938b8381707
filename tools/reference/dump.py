"""One step on disk, with all that its repetition needs: safetensors for the tensors, JSON for the rest.

A dump is a folder. ``step.json`` says why it was written and holds the committed text, the tokens and the sizes;
``tensors.safetensors`` holds the tree's buffers as ``tree.NAME``, and under ``expected.`` and ``got.`` what the
reference and the engine under test had: their cache rows, [K, length + T, D] a side, and the step's outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from draftwood.compiler.bundle.staging import staged
from draftwood.errors import RequestError, TreeError
from draftwood.files import open_regular, read_regular
from draftwood.manifest import DAMAGED, cache_names
from draftwood.runtime.engines import StagedEngine
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.tools.comparison import single
from draftwood.tools.comparison.compare import host
from draftwood.tools.comparison.single import Rows
from draftwood.tools.reference.branch_cache import BranchCache
from draftwood.trees import TreeBuffers, require

# K key/value heads, D head dimension, T tree rows

FORMAT, VERSION = "draftwood.step", 1
STEP_FILE, TENSORS_FILE = "step.json", "tensors.safetensors"

Tensors = dict[str, NDArray[Any]]


class _Step(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: Literal["draftwood.step"]
    version: Literal[1]
    reason: Literal["invariant", "tokens"]
    message: str
    # SHA-256 of the teacher, as the bundle's manifest has it.
    teacher: str
    slots: int
    text: tuple[int, ...]
    tokens: tuple[int, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDump:
    """A verify step: ``tokens`` [T] in ``tree`` behind the committed ``text``.

    ``expected`` and ``got`` map names, caches by layer and then outputs, to what each side had; an engine that
    broke an invariant has no outputs.
    """

    reason: Literal["invariant", "tokens"]
    message: str
    teacher: str
    slots: int
    text: tuple[int, ...]
    tokens: NDArray[np.int64]
    tree: TreeBuffers
    expected: Tensors
    got: Tensors

    def write(self, folder: Path) -> Path:
        """Writes the folder, whole or not at all; under the next free name where it exists, which is returned.

        Raises:
            RequestError: it cannot be written.
        """
        names = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
        folder = next(path for path in chain((folder,), names) if not path.exists())
        step = _Step(
            format=FORMAT,
            version=VERSION,
            reason=self.reason,
            message=self.message,
            teacher=self.teacher,
            slots=self.slots,
            text=self.text,
            tokens=tuple(self.tokens.tolist()),
            positions=tuple((len(self.text) + self.tree.depths).tolist()),
        )
        tensors = {f"tree.{field.name}": getattr(self.tree, field.name) for field in fields(self.tree)}
        tensors |= {f"expected.{name}": value for name, value in self.expected.items()}
        tensors |= {f"got.{name}": value for name, value in self.got.items()}
        with staged(folder) as part:
            (part / STEP_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(step), indent=1) + b"\n")
            save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, part / TENSORS_FILE)
        return folder

    @classmethod
    def read(cls, folder: Path) -> StepDump:
        """Reads what ``write`` wrote.

        Raises:
            RequestError: not a dump, or one that is damaged.
        """
        try:
            step = msgspec.json.decode(read_regular(folder / STEP_FILE), type=_Step)
            open_regular(folder / TENSORS_FILE).close()  # the library would wait for a FIFO
            tensors = load_file(folder / TENSORS_FILE)
            tree = TreeBuffers(**{field.name: tensors[f"tree.{field.name}"] for field in fields(TreeBuffers)})
            require(tree, str(folder))
        except (OSError, KeyError, *DAMAGED, SafetensorError, TreeError) as error:
            raise RequestError(
                f"{folder}: not a step's dump ({error}); expected a folder written by draftwood.tools.reference"
            ) from error
        return cls(
            reason=step.reason,
            message=step.message,
            teacher=step.teacher,
            slots=step.slots,
            text=step.text,
            tokens=np.array(step.tokens, np.int64),
            tree=tree,
            expected=_under("expected.", tensors),
            got=_under("got.", tensors),
        )


def run_step(engine: StagedEngine, state: SequenceState, tokens_T: NDArray[np.int64], tree: TreeBuffers) -> Tensors:
    """Runs a step and gives its cache rows and outputs by name; the branch stays open."""
    output = single.verify(engine, state, tokens_T, tree)
    return observed(state, state.length + tree.rows, output)


def observed(state: SequenceState, rows: int, output: Rows | None = None) -> Tensors:
    """Copies of the first ``rows`` rows of every cache, key then value of each layer, and a step's outputs."""
    buffers = [host(buffer[:, :rows]).copy() for buffer in state.kv.buffers]
    found: Tensors = dict(zip(cache_names(len(buffers) // 2), buffers, strict=True))
    if output is not None:
        outputs = {name.rpartition("_")[0] or name: value.copy() for name, value in output._asdict().items()}
        found |= {name: outputs[name] for name in sorted(outputs, key=_order)}
    return found


def load_rows(engine: StagedEngine, slots: int, text: Sequence[int], rows: Tensors) -> SequenceState:
    """A new text of the engine with committed rows written into its cache from outside."""
    state = engine.begin(slots)
    given = _cache_rows(rows, len(text))
    if isinstance(state.kv, BranchCache):
        state.kv.load([torch.from_numpy(part) for part in given], text)
        return state
    for own, part in zip(state.kv.buffers, given, strict=True):
        own[:, : len(text)] = part if isinstance(own, np.ndarray) else torch.from_numpy(part)
    state.kv.extended(len(text))
    return state


def _cache_rows(rows: Tensors, length: int) -> list[NDArray[np.float32]]:
    names = [name for name in rows if "_cache." in name]
    ordered = sorted(names, key=cache_names(len(names) // 2).index)
    return [rows[name][:, :length].copy() for name in ordered]


def _under(prefix: str, tensors: Tensors) -> Tensors:
    """Tensors below a prefix, in the order of the computation: a safetensors file has one of its own."""
    found = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    caches = cache_names(sum("_cache." in name for name in found) // 2)
    outputs = sorted((name for name in found if name not in caches), key=_order)
    return {name: found[name] for name in (*caches, *outputs) if name in found}


def _order(output: str) -> int:
    """Features, then logits, then what is chosen by them."""
    return ("logits", "choice").index(output) + 1 if output in ("logits", "choice") else 0
