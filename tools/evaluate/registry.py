"""All sections, in the order in which the report shows them."""

from draftwood.tools.evaluate.section import Section
from draftwood.tools.evaluate.sections import (
    ablations,
    attention,
    bitwise,
    budget,
    coupled,
    exactness,
    launches,
    lengths,
    peers,
    quantised,
    shapes,
    steps,
    turns,
    vocabulary,
    window,
)

SECTIONS: dict[str, Section] = {
    section.name: section
    for section in (
        turns.SECTION,
        lengths.SECTION,
        coupled.SECTION,
        exactness.SECTION,
        bitwise.SECTION,
        quantised.SECTION,
        launches.SECTION,
        peers.SECTION,
        steps.SECTION,
        shapes.SECTION,
        budget.SECTION,
        window.SECTION,
        attention.SECTION,
        vocabulary.SECTION,
        ablations.SECTION,
    )
}
