"""The part of one of several devices: its share of heads, of the feed-forward's width, of a vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, replace

from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.errors import RequestError
from draftwood.manifest import heads_of_rank

# Fields of a teacher's sizes that a device has a part of: the width of an MLP, and of an expert.
WIDTHS = ("intermediate", "expert_intermediate")


@dataclass(frozen=True, slots=True)
class Share:
    """The part of device ``rank`` of ``ranks``, counted from 0."""

    rank: int
    ranks: int

    def of(self, units: int) -> tuple[int, int]:
        """(first, count) of its share of ``units`` things; all devices hold equally many.

        Where there are fewer than devices, several devices hold the same; the last ones' may run past the end.
        """
        if units < self.ranks:
            return self.rank * units // self.ranks, 1
        count = -(-units // self.ranks)
        return self.rank * count, count


def shared_config(config: TeacherConfig, ranks: int) -> TeacherConfig:
    """The sizes of the network that one of ``ranks`` devices runs; hidden size and vocabulary stay whole."""
    if ranks == 1:
        return config
    widths = {name: -(-getattr(config, name) // ranks) for name in WIDTHS if hasattr(config, name)}
    return replace(config, heads=config.heads // ranks, kv_heads=heads_of_rank(config.kv_heads, ranks), **widths)


def check_ranks(config: TeacherConfig, ranks: int, what: str) -> None:
    """RequestError if ``ranks`` devices cannot have equal shares of the network that ``what`` names."""
    heads, kv_heads = config.heads, config.kv_heads
    if (config.quantised or config.packed) and ranks > 1:
        raise RequestError(
            f"--ranks {ranks}: {what} is quantised; expected plain weights, because a row has another scale on every"
            " rank; build for one rank"
        )

    def fits(n: int) -> bool:
        return heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)

    if not fits(ranks):
        able = ", ".join(str(n) for n in range(1, heads + 1) if fits(n))
        raise RequestError(
            f"--ranks {ranks}: {what} has {heads} query and {kv_heads} key/value heads; expected a number of ranks that"
            f" divides the query heads, and the key/value heads or is a multiple of them; choose one of {able}"
        )
    # The last device must have its own row: its first one is among its weights as a token's id.
    if (ranks - 1) * -(-config.vocabulary // ranks) >= config.vocabulary:
        raise RequestError(
            f"--ranks {ranks}: {what} has {config.vocabulary} tokens; expected some for every rank; choose fewer ranks"
        )
