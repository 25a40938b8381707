"""The whole step in one graph: commit of the last path, extension of the drafter's caches, draft, verify, accept.

It is made of the modules of those steps, with their own signatures. It only adds how one's outputs become another's
inputs. It makes the draft's noise itself, of the keys that acceptance draws with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftwood.compiler.steps.accept import Draws
from draftwood.compiler.steps.noise import level_noise
from draftwood.compiler.steps.step import DTYPES, Step, tensor
from draftwood.compiler.steps.tree_rows import TreeRows
from draftwood.contract import COMMIT, COMMITTED, DRAWS, LOGITS, NEXT_BRANCH, RENAMED, TOLD, names_of, tensors
from draftwood.manifest import StepSignature, TensorSignature, whole_name

# T rows, P places of a path, D levels, U draft vocabulary, V vocabulary


class WholeParts(NamedTuple):
    """The steps that a whole step is made of; nothing drafts for plain decoding. ``rows`` is of `tree_rows`."""

    draft: Step | None
    rows: nn.Module
    verify: Step
    accept: Step


class WholeStep(nn.Module):
    """Takes the inputs of its signature, and gives its outputs. ``noise`` is the draft's, of its shape; zeros for
    greedy text."""

    def __init__(self, parts: WholeParts, signature: StepSignature, vocabulary: int) -> None:
        super().__init__()
        self.parts, self.signature, self.vocabulary = parts, signature, vocabulary
        self.draft = parts.draft.module if parts.draft else None
        self.rows, self.verify, self.accept = parts.rows, parts.verify.module, parts.accept.module

    def forward(self, *inputs):  # type: ignore[no-untyped-def]
        values = dict(zip((spec.name for spec in self.signature.inputs), inputs, strict=True))
        results = self._drafted(values)
        rows: TreeRows = self.rows(values["root"], results)
        tree = rows._asdict()
        verified = _ran(self.parts.verify, values | tree)
        accepted = _ran(self.parts.accept, values | tree | verified)
        accepted["path.out"] = accepted.pop("path")
        results |= verified | accepted
        return tuple(results[spec.name] for spec in self.signature.outputs)

    def _drafted(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The draft step's results, the drafter's caches too."""
        draft = self.parts.draft
        if draft is None:
            return {}
        noise = next(spec for spec in draft.signature.inputs if spec.name == "noise")
        read = {name: inputs[RENAMED.get(name, name)] for name in _held(draft) - {"noise"}}
        return _ran(draft, read | {"noise": self._noise(noise, inputs)})

    def _noise(self, spec: TensorSignature, inputs: Mapping[str, Tensor]) -> Tensor:
        """[D, U]; a level that no tree of the bundle reaches has none."""
        levels, width = (int(size) for size in spec.shape)
        if "keys" not in inputs:
            return torch.zeros(1, 1, dtype=DTYPES[spec.dtype], device=inputs["root"].device).expand(levels, width)
        assert self.draft is not None
        ids_U: Tensor | None = getattr(self.draft.drafter, "teacher_ids", None)
        keys = inputs["keys"][:, :, :levels]
        noise_LU = level_noise(keys, self.vocabulary, ids_U) * inputs["temperature"]
        return F.pad(noise_LU, (0, 0, 0, levels - keys.shape[2])).to(DTYPES[spec.dtype])


def whole_step(gear: str, draws: Draws, parts: WholeParts, vocabulary: int) -> Step:
    """One launch for a gear; its inputs and outputs follow from those of its parts."""
    draft, verify, accept = parts.draft, parts.verify.signature, parts.accept.signature
    caches = [*(draft.signature.caches if draft else []), *verify.caches]
    specs = {spec.name: spec for part in (draft and draft.signature, verify) if part for spec in part.inputs}
    written = {f"{name}.out": name for name in caches}
    name = whole_name(gear, draws)
    signature = StepSignature(
        name=name,
        kind="whole",
        rows=verify.rows,
        slots=verify.slots,
        inputs=(*_inputs(draws, draft, verify, accept), *(specs[name] for name in caches)),
        outputs=(*_outputs(parts), *(_named(specs[into], out) for out, into in written.items())),
        aliases=written,
    )
    return Step(WholeStep(parts, signature, vocabulary), signature)


def _inputs(draws: Draws, draft: Step | None, verify: StepSignature, accept: StepSignature) -> list[TensorSignature]:
    """The root, the tokens that the drafter has not seen, the last path, and the settings of the draws."""
    waiting = (
        [spec for spec in draft.signature.inputs if spec.name not in (COMMITTED, "noise", *draft.signature.caches)]
        if draft
        else []
    )
    commit = [spec for spec in verify.inputs if spec.name in names_of(COMMIT)]
    places = next(int(spec.shape[0]) for spec in accept.outputs if spec.name == "path")
    return [
        tensor("root", "int64", 1),
        *(_named(spec, RENAMED.get(spec.name, spec.name)) for spec in waiting),
        *commit,
        *(tensors(DRAWS, {"L": places}, "float32", {"draws"}) if draws == "sampled" else []),
    ]


def _outputs(parts: WholeParts) -> list[TensorSignature]:
    """The outputs of draft and acceptance that the host must know; then those that stay on the device."""
    draft, verify, accept = parts.draft, parts.verify.signature, parts.accept.signature
    reported = [spec for spec in draft.signature.outputs if spec.name in TOLD] if draft else []
    reads = {LOGITS.name, NEXT_BRANCH.name} | {spec.name for spec in accept.inputs if spec.name == "features"}
    return [
        *reported,
        *(_named(spec, "path.out" if spec.name == "path" else spec.name) for spec in accept.outputs),
        *(spec for spec in verify.outputs if spec.name in reads),
    ]


def _named(spec: TensorSignature, name: str) -> TensorSignature:
    return tensor(name, spec.dtype, *spec.shape)


def _held(step: Step) -> set[str]:
    return {spec.name for spec in step.signature.inputs}


def _ran(step: Step, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A part's outputs by name."""
    results = step.module(*(values[spec.name] for spec in step.signature.inputs))
    return dict(zip((spec.name for spec in step.signature.outputs), results, strict=True))
