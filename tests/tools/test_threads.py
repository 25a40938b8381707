"""Threads on one bundle: what differs and what fails is told, and only a decision within the noise is excused."""

from pathlib import Path
from typing import Any

import pytest

import draftwood
from draftwood.errors import RequestError
from draftwood.runtime.opened import OpenedBundle
from draftwood.tools.measure.threads import measure, pause_beside, text


@pytest.fixture
def model(tiny_bundle: Path) -> Any:
    with draftwood.open(tiny_bundle, threads=1) as opened:
        yield opened


def test_texts_of_threads_are_the_plain_ones(model: OpenedBundle) -> None:
    report = measure(model, threads=3, texts=6, minutes=0.001, seed=1)
    assert report["ok"] and report["equal"] == 6 and report["soak_equal"] == report["soak_texts"] >= 6
    assert report["differences"] == [] and report["resident_mb"]


def test_a_wrong_token_is_no_tie(model: OpenedBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = model.generate

    def altered(**request: Any) -> Any:
        result = honest(**request)
        if request.get("policy") != "plain":
            object.__setattr__(result, "token_ids", (*result.token_ids[:-1], (result.token_ids[-1] + 1) % 300))
        return result

    monkeypatch.setattr(model, "generate", altered)
    report = measure(model, threads=2, texts=3, minutes=0, seed=1)
    assert not report["ok"] and report["equal"] == 0 and len(report["differences"]) == 3
    assert "NOT A TIE" in text(report)


def test_what_a_thread_raises_is_told(model: OpenedBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = model.generate

    def failing(**request: Any) -> Any:
        if request.get("policy") != "plain":
            raise RuntimeError("freed memory")
        return honest(**request)

    monkeypatch.setattr(model, "generate", failing)
    report = measure(model, threads=2, texts=3, minutes=0, seed=1)
    assert not report["ok"] and report["errors"] == 3 and "freed memory" in text(report)


def test_the_pause_beside_a_prompt_is_told(model: OpenedBundle) -> None:
    found = pause_beside(model, tokens=100, seed=1)
    assert found["tokens"] == 100 and found["prompt_seconds"] > 0 and found["longest_pause_seconds"] > 0
    report = {"equal": 1, "texts": 1, "threads": 1, "differences": [], "errors": 0, "beside": found}
    assert "beside a prompt of 100 tokens" in text(report)
    with pytest.raises(RequestError, match="--beside 100000: expected 1 to "):
        pause_beside(model, tokens=100_000, seed=1)
