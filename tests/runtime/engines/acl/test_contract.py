"""The stand-in is strict: it finds uses that the documents do not allow, as a single call and inside the engine."""

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from draftwood.errors import DraftwoodError
from draftwood.runtime.engines.acl import memory, model
from draftwood.runtime.engines.acl.library import PROTOTYPES, Library
from draftwood.runtime.engines.acl.memory import AclDevice, MemoryBlock

from .ascendcl import AscendCL, prototypes
from .test_decoding import decoded, interpreted


def test_the_prototypes_are_those_of_the_header() -> None:
    """Widths and numbers of arguments; a pointer has one width, whatever it points to."""

    def width(kind):
        pointer = kind is None or kind in (ctypes.c_char_p, ctypes.c_void_p) or hasattr(kind, "contents")
        return "pointer" if pointer else (ctypes.sizeof(kind), kind(-1).value)

    header = prototypes()
    assert header.keys() == PROTOTYPES.keys()
    for name, (result, arguments) in PROTOTYPES.items():
        assert [width(kind) for kind in (result, *arguments)] == [width(k) for k in (header[name][0], *header[name][1])]


@pytest.fixture
def device() -> tuple[AclDevice, AscendCL]:
    acl = AscendCL()
    return AclDevice(Library(acl.handle)), acl


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (lambda d, a: d.library.call("aclrtFree", a), "freed twice"),
        (lambda d, a: d.library.call("aclrtFree", a + 64), "was never allocated"),
        (lambda d, a: d.copy(a, a + 64, 65, memory.DEVICE_TO_DEVICE), "used after it was freed"),
        (lambda d, a: d.copy(a, d.allocate(64, ""), 65, memory.HOST_TO_DEVICE), "used after it was freed"),
        (lambda d, a: d.copy(d.allocate(64, ""), d.allocate(64, ""), 65, memory.DEVICE_TO_DEVICE), "reach past"),
        (lambda d, a: d.copy(d.allocate(64, ""), d.allocate(64, ""), 64, memory.HOST_TO_DEVICE), "it is the device's"),
        (lambda d, a: d.library.call("aclrtMemcpy", d.allocate(64, ""), 32, a, 64, 1), "64 bytes into at most 32"),
        (lambda d, a: d.copy_in_stream(d.allocate(64, ""), a, 64, memory.HOST_TO_DEVICE), "not pinned"),
        (lambda d, a: d.allocate(0, ""), "0 bytes asked for"),
        (lambda d, a: d.library.call("aclmdlUnload", 7), "no model 7"),
        (lambda d, a: [d.library.call("aclrtResetDevice", 0) for _ in range(2)], "still there: Stream"),
        (lambda d, a: d.library.call("aclrtSynchronizeStream", 7), "is no Stream"),
        (
            lambda d, a: d.library.call("aclmdlSetConfigOpt", d.library.made("aclmdlCreateConfigHandle"), 99, None, 8),
            "99",
        ),
    ],
)
def test_a_wrong_call_is_found(device: tuple[AclDevice, AscendCL], wrong: Callable, found: str) -> None:
    used, acl = device
    address = used.allocate(128, "")
    used.library.call("aclrtFree", address)
    with suppress(DraftwoodError):
        wrong(used, address)
    assert any(found in misuse for misuse in acl.misuses), acl.misuses


def test_what_is_left_or_written_past_is_found(device: tuple[AclDevice, AscendCL]) -> None:
    used, acl = device
    address = used.allocate(128, "")
    ctypes.memset(address + 160, 0, 1)  # 128 bytes, 32 of padding, and one more
    left = acl.done()
    assert any("never freed" in line for line in left) and any("Stream" in line for line in left)
    with suppress(DraftwoodError):
        used.library.call("aclrtFree", address)
    assert any("written outside" in misuse for misuse in acl.misuses)


def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AclDevice, "synchronize", lambda self, where: None)


def _no_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Library.call
    monkeypatch.setattr(
        Library, "call", lambda self, name, *rest, **named: name == "aclrtMemset" or call(self, name, *rest, **named)
    )


def _no_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.Staging, "upload", lambda self: None)


def _bound_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = model.Bound.bind
    monkeypatch.setattr(model.Bound, "bind", lambda self, places: self._addresses or bind(self, places))


def _weights_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the executor's reference gone, the next cache takes the weights' place."""
    from draftwood.runtime.engines.acl.engine import AclExecutor

    zeros = AclExecutor.zeros

    def dropping(self, shape):
        self._weights = None
        return zeros(self, shape)

    monkeypatch.setattr(AclExecutor, "zeros", dropping)


def _pieces_of_32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_PIECE_START", 32)


def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_PIECE_REST", -32)


def _unloaded_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.Model, "close", lambda self: None)


def _no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AclDevice, "enter", lambda self: None)


FAULTS = [
    _no_wait, _no_zeros, _no_upload, _bound_once, _weights_given_back, _pieces_of_32, _no_rest, _unloaded_late,
]  # fmt: skip


@pytest.fixture(scope="module")
def wanted(compiled_bundle: Path) -> tuple[int, ...]:
    return decoded(interpreted(compiled_bundle), 0.0, tokens=8).token_ids


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_engine_is_found(
    compiled_bundle: Path, wanted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, fault: Callable
) -> None:
    from draftwood.runtime.bundle import Bundle
    from draftwood.runtime.engines.acl import AclEngine

    fault(monkeypatch)
    acl = AscendCL()
    library, got = Library(acl.handle), None
    with suppress(DraftwoodError):
        engine = AclEngine(Bundle.open(compiled_bundle), library=library)
        got = decoded(engine, 0.0, tokens=8).token_ids  # two texts, each with caches of its own
        got = decoded(engine, 0.0, tokens=8).token_ids
    library.finish()
    assert acl.done() or got != wanted


def test_another_thread_without_the_context_is_found(compiled_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acl = AscendCL()
    used = AclDevice(Library(acl.handle))
    _no_context(monkeypatch)
    thread = threading.Thread(target=_allocated, args=(used,))
    thread.start()
    thread.join()
    assert acl.misuses == ["aclrtMalloc: no context in this thread"]


def test_the_context_of_torch_npu_stays() -> None:
    """It takes the device's own, once in a thread, and launches into a stream of that."""
    acl = AscendCL(already=True)
    acl.aclrtSetDevice(0)
    theirs, used = acl._current.number, AclDevice(Library(acl.handle))
    MemoryBlock(used, 64, "")
    assert acl._current.number == theirs
    used.close()
    acl._context()
    assert acl.misuses == []


def _allocated(used: AclDevice) -> None:
    with suppress(DraftwoodError):
        MemoryBlock(used, 64, "")
