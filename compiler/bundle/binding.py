"""Binds weights to a bundle whose NPU graphs were built without them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import msgspec
from torch import Tensor

from draftwood import manifest as m
from draftwood.compiler.bundle.sources import Sources
from draftwood.compiler.bundle.staging import exclusive
from draftwood.compiler.drafters.registry import open_drafter
from draftwood.compiler.ge.weights import read_index, write_npu_weights
from draftwood.compiler.ranks.share import Share
from draftwood.compiler.ranks.weights import rank_entries
from draftwood.compiler.targets.storage import PRECISIONS
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.conversion import Precision, in_precision
from draftwood.compiler.teachers.formats import usual_sampling, write_tokenizer
from draftwood.errors import BundleError, CheckpointError, RequestError

# Fields of the configuration in which a checkpoint may differ from the bundle's, since no graph follows from them. Its
# own end tokens hold from then on: a description alone may lack those of generation_config.json.
_FREE = ("dtype", "bos", "eos")

# Where files lie until they are whole: no reader of a bundle looks there (`draftwood.runtime.bundle.files`).
STAGING = ".binding"
TOKENIZER = Path("tokenizer")


def bind(folder: Path, model: Path, drafter: Path | None) -> m.Manifest:
    """Writes the weights file and the model's tokenizer and then, in one step, the manifest that vouches for them.

    Raises:
        BundleError: the bundle has no NPU graphs, or its weights already.
        CheckpointError: the checkpoint does not fit the graphs.
        RequestError: a drafter is missing or too many.
    """
    m.read_manifest(folder)  # before the lock's file is made: FOLDER may be no bundle
    with exclusive(folder, wait=False):
        return _bind(folder, model, drafter)


def _bind(folder: Path, model: Path, drafter: Path | None) -> m.Manifest:
    manifest = m.read_manifest(folder)
    sets = manifest.rank_sets("ge")
    if not sets:
        raise BundleError(f"{folder}: holds no NPU graphs; build it with --target ge")
    npu = sets[0]
    if npu.weights in manifest.files:
        raise BundleError(f"{folder}: has its weights already; build another bundle for other weights")
    precision = PRECISIONS.get(npu.precision.name)
    if precision is None or precision.types != npu.precision:
        known = ", ".join(PRECISIONS)
        raise BundleError(
            f"{folder}: precision {npu.precision.name}; expected one of {known}; build it with its weights"
        )
    if (manifest.drafter is None) != (drafter is None):
        raise RequestError(
            f"DRAFTER: the bundle {'has no drafter; leave it out' if drafter else 'has a drafter; name its folder'}"
        )
    head = bool(manifest.teacher.config["quantised"])
    form: Precision = "exact" if not manifest.packed else "nbits-head" if head else "nbits"
    exact = Checkpoint.open(model)
    teacher = in_precision(exact, form, npu=True)
    _same(folder, model, manifest.teacher.config, asdict(teacher.config))
    opened = open_drafter(drafter, exact) if drafter else None
    described = manifest.drafter
    if opened and described and drafter:
        kinds = {"kind": described.kind} | described.config, {"kind": opened.model.kind} | asdict(opened.model.config)
        _same(folder, drafter, *kinds)
    entries = [precision.stored(entry) for entry in Sources(teacher, opened).weights(manifest.dims.context + 1)]
    block = opened.model.block(teacher.config) if opened else teacher.config
    with _tokenizer_of(model, folder) as tokenizer:
        for graph_set in sets:
            share = Share(graph_set.rank, graph_set.ranks)
            _write(folder, graph_set, {e.name: e.read for e in rank_entries(entries, teacher.config, block, share)})
    others = {n: file for n, file in manifest.files.items() if not (tokenizer and n.startswith(f"{TOKENIZER}/"))}
    written = {name: m.list_file(folder / name) for name in (*tokenizer, *(graph_set.weights for graph_set in sets))}
    bos, eos = teacher.config.bos, teacher.config.eos
    bound = msgspec.structs.replace(
        manifest,
        teacher=msgspec.structs.replace(
            manifest.teacher,
            digest=teacher.digest(),
            bos=bos,
            eos=eos,
            sampling=usual_sampling(model),
            config=manifest.teacher.config | {"bos": bos, "eos": eos},
        ),
        drafter=msgspec.structs.replace(described, digest=opened.digest()) if described and opened else None,
        tokenizer=manifest.tokenizer or bool(tokenizer),
        files=dict(sorted((others | written).items())),
    )
    part = folder / f"{m.MANIFEST_FILE}.part"
    part.write_bytes(m.encode(bound))
    part.replace(folder / m.MANIFEST_FILE)
    return bound


@contextmanager
def _tokenizer_of(model: Path, folder: Path) -> Iterator[list[str]]:
    """Puts the model's tokenizer, if it has one, in the place of the described one's after the body; its files in the
    bundle. One that has no form here is refused before the body."""
    staging = folder / STAGING
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir()
        found = write_tokenizer(model, staging)
        files = [path.relative_to(staging) for path in sorted(staging.rglob("*")) if path.is_file() and found]
        yield [(TOKENIZER / path).as_posix() for path in files]
        if found:
            shutil.rmtree(folder / TOKENIZER, ignore_errors=True)
            staging.rename(folder / TOKENIZER)
    except OSError as error:
        raise RequestError(f"{folder}: cannot be written ({error})") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _same(folder: Path, source: Path, want: dict[str, object], got: dict[str, object]) -> None:
    got = msgspec.json.decode(msgspec.json.encode(got))  # as the manifest has it: lists, no tuples
    for name, value in want.items():
        if name not in _FREE and got.get(name) != value:
            raise CheckpointError(
                f"{source}: {name} is {got.get(name)!r}; the graphs of {folder} expect {value!r};"
                " name the checkpoint that they were built for"
            )


def _write(folder: Path, npu: m.GraphSet, reads: Mapping[str, Callable[[], Tensor]]) -> None:
    assert npu.index is not None, "graphs for an NPU have an index of their weights"
    index = read_index(folder / npu.index)
    target = folder / npu.weights
    # Under its final name in its own folder: the index knows the file by that name.
    staging = target.parent / STAGING
    staging.mkdir(exist_ok=True)
    try:
        write_npu_weights(staging / target.name, index, lambda name: reads[name]())
        (staging / target.name).replace(target)
    except OSError as error:
        raise RequestError(f"{target}: cannot be written ({error})") from error
    finally:
        (staging / target.name).unlink(missing_ok=True)
        staging.rmdir()
