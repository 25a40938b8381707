"""Binds weights to a bundle whose NPU graphs were built without them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import msgspec

from draftwood import manifest as m
from draftwood.compiler.bundle.build import Sources
from draftwood.compiler.drafters.kinds import OpenedDrafter
from draftwood.compiler.ge.weights import read_index, write_npu_weights
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.errors import BundleError, CheckpointError, RequestError

# What a checkpoint may say differently from the configuration a bundle was built from.
_FREE = ("dtype",)


def bind(folder: Path, model: Path, drafter: Path | None) -> m.Manifest:
    """Writes the weights file and then, in one step, the manifest that vouches for it.

    Raises:
        BundleError: the bundle has no NPU graphs, or its weights already.
        CheckpointError: the checkpoint does not fit the graphs.
        RequestError: a drafter is missing or too many.
    """
    manifest = m.read_manifest(folder)
    npu = manifest.npu
    if npu is None:
        raise BundleError(f"{folder}: holds no NPU graphs; build it with --target ge")
    if npu.weights in manifest.files:
        raise BundleError(f"{folder}: has its weights already; build another bundle for other weights")
    if (manifest.drafter is None) != (drafter is None):
        raise RequestError(
            f"--drafter: the bundle {'has no drafter; leave it out' if drafter else 'has a drafter; name its folder'}"
        )
    teacher = Checkpoint.open(model)
    _same(folder, model, manifest.teacher.config, asdict(teacher.config))
    opened = OpenedDrafter.open(drafter, teacher) if drafter else None
    wanted = manifest.drafter
    if opened and wanted and drafter:
        kinds = {"kind": wanted.kind} | wanted.config, {"kind": opened.drafter.kind} | asdict(opened.drafter.config)
        _same(folder, drafter, *kinds)
    _write(folder, npu, Sources(teacher, opened), manifest.dims.context + 1)
    bound = msgspec.structs.replace(
        manifest,
        teacher=msgspec.structs.replace(manifest.teacher, digest=teacher.digest()),
        drafter=msgspec.structs.replace(wanted, digest=opened.digest()) if wanted and opened else None,
        files=dict(sorted((manifest.files | {npu.weights: m.list_file(folder / npu.weights)}).items())),
    )
    part = folder / f"{m.MANIFEST_FILE}.part"
    part.write_bytes(m.encode(bound))
    part.replace(folder / m.MANIFEST_FILE)
    return bound


def _same(folder: Path, source: Path, want: dict[str, object], got: dict[str, object]) -> None:
    got = msgspec.json.decode(msgspec.json.encode(got))  # as the manifest has it: lists, no tuples
    for name, value in want.items():
        if name not in _FREE and got.get(name) != value:
            raise CheckpointError(
                f"{source}: {name} is {got.get(name)!r}; the graphs of {folder} expect {value!r};"
                " name the checkpoint that they were built for"
            )


def _write(folder: Path, npu: m.NpuTarget, sources: Sources, positions: int) -> None:
    index = read_index(folder / npu.index)
    reads = {entry.name: entry.read for entry in sources.weights(positions)}
    target = folder / npu.weights
    # Under its final name in a folder of its own: the index knows the file by that name.
    staging = target.parent / ".binding"
    staging.mkdir(exist_ok=True)
    try:
        write_npu_weights(staging / target.name, index, lambda name: reads[name]())
        (staging / target.name).replace(target)
    except OSError as error:
        raise RequestError(f"{target}: cannot be written ({error})") from error
    finally:
        (staging / target.name).unlink(missing_ok=True)
        staging.rmdir()
