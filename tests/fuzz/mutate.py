"""Mutations of files: of bytes, of JSON by its structure, of a name's kind in a folder.

A mutation takes the random numbers it is given and nothing else, so that a case is known by its number. Files are
replaced, never written in place, for a case's folder consists of hard links to the seeds.
"""

from __future__ import annotations

import json
import os
import random
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

ODD_NUMBERS = (0, 1, -1, 2, 3, 7, 127, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32, 2**62, 2**63, 2**64, -(2**63), 10**40)
ODD_FLOATS = (0.5, -0.0, 1e-320, 1e30, 1e308, float("inf"), float("-inf"), float("nan"))
ODD_TEXTS = (
    *("", " ", "0", "-1", "null", "\0", "\n", "a\nb", "\x1b[2J", "\ud800", "\U0001f333", "é" * 40, "x" * 5000),
    *("../../etc/passwd", "/etc/passwd", "/dev/zero", "..", ".", "./x", "a//b", "manifest.json", "step", "plain"),
    *("__import__('os').system('touch CANARY')", "{{ 7 * 7 }}", "%s%s%n", "9" * 5000),
)


DEVICES = ("/dev/zero", "/dev/full", "/dev/random", "/dev/stdin", "/dev/tty")


class Raw(str):
    """Text that stands in a JSON file as it is."""


def replace(path: Path, data: bytes) -> None:
    """Gives the name new content; other names of the old content keep it."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


# Bytes


def damaged(data: bytes, rng: random.Random) -> bytes:
    """The bytes with one to four places wrong."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = rng.choice(_BYTES)(bytearray(data), rng)
    return data


def _flip(data: bytearray, rng: random.Random) -> bytes:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def _overwrite(data: bytearray, rng: random.Random) -> bytes:
    at, length = rng.randrange(len(data) + 1), rng.choice((1, 2, 4, 8, 64))
    value = rng.choice((b"\0", b"\xff", b"\x80", b"{", b"[", b"9", b'"', b"\n"))
    data[at : at + length] = value * length
    return bytes(data)


