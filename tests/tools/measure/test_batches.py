"""``bench --batch-size``: equal texts, and figures for every number of texts that was there."""

from dataclasses import replace
from pathlib import Path

import pytest

from draftwood.errors import RequestError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.engines.opening import Opening
from draftwood.runtime.options import Options
from draftwood.runtime.policy import Policies
from draftwood.tools.commands.bench import _print_occupancies
from draftwood.tools.measure.batches import _shares, bench_batches
from draftwood.tools.prompts import Prompt

TEXTS = 3
PROMPTS = [
    Prompt(id=f"{n}", text="the cat sat on the mat "[: 7 + n], conversation=f"{n}", source="cats")
    for n in range(2 * TEXTS)
]


@pytest.fixture(scope="module")
def engine(tiny_bundle: Path) -> CpuEngine:
    return CpuEngine(Bundle.open(tiny_bundle), Opening(threads=1))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_was_chosen_is_told_for_every_number_of_texts(
    engine: CpuEngine, temperature: float, capsys: pytest.CaptureFixture[str]
) -> None:
    options = Options.of(max_new_tokens=20, temperature=temperature, ignore_eos=True)
    ways = Policies(engine.bundle, "plain"), Policies(engine.bundle, "chain-2-kv128")
    report = bench_batches(engine, PROMPTS, options, *ways, TEXTS)
    assert report["ok"] and report["turns"] == 2 * TEXTS
    assert [one["texts"] for one in report["occupancies"]] == [1, 2, 3]
    full = report["occupancies"][-1]
    assert full["plain_tokens_per_s"] == pytest.approx(report["plain_tokens_per_s"])
    assert full["speculative_tokens_per_s"] == pytest.approx(report["speculative_tokens_per_s"])
    # Each text of a full step waits for the whole of it.
    assert full["plain_ms_per_token"] == pytest.approx(1e3 * TEXTS / full["plain_tokens_per_s"])
    assert full["chosen"] == [{"launch": 3, "gear": "chain-2-kv128", "share": 1.0}]
    for one in report["occupancies"]:
        shares = sum(chosen["share"] for chosen in one["chosen"])
        assert shares == pytest.approx(1.0) if one["speculative_steps"] else one["chosen"] == []
    _print_occupancies(report["occupancies"])
    assert "3: chain-2-kv128 100 %" in capsys.readouterr().out


@pytest.mark.parametrize(("long", "turns"), [(3, 4), (7, None)])
def test_prompts_without_room_are_left_out(engine: CpuEngine, long: int, turns: int | None) -> None:
    """What is left may be too little for a last round, or for any."""
    options = Options.of(max_new_tokens=4, ignore_eos=True)
    ways = Policies(engine.bundle, "plain"), Policies(engine.bundle)
    more = [*PROMPTS, *(replace(prompt, id=f"{prompt.id}-2", conversation=f"{prompt.id}-2") for prompt in PROMPTS[:2])]
    cut = [replace(prompt, text="the cat sat on the mat " * 400) for prompt in more[-long:]]
    if turns:
        assert bench_batches(engine, [*more[:-long], *cut], options, *ways, 2)["turns"] == turns
    else:
        with pytest.raises(RequestError, match="--batch-size 2: only 1 of the prompts have room"):
            bench_batches(engine, [*more[:-long], *cut], options, *ways, 2)


def test_every_prompt_has_its_turn(engine: CpuEngine) -> None:
    """Also those that fill no round of their own."""
    options = Options.of(max_new_tokens=4, ignore_eos=True)
    more = [replace(prompt, id=f"{prompt.id}-{n}", conversation=f"{prompt.id}-{n}") for n in "ab" for prompt in PROMPTS]
    ways = Policies(engine.bundle, "plain"), Policies(engine.bundle)
    assert bench_batches(engine, more[:9], options, *ways, 2)["turns"] == 9
    assert _shares(11, 2) == [5, 6] and _shares(4, 1) == [4]


def test_answers_that_never_run_together_are_refused(engine: CpuEngine) -> None:
    ways = Policies(engine.bundle, "plain"), Policies(engine.bundle)
    with pytest.raises(RequestError, match="--batch-size 3: so many answers never ran together"):
        bench_batches(engine, PROMPTS, Options.of(max_new_tokens=1), *ways, TEXTS)


def test_a_round_needs_prompts_and_graphs(engine: CpuEngine) -> None:
    ways = Policies(engine.bundle, "plain"), Policies(engine.bundle)
    with pytest.raises(RequestError, match=r"--batch-size 3: needs 6 prompts or more, got 5"):
        bench_batches(engine, PROMPTS[:5], Options(), *ways, TEXTS)
    for texts in (8, 0, -1):
        with pytest.raises(RequestError, match=rf"--batch-size {texts}: .* has graphs for 1 to 4"):
            bench_batches(engine, PROMPTS, Options(), *ways, texts)
