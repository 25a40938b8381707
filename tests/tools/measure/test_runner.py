"""Ways of decoding that take turns."""

from collections import Counter

import pytest

from draftwood.tools.measure.runner import in_turns


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("together", [True, False])
def test_every_way_has_every_place_of_a_round_equally_often(count: int, together: bool) -> None:
    """In the rounds of one text, and over texts of one round each."""
    names, order = "abcde"[:count], list[str]()
    ways = {name: lambda name=name: order.append(name) for name in names}
    if together:
        in_turns(ways, 2 * count)
    else:
        for number in range(2 * count):
            in_turns(ways, 1, number)
    rounds = [order[at : at + count] for at in range(0, len(order), count)]
    places = Counter((place, name) for ways_taken in rounds for place, name in enumerate(ways_taken))
    assert len(rounds) == 2 * count and places == {(place, name): 2 for place in range(count) for name in names}
