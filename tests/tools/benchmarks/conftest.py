"""A run of tiny bundles."""

import json
from pathlib import Path

import pytest

from draftwood.tools.benchmarks import open_bundles
from draftwood.tools.benchmarks.__main__ import main

SUITE = """
name = "tiny"
tries = 1
busy_cores = 100.0
prompts = ["{prompts}"]
bundles = {{ first = "{bundle}", second = "{bundle}" }}

[sections.turns]
temperatures = [0.0, 1.0]
policies = ["adaptive", "tree"]
max_new_tokens = 8
rounds = 2

[sections.lengths]
bundles = ["second"]
lengths = [40, 60]
limit = 2
max_new_tokens = 6
rounds = 2
"""


@pytest.fixture
def suite_file(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A suite of few tokens, over one bundle under two names."""

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(open_bundles, "TUNE_SECONDS", 0.01)
    prompts = [{"id": f"p{n}", "turns": [f"the cat {n}", "on the mat"], "category": f"c{n % 2}"} for n in range(3)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    path = tmp_path / "tiny.toml"
    path.write_text(SUITE.format(prompts=tmp_path / "prompts.jsonl", bundle=tiny_bundle))
    return path


@pytest.fixture
def tiny_run(suite_file: Path, tmp_path: Path) -> Path:
    """A whole run's folder."""
    assert main(["evaluate", "--suite", str(suite_file), "--out", str(tmp_path / "run")]) == 0
    return tmp_path / "run"
