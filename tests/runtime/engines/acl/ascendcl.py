"""AscendCL as its documents have it, over the project's interpreter: a call that they do not allow is kept as misuse.

The functions are reached through the C interface, by addresses, as those of a shared library are, so that widths and
pointers of a caller's prototypes count. Asynchronous work happens when the stream is waited for, not before. Contracts:
docs/zh/api of GE (acl), docs/zh/api_ref of the runtime, and davinci_model.cc where they are silent.
"""

import ctypes
import functools
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .heap import Heap, Misuse
from .om import Om

HEADER = """
aclError aclInit(const char *configPath)
aclError aclFinalize()
const char *aclGetRecentErrMsg()
const char *aclrtGetSocName()
aclError aclrtGetDeviceCount(uint32_t *count)
aclError aclrtSetDevice(int32_t deviceId)
aclError aclrtResetDevice(int32_t deviceId)
aclError aclrtGetCurrentContext(aclrtContext *context)
aclError aclrtSetCurrentContext(aclrtContext context)
aclError aclrtCreateStream(aclrtStream *stream)
aclError aclrtDestroyStream(aclrtStream stream)
aclError aclrtSynchronizeStream(aclrtStream stream)
aclError aclrtMalloc(void **devPtr, size_t size, aclrtMemMallocPolicy policy)
aclError aclrtFree(void *devPtr)
aclError aclrtMallocHost(void **hostPtr, size_t size)
aclError aclrtFreeHost(void *hostPtr)
aclError aclrtMemset(void *devPtr, size_t maxCount, int32_t value, size_t count)
aclError aclrtMemcpy(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind)
aclError aclrtMemcpyAsync(void *d, size_t max, const void *s, size_t count, aclrtMemcpyKind kind, aclrtStream stream)
aclError aclmdlQuerySize(const char *fileName, size_t *workSize, size_t *weightSize)
aclmdlConfigHandle *aclmdlCreateConfigHandle()
aclError aclmdlDestroyConfigHandle(aclmdlConfigHandle *handle)
aclError aclmdlSetConfigOpt(aclmdlConfigHandle *handle, aclmdlConfigAttr attr, const void *value, size_t valueSize)
aclError aclmdlSetExternalWeightAddress(aclmdlConfigHandle *handle, const char *file, void *devPtr, size_t size)
aclError aclmdlLoadWithConfig(const aclmdlConfigHandle *handle, uint32_t *modelId)
aclError aclmdlUnload(uint32_t modelId)
aclmdlDesc *aclmdlCreateDesc()
aclError aclmdlDestroyDesc(aclmdlDesc *modelDesc)
aclError aclmdlGetDesc(aclmdlDesc *modelDesc, uint32_t modelId)
size_t aclmdlGetNumInputs(aclmdlDesc *modelDesc)
size_t aclmdlGetNumOutputs(aclmdlDesc *modelDesc)
size_t aclmdlGetInputSizeByIndex(aclmdlDesc *modelDesc, size_t index)
size_t aclmdlGetOutputSizeByIndex(aclmdlDesc *modelDesc, size_t index)
aclDataType aclmdlGetInputDataType(const aclmdlDesc *modelDesc, size_t index)
aclDataType aclmdlGetOutputDataType(const aclmdlDesc *modelDesc, size_t index)
const char *aclmdlGetInputNameByIndex(const aclmdlDesc *modelDesc, size_t index)
aclDataBuffer *aclCreateDataBuffer(void *data, size_t size)
aclError aclDestroyDataBuffer(const aclDataBuffer *dataBuffer)
aclError aclUpdateDataBuffer(aclDataBuffer *dataBuffer, void *data, size_t size)
aclmdlDataset *aclmdlCreateDataset()
aclError aclmdlDestroyDataset(const aclmdlDataset *dataset)
aclError aclmdlAddDatasetBuffer(aclmdlDataset *dataset, aclDataBuffer *dataBuffer)
aclError aclmdlExecuteAsync(uint32_t modelId, const aclmdlDataset *input, aclmdlDataset *output, aclrtStream stream)
"""
WIDTHS = {"size_t": ctypes.c_size_t, "uint32_t": ctypes.c_uint32, "int32_t": ctypes.c_int32}
HANDLES = ("aclrtContext", "aclrtStream")
OUT_OF_MEMORY, NO_CONTEXT, NO_MODEL, BAD_PARAMETER, REPEATED = 207001, 107002, 145003, 100000, 100002
TOO_SMALL, UNREADABLE, NO_FILE = 145000, 100016, 145002
NUMBERS = {torch.float32: 0, torch.float16: 1, torch.int32: 3, torch.int64: 9, torch.bool: 12, torch.bfloat16: 27}
ALIGNMENT = 64


