"""Measurements of texts that join others agree with the decoding."""

from pathlib import Path

from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.engines.opening import Opening
from draftwood.runtime.engines.static import OnnxStaticEngine
from draftwood.tools.measure.waits import BEFORE, _launches, bench_waits
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


def test_launches_of_graphs_for_prompts_are_counted_at_a_kv_length_that_there_is(tiny_bundle: Path) -> None:
    """The context is a slot shorter; graphs of fixed sizes may also have none for prompts."""
    engine = OnnxStaticEngine(Bundle.open(tiny_bundle))
    largest = max(graph.rows for graph in engine.graphs if graph.kind == "prefill")
    assert _launches(engine, 2 * largest + 1) == 3
    engine.graphs = [graph for graph in engine.graphs if graph.kind != "prefill"]
    assert _launches(engine, 7) == 7
