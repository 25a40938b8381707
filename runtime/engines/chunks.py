"""Which prefill graphs a prompt goes through: the launches that take least in all.

A launch reads all weights and multiplies them with all its rows, padded ones too; the longer of the two counts. Up to
`KNEE` rows that is the weights, so a launch costs the same for any rows; from then on its rows. Nothing is measured:
the same prompt goes through the same graphs every time, and has the same bits.

Example: graphs of 128 and 512 rows take 130 tokens in two launches of 128, and 300 in one of 512.
"""

from __future__ import annotations

from functools import lru_cache

# Rows at which products take as long as the weights they read, in bf16. That is 195 on a 910B3, 235 on a 910B1, 910B2
# and a die of a 910C, and 326 on a 910B4. The figures are those of `draftwood.compiler.device`: peaks of cube and
# memory, times the share that is reached.
KNEE = 200
# While more of the largest launch is left, it is the next one: of a row it costs the least.
_PEELED = 4
_KEPT = 64  # tables


def next_rows(left: int, room: int, sizes: tuple[int, ...]) -> int:
    """Rows of the prefill graph that is to run next; 0 if none fits.

    Args:
        left: tokens of the prompt that are not in the cache, 1 or more.
        room: rows that fit into the cache after those that are, ``left`` or more.
        sizes: rows of the graphs there are, ascending.
    """
    if not sizes:
        return 0
    if left > _PEELED * sizes[-1]:
        return sizes[-1]
    return _first_rows(min(room - left, sizes[-1]), sizes)[left]


@lru_cache(_KEPT)
def _first_rows(spare: int, sizes: tuple[int, ...]) -> list[int]:
    """Rows of the first launch by the tokens that are left, if ``spare`` more rows fit; 0 if none does."""
    # By tokens left: the launches' cost, their number, and all their rows; the less the better, in that order.
    least, first = [(0, 0, 0)], [0]
    for left in range(1, _PEELED * sizes[-1] + 1):
        ways = [(_after(least[left - 1], 1), 0)]  # without a graph that fits, a token is a launch
        ways += [(_after(least[max(left - rows, 0)], rows), rows) for rows in sizes if rows <= left + spare]
        best, rows = min(ways, key=lambda way: (way[0], -way[1]))
        least.append(best)
        first.append(rows)
    return first


def _after(rest: tuple[int, int, int], rows: int) -> tuple[int, int, int]:
    cost, count, total = rest
    return cost + max(rows, KNEE), count + 1, total + rows