def prototypes() -> dict[str, tuple[Any, list[Any]]]:
    """Function -> result and arguments by the header; pointers are addresses, enumerations are int."""
    found = {}
    for line in HEADER.strip().splitlines():
        head, _, tail = line.partition("(")
        result, name = head.rsplit(" ", 1)
        arguments = [a for a in tail.rstrip(")").split(", ") if a]
        found[name.lstrip("*")] = (_width(result + ("*" if name.startswith("*") else "")), [*map(_width, arguments)])
    return found


def _width(text: str) -> Any:
    words = text.replace("const ", "").split()
    return ctypes.c_void_p if "*" in text or words[0] in HANDLES else WIDTHS.get(words[0], ctypes.c_int)


class AscendCL:
    """``handle`` is what ctypes.CDLL would give; ``misuses`` must be empty in the end.

    ``fails`` makes a function return a code, from its nth call on: {"aclrtMalloc": (3, 207001)}.
    """

    def __init__(self, room: int | None = None, already: bool = False) -> None:
        self.device, self.host = Heap("device", 32, room), Heap("pinned", 0)
        self.misuses: list[str] = []
        self.calls: list[str] = []
        self.fails: dict[str, tuple[int, int]] = {}
        self.message = ""
        self._initialised = already
        self._already = already
        self._current = threading.local()
        self._numbers = itertools.count(0x1000, 0x10)
        self._objects: dict[int, Any] = {}
        self._models: dict[int, dict[str, Any]] = {}
        self._devices, self._default = 0, 0
        self._texts: dict[str, ctypes.Array] = {}
        self._callbacks = {name: self._callback(name, *types) for name, types in prototypes().items()}
        self.handle = _Functions(self._callbacks)

    def _callback(self, name: str, result: Any, arguments: list[Any]) -> Any:
        function: Callable[..., Any] = getattr(self, name)

        @functools.wraps(function)
        def called(*values: Any) -> Any:
            self.calls.append(name)
            after, code = self.fails.get(name, (0, 0))
            if code and self.calls.count(name) >= after:
                return code
            try:
                if not self._initialised and name != "aclInit":
                    raise Misuse("before aclInit")
                return function(*values) or 0
            except Misuse as misuse:
                self.misuses.append(f"{name}: {misuse}")
            except Exception as error:  # a fault of the stand-in or of the interpreter: never lost in a callback
                self.misuses.append(f"{name}: {type(error).__name__}: {error}")
            return BAD_PARAMETER

        return ctypes.CFUNCTYPE(result, *arguments)(called)

    # What is made and destroyed by handles

    def _made(self, value: Any) -> int:
        number = next(self._numbers)
        self._objects[number] = value
        return number

    def _object(self, handle: int | None, kind: type) -> Any:
        found = self._objects.get(handle or 0)
        if not isinstance(found, kind):
            raise Misuse(f"{handle} is no {kind.__name__}, or was destroyed")
        return found

    def _destroy(self, handle: int | None, kind: type) -> None:
        self._object(handle, kind)
        del self._objects[handle]

    def _context(self) -> "Context":
        number = getattr(self._current, "number", None)
        if number is None or number not in self._objects:
            raise Misuse("no context in this thread")
        return self._objects[number]

    def _text(self, text: str) -> int:
        kept = self._texts.setdefault(text, ctypes.create_string_buffer(text.encode()))
        return ctypes.addressof(kept)

    # Library, device, context, stream

    def aclInit(self, config: int) -> int:
        if self._initialised:
            return REPEATED
        self._initialised = True
        return 0

    def aclFinalize(self) -> None:
        if self._already:
            raise Misuse("another program of the process has initialised it, and still uses it")
        if self._devices:
            raise Misuse("the device was not reset")
        self._initialised = False

    def aclGetRecentErrMsg(self) -> int:
        return self._text(self.message) if self.message else 0

    def aclrtGetSocName(self) -> int:
        return self._text("Ascend910B3")

    def aclrtGetDeviceCount(self, out: int) -> None:
        ctypes.c_uint32.from_address(out).value = 1

    def aclrtSetDevice(self, number: int) -> int:
        if number != 0:
            return 107001
        self._default = self._default if self._devices else self._made(Context())
        self._devices += 1
        self._current.number = self._default
        return 0

    def aclrtResetDevice(self, number: int) -> None:
        self._devices -= 1
        if self._devices:
            return
        self._destroy(self._default, Context)
        left = [f"{type(value).__name__} {number:#x}" for number, value in self._objects.items()]
        if left:
            raise Misuse(f"still there: {', '.join(left)}")

    def aclrtGetCurrentContext(self, out: int) -> None:
        self._context()
        _point(out, self._current.number)

    def aclrtSetCurrentContext(self, handle: int) -> None:
        self._object(handle, Context)
        self._current.number = handle

    def aclrtCreateStream(self, out: int) -> None:
        _point(out, self._made(Stream(self._context())))

    def aclrtDestroyStream(self, handle: int) -> None:
        if self._object(handle, Stream).tasks:
            raise Misuse("tasks are left in it")
        self._destroy(handle, Stream)

    def aclrtSynchronizeStream(self, handle: int) -> None:
        stream = self._stream(handle)
        while stream.tasks:
            stream.tasks.pop(0)()

    def _stream(self, handle: int) -> "Stream":
        stream = self._object(handle, Stream)
        if stream.context is not self._context():
            raise Misuse("the stream belongs to another context")
        return stream

    # Memory

    def aclrtMalloc(self, out: int, size: int, policy: int) -> int:
        self._context()
        address = self.device.take(size)
        if not address:
            return OUT_OF_MEMORY
        _point(out, address)
        return 0

    def aclrtFree(self, address: int) -> None:
        self._context()
        used = [
            m["path"].name for m in self._models.values() if any(_inside(self.device, address, u) for u in m["uses"])
        ]
        if used:
            raise Misuse(f"memory of the loaded model {used[0]} is freed")
        self.device.give_back(address)

    def aclrtMallocHost(self, out: int, size: int) -> None:
        self._context()
        _point(out, self.host.take(size))

    def aclrtFreeHost(self, address: int) -> None:
        self.host.give_back(address)

    def aclrtMemset(self, address: int, most: int, value: int, count: int) -> None:
        self._context()
        if count > most:
            raise Misuse(f"{count} bytes into at most {most}")
        self.device.require(address, count, "memset")
        ctypes.memset(address, value, count)

    def aclrtMemcpy(self, target: int, most: int, source: int, count: int, kind: int) -> None:
        self._context()
        self._check_copy(target, most, source, count, kind)
        ctypes.memmove(target, source, count)

    def aclrtMemcpyAsync(self, target: int, most: int, source: int, count: int, kind: int, handle: int) -> None:
        self._check_copy(target, most, source, count, kind)
        stream = self._stream(handle)
        host = target if kind == 2 else source
        if kind != 3:
            self.host.require(host, count, "an asynchronous copy of memory that is not pinned")
        stream.tasks.append(lambda: ctypes.memmove(target, source, count))

    def _check_copy(self, target: int, most: int, source: int, count: int, kind: int) -> None:
        if count > most:
            raise Misuse(f"{count} bytes into at most {most}")
        for address, there, what in ((target, kind in (1, 3), "target"), (source, kind in (2, 3), "source")):
            if there:
                self.device.require(address, count, what)
            elif self.device.holds(address):
                raise Misuse(f"kind {kind} says that the {what} is the host's memory, but it is the device's")

    # Loading

    def aclmdlQuerySize(self, path: int, work: int, weight: int) -> int:
        found = Om.read(Path(_string(path)))
        if found is None:
            return UNREADABLE
        ctypes.c_size_t.from_address(work).value = found.work
        ctypes.c_size_t.from_address(weight).value = 0
        return 0

    def aclmdlCreateConfigHandle(self) -> int:
        return self._made(Config())

    def aclmdlDestroyConfigHandle(self, handle: int) -> None:
        self._destroy(handle, Config)

    def aclmdlSetConfigOpt(self, handle: int, attribute: int, value: int, size: int) -> None:
        if attribute not in (1, 2, 7, 8) or size != 8:
            raise Misuse(f"attribute {attribute} of {size} bytes")
        number = ctypes.c_uint64.from_address(value).value
        # A path is copied when it is set; the caller's bytes may go.
        self._object(handle, Config).options[attribute] = _string(number) if attribute == 2 else number

    def aclmdlSetExternalWeightAddress(self, handle: int, name: int, address: int, size: int) -> None:
        if size <= 0 or size % 32:
            raise Misuse(f"{size} bytes; expected a multiple of 32")
        if "/" in _string(name):
            raise Misuse(f"{_string(name)}: a path; expected the file's name alone")
        self.device.require(address, size, "weights", padded=False) if size % 64 else None
        self._object(handle, Config).weights[_string(name)] = (address, size)

    def aclmdlLoadWithConfig(self, handle: int, out: int) -> int:
        config, context = self._object(handle, Config), self._context()
        if config.options.get(1) != 2 or 2 not in config.options:
            raise Misuse(f"options {config.options}; expected load type 2 and a path")
        path = Path(config.options[2])
        if not path.is_file():
            return NO_FILE
        om = Om.read(path)
        if om is None:
            return UNREADABLE
        work, size = config.options.get(7, 0), config.options.get(8, 0)
        if size < om.work or work % ALIGNMENT:
            raise Misuse(f"work memory of {size} bytes at {work:#x}; expected {om.work} at a multiple of {ALIGNMENT}")
        self.device.require(work, om.work, "work memory")
        constants, uses = {}, [work]
        for name, file in om.files.items():
            if file not in config.weights:
                raise Misuse(f"{file} is not given: the model would load a copy of its own")
            address, given = config.weights[file]
            if given < om.bytes(name):
                return TOO_SMALL
            self.device.require(address, om.bytes(name), file)
            if address % ALIGNMENT:
                raise Misuse(f"{file} at {address:#x}; expected a multiple of {ALIGNMENT}")
            uses.append(address)
            constants[name] = _tensor(address, *om.constant(name))
        number = len(self._models) + 1 + sum(call == "aclmdlUnload" for call in self.calls)
        self._models[number] = {
            "path": path,
            "om": om,
            "context": context,
            "uses": uses,
            "run": om.interpreter(constants),
        }
        ctypes.c_uint32.from_address(out).value = number
        return 0

    def aclmdlUnload(self, number: int) -> None:
        if self._model(number)["context"] is not self._context():
            raise Misuse("loaded in another context")
        if any(isinstance(value, Stream) and value.tasks for value in self._objects.values()):
            raise Misuse("a stream still has tasks")
        del self._models[number]

    def _model(self, number: int) -> dict[str, Any]:
        if number not in self._models:
            raise Misuse(f"no model {number}, or it was unloaded")
        return self._models[number]

    # Description

    def aclmdlCreateDesc(self) -> int:
        return self._made(Desc())

    def aclmdlDestroyDesc(self, handle: int) -> None:
        self._destroy(handle, Desc)

    def aclmdlGetDesc(self, handle: int, number: int) -> None:
        om = self._model(number)["om"]
        self._object(handle, Desc).sides = (om.inputs, om.outputs)

    def _side(self, handle: int, side: int, index: int | None = None) -> Any:
        values = self._object(handle, Desc).sides[side]
        return values if index is None else values[index]

    def aclmdlGetNumInputs(self, handle: int) -> int:
        return len(self._side(handle, 0))

    def aclmdlGetNumOutputs(self, handle: int) -> int:
        return len(self._side(handle, 1))

    def aclmdlGetInputSizeByIndex(self, handle: int, index: int) -> int:
        return self._side(handle, 0, index).bytes

    def aclmdlGetOutputSizeByIndex(self, handle: int, index: int) -> int:
        return self._side(handle, 1, index).bytes

    def aclmdlGetInputDataType(self, handle: int, index: int) -> int:
        return NUMBERS[self._side(handle, 0, index).dtype]

    def aclmdlGetOutputDataType(self, handle: int, index: int) -> int:
        return NUMBERS[self._side(handle, 1, index).dtype]

    def aclmdlGetInputNameByIndex(self, handle: int, index: int) -> int:
        return self._text(self._side(handle, 0, index).name)

    # Data and execution

    def aclCreateDataBuffer(self, address: int, size: int) -> int:
        return self._made(Data(address or 0, size))

    def aclDestroyDataBuffer(self, handle: int) -> None:
        self._destroy(handle, Data)

    def aclUpdateDataBuffer(self, handle: int, address: int, size: int) -> None:
        data = self._object(handle, Data)
        data.address, data.size = address or 0, size

    def aclmdlCreateDataset(self) -> int:
        return self._made(Dataset())

    def aclmdlDestroyDataset(self, handle: int) -> None:
        self._destroy(handle, Dataset)

    def aclmdlAddDatasetBuffer(self, handle: int, data: int) -> None:
        self._object(data, Data)
        self._object(handle, Dataset).handles.append(data)

    def aclmdlExecuteAsync(self, number: int, given: int, taken: int, handle: int) -> int:
        model, stream = self._model(number), self._stream(handle)
        if model["context"] is not self._context():
            raise Misuse("loaded in another context")
        sides = []
        for dataset, declared in ((given, model["om"].inputs), (taken, model["om"].outputs)):
            handles = self._object(dataset, Dataset).handles
            if len(handles) != len(declared):
                raise Misuse(f"{len(handles)} buffers, the model has {len(declared)}")
            # Addresses are read at the launch: what is updated afterwards counts for the next one.
            sides.append(
                [
                    (one, self._object(h, Data).address, self._object(h, Data).size)
                    for one, h in zip(declared, handles, strict=True)
                ]
            )
        self._check_places([*sides[0], *sides[1]])
        stream.tasks.append(lambda: self._execute(model, *sides))
        return 0

    def _check_places(self, places: list[tuple[Any, int, int]]) -> None:
        for one, address, size in places:
            if size < one.bytes:
                raise Misuse(f"{one.name}: {size} bytes, the model has {one.bytes}")
            if address % ALIGNMENT:
                raise Misuse(f"{one.name}: at {address:#x}; expected a multiple of {ALIGNMENT}")
            self.device.require(address, one.bytes, one.name, padded=True)
        ranges = sorted((address, address + one.bytes, one.name) for one, address, _ in places)
        for (_, end, first), (begin, _, second) in itertools.pairwise(ranges):
            if begin < end:
                raise Misuse(f"{first} and {second} share memory")

    def _execute(self, model: dict[str, Any], given: list, taken: list) -> None:
        self._check_places([*given, *taken])  # nothing may have been freed since the launch
        inputs = {one.name: _tensor(address, one.dtype, one.shape) for one, address, _ in given}
        for result, (one, address, _) in zip(model["run"].run(inputs), taken, strict=True):
            _tensor(address, one.dtype, one.shape).copy_(result)

    def done(self) -> list[str]:
        """All that was wrong, leaks included; to be asked when the caller says that it has finished."""
        left = [f"{type(value).__name__} {number:#x} is left" for number, value in self._objects.items()]
        models = [f"model {model['path'].name} is left" for model in self._models.values()]
        return [*self.misuses, *left, *models, *self.device.left(), *self.host.left()]


