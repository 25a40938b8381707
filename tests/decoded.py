"""Texts from an engine."""

from draftwood.manifest import Manifest
from draftwood.runtime.decoding import Decoding, Result
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.options import Options
from draftwood.runtime.policy import FixedTree
from draftwood.runtime.trace import Trace


def decoded(
    engine: Engine, prompt: list[int], gear: str | None, trace: Trace | None = None, **options: object
) -> Result:
    """Of 60 tokens, always with one gear, or plainly without a name."""
    settings = Options(**{"max_new_tokens": 60, "ignore_eos": True, **options})
    return Decoding(engine, prompt, settings, FixedTree(engine.bundle, gear), trace).run()


def drafting_gears(manifest: Manifest) -> list[str]:
    """A gear of each tree that is drafted, at its smallest KV length, for what has nothing to do with lengths."""
    smallest: dict[str, str] = {}
    for gear in sorted(manifest.gears, key=lambda gear: gear.slots):
        if gear.draft:
            smallest.setdefault(gear.tree, gear.name)
    return [*smallest.values()]


def ended(text: Decoding) -> Result:
    """The result of a text that takes no more steps."""
    text.end()
    assert text.result is not None
    return text.result
