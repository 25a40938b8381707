"""The processors that a process may use."""

import os
from pathlib import Path

import pytest

from draftwood.threads import counted_threads, default_threads


def test_a_containers_quota_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    limit, threads = tmp_path / "cpu.max", []
    for content in ("200000 100000\n", "250000 100000\n", "50000 100000\n", "max 100000\n", "9999999 100000\n", ""):
        limit.write_text(content)
        threads.append(default_threads(limit))
    assert threads == [2, 2, 1, 64, 64, 64]
    assert default_threads(tmp_path / "missing") == 64


def test_a_system_without_masks_has_all_its_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert default_threads() == counted_threads(None) == os.cpu_count()