class _Functions:
    """Functions by attribute, without prototypes: as a shared library gives them."""

    def __init__(self, callbacks: dict[str, Any]) -> None:
        self._callbacks = callbacks
        self._made: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name not in self._callbacks:
            raise AttributeError(name)
        if name not in self._made:
            address = ctypes.cast(self._callbacks[name], ctypes.c_void_p).value
            self._made[name] = ctypes.CDLL(None)._FuncPtr(address)
        return self._made[name]


class Context:
    pass


class Stream:
    def __init__(self, context: Context) -> None:
        self.context, self.tasks = context, []


class Config:
    def __init__(self) -> None:
        self.options: dict[int, Any] = {}
        self.weights: dict[str, tuple[int, int]] = {}


class Desc:
    sides: tuple[list, list] = ([], [])


class Data:
    def __init__(self, address: int, size: int) -> None:
        self.address, self.size = address, size


class Dataset:
    def __init__(self) -> None:
        self.handles: list[int] = []


def _point(out: int, value: int) -> None:
    ctypes.c_void_p.from_address(out).value = value


def _string(address: int) -> str:
    return ctypes.string_at(address).decode()


def _inside(heap: Heap, start: int, address: int) -> bool:
    return any(b.address == start and b.address <= address < b.address + b.padded for b in heap.blocks)


def _tensor(address: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor in the memory itself."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = (ctypes.c_ubyte * count).from_address(address)
    return torch.frombuffer(raw, dtype=dtype).reshape(shape)
