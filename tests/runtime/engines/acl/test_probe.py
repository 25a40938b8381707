"""The probe of AscendCL believes the values that it reads back, and leaves nothing."""

import pytest

from draftwood.errors import RequestError
from draftwood.runtime.engines.acl.library import Library
from draftwood.tools.doctor.acl_probe import probe

from .ascendcl import AscendCL


def test_a_device_that_does_all() -> None:
    acl = AscendCL()
    library = Library(acl.handle)
    found = probe(lambda: library)
    assert [verdict.works for verdict in found] == [True] * 4 and found[1].seen == "Ascend910B3"
    library.finish()
    assert acl.done() == []


@pytest.mark.parametrize(
    ("silent", "kind", "works"), [("aclrtMemset", 0, [False, True]), ("aclrtMemcpy", 3, [True, False])]
)
def test_one_that_does_not_clear_or_copy(silent: str, kind: int, works: list[bool]) -> None:
    """Of copies, those on the device alone do nothing."""
    library = Library(AscendCL().handle)
    call = library._functions[silent]
    library._functions[silent] = lambda *given: 0 if kind in (0, given[-1]) else call(*given)
    assert [verdict.works for verdict in probe(lambda: library)][2:] == works


def test_one_that_is_not_there_or_full() -> None:
    def missing() -> Library:
        raise RequestError("no library")

    assert [(verdict.works, verdict.seen) for verdict in probe(missing)] == [(False, "no library")]
    library = Library(AscendCL(room=1 << 20).handle)
    assert "the device's memory is full" in probe(lambda: library)[-1].seen
