"""Which sessions keep their weights in a second layout, and which share a memory map of the first."""

import os

import pytest

from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.sessions import session

SHARES = "session.disable_prepacking"


def sharing(bundle: Bundle) -> set[str]:
    """Kinds of the graphs whose sessions share the memory map; a star marks those with run-time sizes."""
    found = set()
    for graph in bundle.manifest.graphs_of("onnx"):
        options = session(bundle, graph, 1).get_session_options()
        try:
            shares = options.get_session_config_entry(SHARES) == "1"
        except RuntimeError:  # never set
            shares = False
        if shares:
            found.add(graph.kind + "*" * (not graph.static))
    return found


def test_what_multiplies_rows_at_every_step_is_laid_out(bundle: Bundle) -> None:
    assert sharing(bundle) == {"prefill", "decode"}


def test_static_graphs_share_weights_that_memory_does_not_hold_for_each(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: 1 if name == "SC_PHYS_PAGES" else own(name))
    assert sharing(bundle) == {"prefill", "decode", "verify"}
