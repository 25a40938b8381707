"""Measurements of texts that join others agree with the decoding."""

from pathlib import Path

from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.engines.opening import Opening
from draftwood.tools.measure.waits import BEFORE, bench_waits
from draftwood.tools.prompts import Prompt


class Small(CpuEngine):
    """Four launches and more for a prompt."""

    prefill_rows = 32


def test_both_are_measured(tiny_bundle: Path) -> None:
    engine = Small(Bundle.open(tiny_bundle), Opening(threads=1))
    prompts = [Prompt(id="a", source="s", conversation="c", text="the cat sat on the mat")]
    found = bench_waits(engine, prompts, 2)
    turn, long = found["second_turn"], found["long_prompt"]
    assert turn["equal"] and turn["first_turn_tokens"] <= turn["prefix_tokens"] < turn["first_turn_tokens"] + 16
    assert 0 < turn["ratio"] < 1  # two launches against eight
    assert long["texts"] == 2 and long["prompt_tokens"] > engine.bundle.manifest.dims.context - 3 * BEFORE
    assert long["longest_wait_ms"] > 0 and long["prompt_launch_ms"] > 0 and long["step_ms"] > 0
