"""A bundle's NPU graphs compiled by a stand-in for ATC, and engines on a stand-in for AscendCL."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftwood.environment import torch_npu_installed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch_npu_installed():
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs the torch_npu package, for the graphs of the bundle"))


def compiled(bundle: Path, folder: Path) -> Path:
    """A copy of a bundle, with ``.om`` files, and next to it the lines that ATC was called with."""
    from .om import compile_bundle

    copy = Path(shutil.copytree(bundle, folder / "compiled"))
    (folder / "atc.txt").write_text("\n".join(compile_bundle(copy, folder)))
    return copy


@pytest.fixture(scope="session")
def compiled_bundle(npu_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain decoding and a tree of Medusa heads at one KV length. Read only."""
    return compiled(npu_bundle, tmp_path_factory.mktemp("acl"))


@pytest.fixture
def altered(compiled_bundle: Path, tmp_path: Path) -> Path:
    """A copy of the compiled bundle that a test may alter."""
    return Path(shutil.copytree(compiled_bundle, tmp_path / "bundle"))


@pytest.fixture
def opened() -> Iterator[Callable[..., Any]]:
    """Opens an engine on a library of its own; in the end both are left, and nothing may have been used wrongly."""
    from draftwood.runtime.bundle import Bundle
    from draftwood.runtime.engines.acl import AclEngine
    from draftwood.runtime.engines.acl.library import Library

    from .ascendcl import AscendCL

    made = []

    def open_one(folder: Path, **options: Any) -> tuple[Any, AscendCL]:
        acl = AscendCL(**options)
        library = Library(acl.handle)
        made.append((library, acl))
        return AclEngine(Bundle.open(folder), library=library), acl

    yield open_one
    for library, acl in made:
        library.finish()
        assert acl.done() == []
