"""All sections, in the order in which the report shows them."""

from draftwood.tools.benchmarks.section import Section
from draftwood.tools.benchmarks.sections import batches, lengths, peers, problems, service, turns

SECTIONS: dict[str, Section] = {
    section.name: section
    for section in (turns.SECTION, problems.SECTION, lengths.SECTION, peers.SECTION, batches.SECTION, service.SECTION)
}
