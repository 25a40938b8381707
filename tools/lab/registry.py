"""All sections, in the order in which the report shows them."""

from draftwood.tools.lab.section import Section
from draftwood.tools.lab.sections import (
    ablations,
    attention,
    batches,
    budget,
    lengths,
    peers,
    rejection,
    service,
    shapes,
    steps,
    turns,
    window,
)

SECTIONS: dict[str, Section] = {
    section.name: section
    for section in (
        turns.SECTION,
        lengths.SECTION,
        peers.SECTION,
        steps.SECTION,
        batches.SECTION,
        service.SECTION,
        shapes.SECTION,
        budget.SECTION,
        window.SECTION,
        attention.SECTION,
        rejection.SECTION,
        ablations.SECTION,
    )
}
