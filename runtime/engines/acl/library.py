"""AscendCL, CANN's runtime, by the C functions that a runner of ``.om`` files needs.

Prototypes and codes: CANN's open documents (``docs/zh/api`` of GE, ``docs/zh/api_ref`` of the runtime) and the header
``acl/acl_mdl.h``. Called through ctypes, since CANN's Python package has no function that gives a model
its external weights.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from ctypes import CDLL, POINTER, c_char_p, c_int, c_int32, c_size_t, c_uint32, c_void_p
from functools import cache
from typing import Any, Protocol

from draftwood.environment import VISIBLE, cann_folder
from draftwood.errors import RequestError

NAME = "libascendcl.so"
LEAST_CANN = "8.5.0"
_WITHOUT = "take --engine ge, which interprets the same graphs on a CPU"

_HANDLE, _OUT, _SIZES = c_void_p, POINTER(c_void_p), POINTER(c_size_t)
# Function -> its result (c_int is an aclError) and arguments.
PROTOTYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "aclInit": (c_int, (c_char_p,)),
    "aclFinalize": (c_int, ()),
    "aclGetRecentErrMsg": (c_char_p, ()),
    "aclrtGetSocName": (c_char_p, ()),
    "aclrtGetDeviceCount": (c_int, (POINTER(c_uint32),)),
    "aclrtSetDevice": (c_int, (c_int32,)),
    "aclrtResetDevice": (c_int, (c_int32,)),
    "aclrtGetCurrentContext": (c_int, (_OUT,)),
    "aclrtSetCurrentContext": (c_int, (_HANDLE,)),
    "aclrtCreateStream": (c_int, (_OUT,)),
    "aclrtDestroyStream": (c_int, (_HANDLE,)),
    "aclrtSynchronizeStream": (c_int, (_HANDLE,)),
    "aclrtMalloc": (c_int, (_OUT, c_size_t, c_int)),
    "aclrtFree": (c_int, (_HANDLE,)),
    "aclrtMallocHost": (c_int, (_OUT, c_size_t)),
    "aclrtFreeHost": (c_int, (_HANDLE,)),
    "aclrtMemset": (c_int, (_HANDLE, c_size_t, c_int32, c_size_t)),
    "aclrtMemcpy": (c_int, (_HANDLE, c_size_t, _HANDLE, c_size_t, c_int)),
    "aclrtMemcpyAsync": (c_int, (_HANDLE, c_size_t, _HANDLE, c_size_t, c_int, _HANDLE)),
    "aclmdlQuerySize": (c_int, (c_char_p, _SIZES, _SIZES)),
    "aclmdlCreateConfigHandle": (_HANDLE, ()),
    "aclmdlDestroyConfigHandle": (c_int, (_HANDLE,)),
    "aclmdlSetConfigOpt": (c_int, (_HANDLE, c_int, c_void_p, c_size_t)),
    "aclmdlSetExternalWeightAddress": (c_int, (_HANDLE, c_char_p, _HANDLE, c_size_t)),
    "aclmdlLoadWithConfig": (c_int, (_HANDLE, POINTER(c_uint32))),
    "aclmdlUnload": (c_int, (c_uint32,)),
    "aclmdlCreateDesc": (_HANDLE, ()),
    "aclmdlDestroyDesc": (c_int, (_HANDLE,)),
    "aclmdlGetDesc": (c_int, (_HANDLE, c_uint32)),
    "aclmdlGetNumInputs": (c_size_t, (_HANDLE,)),
    "aclmdlGetNumOutputs": (c_size_t, (_HANDLE,)),
    "aclmdlGetInputSizeByIndex": (c_size_t, (_HANDLE, c_size_t)),
    "aclmdlGetOutputSizeByIndex": (c_size_t, (_HANDLE, c_size_t)),
    "aclmdlGetInputDataType": (c_int, (_HANDLE, c_size_t)),
    "aclmdlGetOutputDataType": (c_int, (_HANDLE, c_size_t)),
    "aclmdlGetInputNameByIndex": (c_char_p, (_HANDLE, c_size_t)),
    "aclCreateDataBuffer": (_HANDLE, (_HANDLE, c_size_t)),
    "aclDestroyDataBuffer": (c_int, (_HANDLE,)),
    "aclUpdateDataBuffer": (c_int, (_HANDLE, _HANDLE, c_size_t)),
    "aclmdlCreateDataset": (_HANDLE, ()),
    "aclmdlDestroyDataset": (c_int, (_HANDLE,)),
    "aclmdlAddDatasetBuffer": (c_int, (_HANDLE, _HANDLE)),
    "aclmdlExecuteAsync": (c_int, (c_uint32, _HANDLE, _HANDLE, _HANDLE)),
}

_FEWER = "build with fewer or shorter --kv lengths, or free the device: npu-smi info shows who holds it"
_AGAIN = "compile the graphs again with this CANN: sh atc.sh in the bundle's npu folder"
_LOST = "the device may need a restart: npu-smi info, and the plog files under ~/ascend/log"
_ABSENT = f"look at npu-smi info and at {VISIBLE}"
_CLOSED = "npu-smi info says if another container holds it, or this one lacks the driver or files of /dev"
# aclError -> its meaning and the way out (docs/zh/api of GE, aclError.md; the runtime's 25-01_aclError.md).
_CODES: dict[int, tuple[str, str]] = {
    **dict.fromkeys((207001, 207018, 245000, 245002), ("the device's memory is full", _FEWER)),
    200000: ("the host's memory is full", "close other programs"),
    **dict.fromkeys(
        (207005, 207008), ("no stream is left on the device", "build fewer gears, each graph takes streams")
    ),
    207006: ("this user may not use the device", "add it to the driver's group, HwHiAiUser"),
    **dict.fromkeys((100003, 100014, 145002), ("a file is missing", _AGAIN)),
    **dict.fromkeys(
        (100012, 100013, 100015, 100016, *range(545001, 545006)), ("this CANN cannot read the .om file", _AGAIN)
    ),
    **dict.fromkeys((100000, 145000), ("an argument is refused", _AGAIN)),
    **dict.fromkeys((107019, 107020, 507012), ("the device did not answer in time", _LOST)),
    **dict.fromkeys(
        (507011, *range(507014, 507017), *range(507034, 507037), *range(507042, 507046), *range(507048, 507051)),
        ("a kernel failed on the device", _LOST),
    ),
    **dict.fromkeys((507017, 507018), ("an operator failed on the device's AI CPU", _LOST)),
    **dict.fromkeys((107001, 107002, 207004), ("there is no such device, or it is not open", _ABSENT)),
    **dict.fromkeys((507008, 507033, 507899), ("the driver cannot open the device", _CLOSED)),
}
_REPEATED = 100002  # aclInit was called before, by torch_npu say; the documents tell to go on


class Closing(Protocol):
    """An object that has to go before the library does."""

    def close(self) -> None:
        """May be called again."""


class Library:
    """AscendCL, initialised once for this process; ``device`` is the number of the one that is used.

    ``handle`` gives its functions by attribute, as ctypes.CDLL does.

    Raises:
        RequestError: a function is missing, or the library or the device cannot be opened.
    """

    def __init__(self, handle: Any, name: str = NAME, device: int = 0) -> None:
        self.name, self.device = name, device
        # Functions are called by their addresses, so their library must stay.
        self._handle = handle
        self._functions = {function: _bound(handle, name, function) for function in PROTOTYPES}
        # Closed, the last first, before the library is left.
        self.opened: list[Closing] = []
        code = self.value("aclInit", None)
        self._ours = code != _REPEATED
        if self._ours and code:
            raise self.error("aclInit", code)
        try:
            self.call("aclrtSetDevice", device)
        except RequestError:
            self._leave()
            raise

    def value(self, function: str, *arguments: Any) -> Any:
        """The result of a function."""
        return self._functions[function](*arguments)

    def call(self, function: str, *arguments: Any, where: str = "") -> None:
        """Calls a function that returns an aclError.

        Raises:
            RequestError: it is not 0; ``where`` says what was being done.
        """
        code = self._functions[function](*arguments)
        if code:
            raise self.error(function, code, where)

    def made(self, function: str, *arguments: Any) -> int:
        """The object that a function has made: a handle, as a number; RequestError if it made none."""
        handle = self._functions[function](*arguments)
        if not handle:
            raise RequestError(f"{self.name}: {function} made nothing; the host's memory is full")
        return int(handle)

    def error(self, function: str, code: int, where: str = "") -> RequestError:
        """One line of a code: its meaning, the library's message, the way out."""
        meaning, way_out = _CODES.get(code, ("see aclError in CANN's documents", _WITHOUT))
        message = self.value("aclGetRecentErrMsg")
        reason = " ".join(message.decode(errors="replace").split())[:300] if message else ""
        begin = f"{where}: " if where else ""
        return RequestError(f"{begin}{function}: error {code}, {meaning}{f' ({reason})' if reason else ''}; {way_out}")

    def finish(self) -> None:
        """Closes all open objects, and leaves the device and the library; nothing may be called afterwards."""
        while self.opened:
            self.opened.pop().close()
        self.value("aclrtResetDevice", self.device)
        self._leave()

    def _leave(self) -> None:
        if self._ours:
            self.value("aclFinalize")


@cache
def ascendcl() -> Library:
    """The machine's own library, left when the process ends.

    Raises:
        RequestError: there is none, it is too old, or it finds no device.
    """
    library = Library(_loaded())
    atexit.register(library.finish)
    return library


def _loaded() -> CDLL:
    folder, seen = cann_folder(), ""
    for path in (NAME, *((str(folder / NAME),) if folder else ())):
        try:
            return CDLL(path)
        except OSError as error:
            seen = str(error)
    raise RequestError(
        f"--engine acl: {NAME} cannot be loaded ({seen}); install CANN {LEAST_CANN} or later and source its set_env.sh,"
        f" or {_WITHOUT}"
    )


def _bound(handle: Any, name: str, function: str) -> Callable[..., Any]:
    try:
        symbol = getattr(handle, function)
    except AttributeError:
        raise RequestError(
            f"{name}: has no function {function}; expected AscendCL of CANN {LEAST_CANN} or later; install it, or"
            f" {_WITHOUT}"
        ) from None
    symbol.restype, symbol.argtypes = PROTOTYPES[function]
    bound: Callable[..., Any] = symbol
    return bound
