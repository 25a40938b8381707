"""A run of tiny bundles in the place of the shipped pairs, which take minutes to build."""

import json
from pathlib import Path

import pytest

from draftwood.tools.lab import bundles, opened
from draftwood.tools.lab.registry import SECTIONS
from draftwood.tools.lab.suite import read_suite

SUITE = """
name = "tiny"
tries = 1
busy_cores = 100.0
prompts = ["{prompts}"]

[sections.turns]
drafters = ["demo-eagle3", "demo-fasteagle"]
temperatures = [0.0, 1.0]
policies = ["adaptive", "tree"]
max_new_tokens = 8
rounds = 2

[sections.lengths]
drafters = ["demo-fasteagle"]
lengths = [40, 60]
limit = 2
max_new_tokens = 6
rounds = 2
"""


@pytest.fixture
def suite_file(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A suite of few tokens; what it opens is tiny."""

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(bundles, "planned_bundle", lambda *_: tiny_bundle)
    monkeypatch.setattr(opened, "TUNE_SECONDS", 0.01)
    prompts = [{"id": f"p{n}", "turns": [f"the cat {n}", "on the mat"], "category": f"c{n % 2}"} for n in range(3)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    path = tmp_path / "tiny.toml"
    path.write_text(SUITE.format(prompts=tmp_path / "prompts.jsonl"))
    return path


@pytest.fixture
def tiny_run(suite_file: Path, tmp_path: Path) -> Path:
    """A whole run's folder."""
    from draftwood.tools.lab.run import evaluate

    evaluate(read_suite(str(suite_file), SECTIONS), tmp_path / "run", tmp_path / "work")
    return tmp_path / "run"
