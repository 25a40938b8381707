"""The command behind the table of W8A8: programs take turns, missing ones are named, and steps are timed one by one."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.tools.evaluate import peers
from draftwood.tools.measure import products, race, w8a8, w8a8_shown


def test_steps_are_timed_and_leave_the_text_as_it_was(tiny_bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ROWS", (1, 2, 4)), ("TEXT", 20), ("SLOTS", 128)):
        monkeypatch.setattr(w8a8, name, value)
    found = w8a8.step_ms(CpuEngine(Bundle.open(tiny_bundle)), repeats=2)
    assert list(found) == [1, 2, 4] and min(found.values()) > 0


def test_peers_that_are_missing_are_named_and_others_step_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "QUANTISED_PEERS", {"small": ("no_such_package", None)})
    monkeypatch.setattr(race, "PEERS", {"plain": ("json", lambda *_: lambda ids, count: [1] * count)})
    monkeypatch.setattr(peers, "PEERS", {**race.PEERS, "small": ("no_such_package", peers.genai)})
    found, missing = race.opened_peers(tmp_path, tmp_path, 1)
    assert list(found) == ["plain"] and missing["small"].startswith("not installed")


def test_a_race_counts_every_program_on_every_prompt() -> None:
    asked: list[tuple[str, int]] = []

    def way(name: str):
        return lambda ids, count: asked.append((name, ids[0])) or [7] * count

    rates = race.race({"draftwood a": way("a"), "other": way("b")}, [[1], [2]], count=5, rounds=2)
    assert sorted(asked[2:]) == [(name, prompt) for name in "ab" for prompt in (1, 1, 2, 2)]
    assert all(len(values) == 2 and min(values) > 0 for values in rates.values())


def test_the_ratio_is_of_our_best_and_of_the_best_peer_round_by_round() -> None:
    rates = {"draftwood a": [1.0, 1.0], "draftwood b": [4.0, 9.0], "slow": [1.0, 2.0], "fast": [2.0, 3.0]}
    found = race.standing(rates)
    assert (found["best"], found["best_peer"]) == ("draftwood b", "fast")
    assert found["over_best_peer"] == {"median": 2.5, "low": 2.0, "high": 3.0}
    assert race.standing({"draftwood a": [1.0]})["over_best_peer"] is None


def test_a_dense_teacher_has_the_same_sizes_and_no_zeros(tiny_teacher: Path, tmp_path: Path) -> None:
    made = Checkpoint.open(w8a8.dense(tiny_teacher, tmp_path / "dense"))
    assert made.config == Checkpoint.open(tiny_teacher).config
    tensors = load_file(tmp_path / "dense/model.safetensors")
    assert all(value.count_nonzero() == value.numel() for value in tensors.values())


@pytest.mark.parametrize("form", products.FORMS)
def test_products_of_every_form_are_timed(form: str) -> None:
    session = products.product(form, 64, 96, 1)
    assert session.run(None, {"x": torch.randn(3, 64).numpy()})[0].shape == (3, 96)
    assert products.best_ms([session], 3, 64, repeats=1) > 0


def report() -> dict:
    one = {"plain_tokens_per_s": 10.0, "speculative_tokens_per_s": 20.0, "identical": 3, "turns": 4, "ties": 1}
    row = {"size": "native", "rounds": 2, "peak_gops": 200.0, "reached": {1: 0.5, 2: 0.75}}
    row |= {name: one | {"step_ms": {1: 2.0, 2: 3.0}} for name in w8a8_shown.NAMES}
    ratio = {"median": 2.5, "low": 2.0, "high": 3.0}
    raced = {"tokens_per_s": {"draftwood b": 5.0, "fast": 2.0}, "best": "draftwood b", "best_peer": "fast"}
    row |= {"paired": {"plain W8A8 over plain fp32": ratio}}
    row |= {"race": {**raced, "over_best_peer": ratio, "missing": {"llama.cpp": "not installed"}}}
    return {"sizes": [row], "machine": {"model": "a processor", "features": ["amx_int8"]}}


def test_the_table_has_a_line_a_precision_the_ratios_and_who_is_missing(tmp_path: Path) -> None:
    text = w8a8_shown.table(report())
    assert text.count("3/4") == 3 and text.endswith("a processor, amx_int8")
    assert "plain W8A8 over plain fp32: 2.50 (2.00 to 3.00)" in text
    assert "draftwood b over the best CPU peer at any precision, fast: 2.50 (2.00 to 3.00)" in text
    assert "llama.cpp: missing, not installed" in text and "75.0%" in text
    w8a8_shown.draw(json.loads(json.dumps(report())), tmp_path / "w8a8.png")
    assert (tmp_path / "w8a8.png").stat().st_size > 1000


def test_a_size_is_measured_and_raced(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ROWS", (1, 2)), ("TEXT", 20), ("SLOTS", 128), ("peak_gops", lambda threads: 100.0)):
        monkeypatch.setattr(w8a8, name, value)
    monkeypatch.setattr(w8a8, "_bundles", lambda *_: dict.fromkeys(w8a8_shown.NAMES, tiny_bundle))
    monkeypatch.setattr(w8a8, "_teacher", lambda *_: (tmp_path, tmp_path))
    monkeypatch.setattr(w8a8, "opened_peers", lambda *_: ({"other": lambda ids, count: [1] * count}, {}))
    given = ["--work", str(tmp_path), "--calibration", "none", "--sizes", "native", "--rounds", "2", "--limit", "1"]
    assert w8a8.main([*given, "--max-new-tokens", "4", "--race", "1", "--png", str(tmp_path / "w8a8.png")]) == 0
    assert (tmp_path / "w8a8.png").is_file()
