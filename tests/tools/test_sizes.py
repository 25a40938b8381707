"""Drafters side by side at several sizes: what is reported, what is refused."""

import json
from pathlib import Path

import pytest

from draftwood.tools.measure import sizes
from draftwood.trees import RankPaths


def test_drafters_are_compared_in_one_run(
    tmp_path: Path,
    tiny_teacher: Path,
    tiny_drafters: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With tiny models in the place of the shipped ones, which take minutes to build."""
    paths = RankPaths()
    paths.add((0, 0), 3)
    monkeypatch.setattr(sizes, "models", lambda size, work, drafter: (tiny_teacher, tiny_drafters[drafter[5:]]))
    monkeypatch.setattr(sizes.demo, "rank_paths", lambda temperature, drafter: paths)
    monkeypatch.setattr(sizes, "EQUAL_DEPTH", 2)
    monkeypatch.setattr(sizes, "SLOTS", 256)
    drafters, picture = ["demo-fasteagle", "demo-eagle3"], tmp_path / "sizes.png"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the cat sat"}\n{"prompt": "on the mat"}\n')
    options = ["--work", str(tmp_path / "w"), "--sizes", "native", "--rounds", "2", "--prompts", str(prompts)]
    options += ["--max-new-tokens", "12", "--ignore-eos", "--tree", "chain:2", "--drafter", ",".join(drafters)]
    assert sizes.main([*options, "--json", "--png", str(picture)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["drafter"] for row in rows] == drafters and picture.read_bytes().startswith(b"\x89PNG")
    for row in rows:
        assert row["ok"] and row["identical"] == row["turns"] == 2 and len(row["rounds"]) == 2
        assert row["speedup"] == min(row["speedup_by_round"])  # of two rounds the lower is the median
        assert row["equal_depth_draft_ms"] == row["draft_ms"] > 0 and len(row["gears"]) == 2
        assert 1 < row["accept_length"] == pytest.approx(1 + sum(row["accept_by_position"]))
        assert 0 < row["parameters_m"] < 1
    assert len(sizes.table(rows).splitlines()) == 3
    assert len(list((tmp_path / "w").glob("bundle-native-*"))) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sizes", "7b"], "--sizes 7b: expected native, 110m, 500m"),
        (["--drafter", "mine"], "--drafter mine: expected demo-medusa, demo-eagle3, demo-fasteagle"),
        (["--rounds", "0"], "--rounds 0: expected 1 or more"),
        (["--tree", "plain", "--sizes", "native"], "--tree plain: expected a tree that speculates"),
        (["--tree", "chain:2,budget:5x3x2", "--sizes", "native"], "expected a budget tree alone"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert sizes.main(["--work", str(tmp_path), *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]
