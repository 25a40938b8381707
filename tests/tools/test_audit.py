"""A text drawn again in chains."""

from pathlib import Path

import pytest

from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding, Options
from draftwood.runtime.engines.bitwise import BitwiseEngine
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.policy import Policies
from draftwood.tools.comparison.audit import audit

PROMPT = list(range(5, 45))


@pytest.mark.parametrize("engine", [CpuEngine, BitwiseEngine])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_what_was_decoded_is_drawn_again(tiny_bundle: Path, engine: type[CpuEngine], temperature: float) -> None:
    bundle = Bundle.open(tiny_bundle)
    options, opened = Options.of(max_new_tokens=300, temperature=temperature, ignore_eos=True), engine(bundle, 1)
    result = Decoding(
        opened, PROMPT, options, Policies(bundle).new(options.sampling.greedy, options.max_new_tokens)
    ).run()
    assert result.finish_reason == "context"  # so that the last chain is a short one
    found = audit(opened, PROMPT, result.token_ids, options.sampling)
    assert found.tokens == len(result.token_ids) and found.rows == 7 and found.differing == ()
    assert found.nearest is not None and found.nearest > 0


def test_another_token_is_found(tiny_bundle: Path) -> None:
    bundle = Bundle.open(tiny_bundle)
    options, opened = Options.of(max_new_tokens=20, ignore_eos=True), CpuEngine(bundle, 1)
    tokens = list(
        Decoding(opened, PROMPT, options, Policies(bundle).new(options.sampling.greedy, options.max_new_tokens))
        .run()
        .token_ids
    )
    tokens[-1] = (tokens[-1] + 1) % 300
    assert audit(opened, PROMPT, tokens, options.sampling).differing == (19,)