def _insert(data: bytearray, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    pieces = (rng.randbytes(rng.randrange(1, 40)), b"[" * 50_000, b"1" * 9_000, b"\xef\xbb\xbf", b"\r\n")
    data[at:at] = rng.choice(pieces)
    return bytes(data)


def _cut(data: bytearray, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    del data[at : at + rng.choice((1, 2, 8, 100, len(data)))]
    return bytes(data)


def _repeat(data: bytearray, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    piece = data[at : at + rng.randrange(1, 200)]
    data[at:at] = piece * rng.choice((1, 2, 50))
    return bytes(data)


def _swap(data: bytearray, rng: random.Random) -> bytes:
    one, other = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return bytes(data[other:] + data[one:other] + data[:one])


def _number(data: bytearray, rng: random.Random) -> bytes:
    """Another number where one stands in the text."""
    digits = [i for i, byte in enumerate(data) if 48 <= byte <= 57]
    if digits:
        at = rng.choice(digits)
        data[at : at + 1] = str(rng.choice(ODD_NUMBERS)).encode()
    return bytes(data)


def _whole(data: bytearray, rng: random.Random) -> bytes:
    others = (b"", b"\0" * 4096, rng.randbytes(300), b"{}", b"[]", b"null", b'"', b"[" * 200_000, bytes(data) * 2)
    return rng.choice(others)


_BYTES: tuple[Callable[[bytearray, random.Random], bytes], ...] = (
    *(_flip, _flip, _overwrite, _insert, _cut, _repeat, _swap, _number, _whole),
)


def gguf_damaged(data: bytes, rng: random.Random) -> bytes:
    """A GGUF file with a count, a length, a type or an offset of its header wrong; now and then damaged anywhere."""
    if rng.random() < 0.2:
        return damaged(data, rng)
    found, tensors = bytearray(data), data.index(b"token_embd.weight")
    for _ in range(rng.choice((1, 1, 2))):
        # The metadata before the tokenizer, or the list of tensors: what is between is texts.
        at = rng.choice((rng.randrange(1200), rng.randrange(max(tensors - 1000, 0), tensors + 1000)))
        number = rng.choice((*ODD_NUMBERS, 2**60)) % 2**64
        width = rng.choice((1, 4, 8))
        found[at : at + width] = number.to_bytes(8, "little")[:width]
    return bytes(found)


# JSON


def json_damaged(text: bytes, rng: random.Random) -> bytes:
    """JSON with one or two of its values, keys or sizes wrong; now and then damaged as bytes."""
    if rng.random() < 0.15:
        return damaged(text, rng)
    value = json.loads(text)
    for _ in range(rng.choice((1, 1, 1, 2))):
        value = changed(value, rng)
    return dumped(value, rng)


def json_lines_damaged(text: bytes, rng: random.Random) -> bytes:
    """The damage of `json_damaged` to one line of JSON lines."""
    lines = text.splitlines(keepends=True)
    if not lines or rng.random() < 0.2:
        return damaged(text, rng)
    at = rng.randrange(len(lines))
    lines[at] = json_damaged(lines[at], rng).replace(b"\n", b" ") + b"\n"
    return b"".join(lines)


def changed(value: Any, rng: random.Random) -> Any:
    """The value with something wrong at a random place of it."""
    places = list(_places(value))
    if not places:
        return odd(rng, value)
    holder, key = rng.choice(places)
    rng.choice((_set, _set, _set, _near, _drop, _add, _move, _wrap))(holder, key, rng)
    return value


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from _places(item)


def odd(rng: random.Random, value: Any = None) -> Any:
    """A value that nobody expects, of the same type as ``value`` half of the time."""
    if rng.random() < 0.5:
        if isinstance(value, str):
            return rng.choice(ODD_TEXTS)
        if isinstance(value, (int, float)):
            return rng.choice((*ODD_NUMBERS, *ODD_FLOATS))
    deep = rng.choice((50, 2_000, 100_000))
    return rng.choice(
        (
            *(None, True, False, [], {}, [[]], [None], {"": None}, rng.choice(ODD_NUMBERS), rng.choice(ODD_FLOATS)),
            *(rng.choice(ODD_TEXTS), Raw("[" * deep + "]" * deep), Raw('{"a":' * deep + "1" + "}" * deep)),
            *(Raw("1" * 5_000), Raw("1e999999999"), list(range(3_000))),
        )
    )


def _set(holder: Any, key: Any, rng: random.Random) -> None:
    holder[key] = odd(rng, holder[key])


def _near(holder: Any, key: Any, rng: random.Random) -> None:
    """A number next to the right one; for anything else a copy of a value elsewhere."""
    value = holder[key]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        holder[key] = rng.choice((value + 1, value - 1, value * 2, -value, value * 1_000_003))
    elif isinstance(value, str) and value:
        holder[key] = rng.choice((value[:-1], value + "x", value.upper(), value * 2, value[::-1]))
    else:
        _set(holder, key, rng)


def _drop(holder: Any, key: Any, rng: random.Random) -> None:
    del holder[key]


def _add(holder: Any, key: Any, rng: random.Random) -> None:
    """A surplus key or item, or one that occurs twice."""
    if isinstance(holder, list):
        holder[key:key] = [holder[key]] * rng.choice((1, 1, 2, 500)) if rng.random() < 0.7 else [odd(rng)]
    else:
        holder[rng.choice(ODD_TEXTS[:20]) + rng.choice(("", str(key)))] = rng.choice((holder[key], odd(rng)))


def _move(holder: Any, key: Any, rng: random.Random) -> None:
    """Two values of one object or list exchanged."""
    other = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    holder[key], holder[other] = holder[other], holder[key]


def _wrap(holder: Any, key: Any, rng: random.Random) -> None:
    value = holder[key]
    holder[key] = rng.choice(([value], {"value": value}, str(value), {str(key): value}, [value] * 3))


def dumped(value: Any, rng: random.Random) -> bytes:
    """JSON text of the value, now and then with every key of an object twice."""
    raw: list[Raw] = []

    def marked(item: Any) -> Any:
        if isinstance(item, Raw):
            raw.append(item)
            return f"RAW-{len(raw) - 1}-RAW"
        if isinstance(item, dict):
            return {key: marked(part) for key, part in item.items()}
        return [marked(part) for part in item] if isinstance(item, list) else item

    text = json.dumps(marked(value), ensure_ascii=rng.random() < 0.7)
    for i, item in enumerate(raw):
        text = text.replace(f'"RAW-{i}-RAW"', item)
    if rng.random() < 0.03 and text.startswith("{"):
        text = "{" + text[1:-1] + "," + text[1:]
    return text.encode(errors="surrogatepass")


# Safetensors


def safetensors_damaged(data: bytes, rng: random.Random) -> bytes:
    """A wrong header, a wrong length of it, a number that is not finite, or damaged bytes."""
    length = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + length], data[8 + length :]
    kind = rng.random()
    if kind < 0.5:
        header = json_damaged(header, rng)
        return len(header).to_bytes(8, "little") + header + rest
    if kind < 0.6:
        lies = (0, 1, length - 1, length + 1, len(data), 2**31, 2**40, 2**63, 2**64 - 1)
        return rng.choice(lies).to_bytes(8, "little") + data[8:]
    return not_finite(data, rng) if kind < 0.75 else damaged(data, rng)


def not_finite(data: bytes, rng: random.Random) -> bytes:
    """NaN, infinity or a huge number instead of an fp32 number after the header."""
    start = 8 + int.from_bytes(data[:8], "little")
    at = start + 4 * rng.randrange(max((len(data) - start) // 4, 1))
    value = struct.pack("<f", rng.choice((float("nan"), float("inf"), float("-inf"), 3e38)))
    return data[:at] + value + data[at + 4 :]


# What a name is


def special(path: Path, rng: random.Random) -> str:
    """Puts something else than a regular file in the file's place; says what."""
    outside = path.parent / f"outside-{path.name}"
    kinds: dict[str, Callable[[], object]] = {
        "fifo": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "device link": lambda: path.symlink_to(rng.choice(DEVICES)),
        "dangling link": lambda: path.symlink_to("nowhere"),
        "link to itself": lambda: path.symlink_to(path.name),
        "link out": lambda: path.symlink_to("/etc/hostname"),
        "link to a folder": lambda: path.symlink_to("/proc"),
        "endless file": lambda: path.symlink_to("/proc/self/mem"),
        "socket": lambda: _socket(path),
        "unreadable": lambda: path.touch(mode=0),
        "missing": lambda: None,
    }
    path.unlink()
    outside.unlink(missing_ok=True)
    kind = rng.choice(list(kinds))
    kinds[kind]()
    return kind


def _socket(path: Path) -> None:
    held = socket.socket(socket.AF_UNIX)
    here = os.open(path.parent, os.O_RDONLY)
    try:  # names of sockets are short
        held.bind(f"/proc/self/fd/{here}/{path.name}")
    finally:
        os.close(here)
        held.close()
