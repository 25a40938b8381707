"""A device's memory for the stand-in: every block is guarded, nothing that was freed is ever used again."""

import ctypes
from dataclasses import dataclass, field

_GUARD, _FREED, _FRESH = 0xA5, 0xDD, 0xFF  # 0xFF is no number in bf16, fp16 and fp32
_GUARD_BYTES = 64


class Misuse(Exception):
    """A call that the documents of AscendCL do not allow."""


@dataclass
class Block:
    """Memory at a 64-byte address; what is past its size, up to the padded one, may be touched by a kernel."""

    size: int
    padded: int
    address: int
    raw: ctypes.Array = field(repr=False)
    live: bool = True

    def guarded(self) -> bool:
        begin = ctypes.addressof(self.raw)
        before = ctypes.string_at(begin, self.address - begin)
        end = self.address + self.padded
        after = ctypes.string_at(end, begin + len(self.raw) - end)
        return set(before + after) == {_GUARD}


@dataclass
class Heap:
    """Blocks of one kind of memory; ``room`` is what may be taken, None for any amount."""

    name: str
    padding: int
    room: int | None = None
    blocks: list[Block] = field(default_factory=list)
    peak: int = 0

    def take(self, size: int) -> int:
        """A new block's address; 0 if there is no room."""
        if size <= 0:
            raise Misuse(f"{self.name}: {size} bytes asked for; expected at least 1")
        padded = -(-size // 32) * 32 + self.padding
        held = sum(block.padded for block in self.blocks if block.live)
        if self.room is not None and held + padded > self.room:
            return 0
        self.peak = max(self.peak, held + padded)
        raw = (ctypes.c_ubyte * (padded + 64 + 2 * _GUARD_BYTES))()
        ctypes.memset(raw, _GUARD, len(raw))
        address = -(-(ctypes.addressof(raw) + _GUARD_BYTES) // 64) * 64
        ctypes.memset(address, _FRESH, padded)
        self.blocks.append(Block(size, padded, address, raw))
        return address

    def give_back(self, address: int) -> None:
        block = next((block for block in self.blocks if block.address == address), None)
        if block is None:
            raise Misuse(f"{self.name}: {address:#x} was never allocated")
        if not block.live:
            raise Misuse(f"{self.name}: {address:#x} freed twice")
        if not block.guarded():
            raise Misuse(f"{self.name}: written outside of the block of {block.size} bytes at {address:#x}")
        block.live = False
        ctypes.memset(block.address, _FREED, block.padded)

    def holds(self, address: int) -> bool:
        return any(b.live and b.address <= address < b.address + b.padded for b in self.blocks)

    def require(self, address: int, count: int, what: str, padded: bool = False) -> None:
        """Misuse unless ``count`` bytes at an address lie in one live block, with the bytes after it that a kernel may
        touch."""
        count = -(-count // 32) * 32 + self.padding if padded else count
        for block in self.blocks:
            if block.address <= address and address + count <= block.address + block.padded:
                if not block.live:
                    raise Misuse(f"{what}: {self.name} memory at {address:#x} is used after it was freed")
                if not padded and address + count > block.address + block.size:
                    raise Misuse(f"{what}: {count} bytes reach past a {self.name} block of {block.size} bytes")
                return
        raise Misuse(f"{what}: {count} bytes at {address:#x} lie in no {self.name} block")

    def left(self) -> list[str]:
        """Faults at the end: blocks that nobody freed, or that were written past."""
        return [
            f"{self.name}: {b.size} bytes at {b.address:#x} {'never freed' if b.live else 'overwritten'}"
            for b in self.blocks
            if b.live or not b.guarded()
        ]
