"""The command behind the table of W8A8: programs take turns, missing ones are named, and steps are timed one by one."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftwood.compiler.targets.onnx import WEIGHTS_FILE
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.tools.evaluate import peers
from draftwood.tools.measure import products, race, w8a8, w8a8_pairs, w8a8_shown


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
    found = race.standing(rates | {"draftwood b at 0.8": [2.0, 6.0]})
    assert found["best_peer"] == "fast"
    assert found["over_best_peer"] == {
        "draftwood b": {"median": 2.5, "low": 2.0, "high": 3.0},
        "draftwood b at 0.8": {"median": 1.5, "low": 1.0, "high": 2.0},
    }
    assert race.standing({"draftwood a": [1.0]})["over_best_peer"] == {}


def test_a_peer_that_cannot_answer_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opens(model: Path, work: Path, threads: int):
        raise RuntimeError("no such format")

    monkeypatch.setattr(peers, "PEERS", {"good": ("json", lambda *_: lambda ids, count: [1] * count)})
    monkeypatch.setattr(peers, "QUANTISED_PEERS", {"bad": ("json", opens)})
    assert race.answer_once("good", tmp_path, tmp_path, 1) == "answers [1, 1, 1, 1]"
    assert race.answer_once("bad", tmp_path, tmp_path, 1) == "missing, cannot open the checkpoint: no such format"


def test_dense_bundles_have_the_same_graphs_and_no_zeros(tiny_bundle: Path, tmp_path: Path) -> None:
    copied = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, copied)
    (made,) = w8a8_pairs.dense({"fp32": copied}).values()
    before, after = (load_file(folder / WEIGHTS_FILE) for folder in (copied, made))
    floats = [name for name, value in after.items() if value.dtype == torch.float32]
    assert all(after[name].count_nonzero() == after[name].numel() and after[name].isfinite().all() for name in floats)
    assert {name: value.shape for name, value in before.items()} == {n: value.shape for n, value in after.items()}
    assert Bundle.open(made).manifest.trees == Bundle.open(copied).manifest.trees  # the files are as it lists them


def test_whole_numbers_are_filled_from_end_to_end(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(64, 96, dtype=torch.int8), "scale": torch.zeros(64)}, tmp_path / "w.safetensors")
    w8a8_pairs.fill(tmp_path / "w.safetensors")
    made = load_file(tmp_path / "w.safetensors")
    assert (int(made["w"].min()), int(made["w"].max()), int(made["w"].abs().min())) == (-127, 127, 1)
    assert made["scale"].eq(1).all()


def test_rows_and_weights_of_either_sign_have_the_same_products() -> None:
    x_TH = {"x": torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).numpy()}
    made = [products.product(form, 64, 96, 1).run(None, x_TH)[0] for form in products.SAME]
    assert len(made) == 3 and (made[0] == made[1]).all() and (made[0] == made[2]).all()


@pytest.mark.parametrize("form", products.FORMS)
def test_products_of_every_form_are_timed(form: str) -> None:
    session = products.product(form, 64, 96, 1)
    assert session.run(None, {"x": torch.randn(3, 64).numpy()})[0].shape == (3, 96)
    assert products.best_ms([session], 3, 64, repeats=1) > 0


def report() -> dict:
    speeds = {"plain_tokens_per_s": 10.0, "speculative_tokens_per_s": 20.0, "draft_ms": 2.5}
    one = speeds | {"identical": 3, "turns": 4, "ties": 1, "ok": True}
    row = {"size": "native", "rounds": 2, "peak_gops": 200.0, "reached": {1: 0.5, 2: 0.75}}
    row |= {"bundles": {name: one | {"step_ms": {1: 2.0, 2: 3.0}} for name in w8a8_shown.NAMES}}
    ratio = {"median": 2.5, "low": 2.0, "high": 3.0}
    raced = {"tokens_per_s": {"draftwood b": 5.0, "fast": 2.0}, "best_peer": "fast"}
    row |= {"paired": {"plain W8A8 over plain fp32": ratio}}
    row |= {"race": {**raced, "over_best_peer": {"draftwood b": ratio}, "missing": {"llama.cpp": "not installed"}}}
    dense = {"step_ms": {"fp32": {1: 4.0, 2: 4.5}, "w8a8": {1: 1.0, 2: 1.5}}, "one_row": ratio}
    return {"sizes": [row | {"dense": dense}], "machine": {"model": "a processor", "features": ["amx_int8"]}}


def test_the_table_has_a_line_a_precision_the_ratios_and_who_is_missing(tmp_path: Path) -> None:
    text = w8a8_shown.table(report())
    assert text.count("3/4") == 3 and text.endswith("a processor, amx_int8")
    assert "plain W8A8 over plain fp32: 2.50 (2.00 to 3.00)" in text
    assert "draftwood b over the best CPU peer at any precision, fast: 2.50 (2.00 to 3.00)" in text
    assert "llama.cpp: missing, not installed" in text and "75.0%" in text
    assert "a dense step of one row, fp32 over W8A8: 2.50 (2.00 to 3.00)" in text
    w8a8_shown.draw(json.loads(json.dumps(report())), tmp_path / "w8a8.png")
    assert (tmp_path / "w8a8.png").stat().st_size > 1000


@pytest.fixture
def small(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of a run over bundles that are there."""
    for name, value in (("ROWS", (1, 2)), ("TEXT", 20), ("SLOTS", 128), ("peak_gops", lambda threads: 100.0)):
        monkeypatch.setattr(w8a8, name, value)
    monkeypatch.setattr(w8a8, "bundles", lambda *_: dict.fromkeys(w8a8_shown.NAMES, tiny_bundle))
    monkeypatch.setattr(w8a8, "dense", lambda folders: folders)
    monkeypatch.setattr(w8a8, "opened_peers", lambda *_: ({"other": lambda ids, count: [1] * count}, {}))
    given = ["--work", str(tmp_path), "--calibration", "none", "--sizes", "native", "--rounds", "2", "--limit", "1"]
    return [*given, "--max-new-tokens", "4", "--race", "1", "--dense"]


def test_a_size_is_measured_and_raced(small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert w8a8.main([*small, "--png", str(tmp_path / "w8a8.png"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["sizes"]
    assert set(row["bundles"]) == set(w8a8_shown.NAMES)
    assert row["paired"]["drafts of a drafter in W8A8 over one in fp32"]["median"] > 0
    assert [name.endswith(race.AT_SAMPLED) for name in row["race"]["over_best_peer"]] == [False, True]
    assert (tmp_path / "w8a8.png").is_file()


def test_a_run_goes_on_from_what_it_kept(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small += ["--out", str(tmp_path / "out")]
    assert w8a8.main(small) == 0
    monkeypatch.setattr(w8a8, "bench", None)  # a second run measures nothing
    monkeypatch.setattr(w8a8, "race", None)
    text = capsys.readouterr().out
    assert w8a8.main(small) == 0 and capsys.readouterr().out == text
    assert w8a8.main([*small, "--limit", "2"]) == 2
    assert "holds a run with other arguments; take another folder" in capsys.readouterr().err


def test_preparing_opens_all_and_measures_nothing(
    small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(w8a8, "QUANTISED_PEERS", {"small": ("no_such_package", None)})
    monkeypatch.setattr(w8a8, "bench", None)
    monkeypatch.setattr(w8a8, "answer_once", lambda name, *_: "answers [1]")
    assert w8a8.main([*small, "--prepare"]) == 0
    assert capsys.readouterr().out == "native, small: answers [1]\n"
