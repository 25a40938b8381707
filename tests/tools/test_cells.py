"""The policy's cells: texts behind one prefill, a cell's figures, and a run that goes on where it was stopped."""

import json
from pathlib import Path

import numpy as np
import pytest

from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding, Options
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.policy import policy_for
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.tools.measure import cells
from draftwood.tools.measure.cell_bundles import kv_lengths
from draftwood.tools.measure.prefilled import Prefilled

PROMPTS = [f"the cat sat on the mat and the hat {number}" for number in range(9)]
SMALL = ["--sizes", "native", "--drafter", "demo-fasteagle", "--lengths", "60", "--texts", "2", "--rounds", "1"]


@pytest.mark.parametrize("kind", ["eagle3", "fasteagle"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_one_prefill_serves_many_texts(kind: str, temperature: float, tiny_draft_bundles: dict[str, Path]) -> None:
    engine = CpuEngine(Bundle.open(tiny_draft_bundles[kind]))
    prompt = list(range(5, 45))
    options = Options(max_new_tokens=30, ignore_eos=True, sampling=Sampling(temperature=temperature, seed=3))
    names = [gear.name for gear in engine.bundle.manifest.gears]
    behind = Prefilled(engine, np.array(prompt), 256)
    for name in [*names, *names]:
        own, once = (Decoding(one, prompt, options, policy_for(engine.bundle, name)).run() for one in (engine, behind))
        assert own.token_ids == once.token_ids and own.steps == once.steps


def test_a_cell_is_not_measured_twice(
    tiny_draft_bundles: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = CpuEngine(Bundle.open(tiny_draft_bundles["fasteagle"]))
    monkeypatch.setattr(cells, "opened", lambda *_: engine)
    monkeypatch.setattr(cells, "TUNE_SECONDS", 0.01)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    files = {"--work": tmp_path, "--prompts": tmp_path / "prompts.jsonl", "--out": tmp_path / "cells.jsonl"}
    line = [str(word) for pair in files.items() for word in pair]
    line += [*SMALL, "--max-new-tokens", "6", "--gears", "--json"]
    assert cells.main([*line, "--temperatures", "0"]) == 0
    (first,) = json.loads(capsys.readouterr().out)
    assert first["texts"] == 2 and not first["unequal"] and 0 < first["speedup_p1"] <= first["speedup_mean"]
    assert set(first["speedup_gears"]) == {gear.name for gear in engine.bundle.manifest.gears if gear.draft}
    assert all(one["tokens"] == 5 for one in first["per_text"])
    assert cells.main([*line, "--temperatures", "0,1", "--png", str(tmp_path / "cells.png")]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again[0] == first and [row["temperature"] for row in again] == [0.0, 1.0]
    assert (tmp_path / "cells.png").read_bytes().startswith(b"\x89PNG")


def test_figures_are_of_medians_and_plain_decoding_has_two() -> None:
    seconds = {"plain": 1.1, "plain_again": 0.9, "adaptive": 0.5, "tree": 0.4}
    turn = {"tokens": 10, "steps": 4, "host_share": 0.1, "bound_seconds": 0.45, "gears": ["tree"] * 4, "unequal": []}
    found = cells.summary([turn | {"seconds": seconds}])
    assert found["speedup_mean"] == pytest.approx(2.0) and found["floor_mean"] == pytest.approx(1.1 / 0.9)
    assert found["regret"] == pytest.approx(0.25) and found["of_bound"] == pytest.approx(0.9)
    assert found["tokens_per_step"] == 2.5 and found["share"] == {"tree": 1.0}


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ("{}", [], "line 1: no cell"),
        ("", ["--rounds", "0"], "expected 1 or more"),
        ("", ["--temperatures", "-1"], "0 or more"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    content: str, arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cells.jsonl").write_text(content)
    assert cells.main(["--work", str(tmp_path), "--out", str(tmp_path / "cells.jsonl"), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_kv_lengths_double_until_the_texts_fit() -> None:
    assert kv_lengths(200) == (1024,) and kv_lengths(4160) == (1024, 2048, 4096, 8192)
