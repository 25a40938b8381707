"""The processors that a process may use."""

import os
from pathlib import Path

import pytest

from draftwood.threads import counted_threads, default_threads


def test_a_containers_quota_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    (own := tmp_path / "own").write_text("0::/\n")
    threads = []
    for content in ("200000 100000\n", "250000 100000\n", "50000 100000\n", "max 100000\n", "9999999 100000\n", ""):
        (tmp_path / "cpu.max").write_text(content)
        threads.append(default_threads(tmp_path, own))
    assert threads == [2, 2, 1, 64, 64, 64]
    assert default_threads(tmp_path / "missing", tmp_path / "missing") == 64


@pytest.mark.parametrize(
    ("slice_", "service", "threads"), [("max", "400000", 4), ("200000", "max", 2), ("max", "max", 64)]
)
def test_a_services_quota_counts(
    slice_: str, service: str, threads: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CPUQuota= of its unit, or of its slice; the outermost group has no file."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    (own := tmp_path / "own").write_text("9:name=systemd:/\n0::/a.slice/b.service\n")
    (tmp_path / "a.slice" / "b.service").mkdir(parents=True)
    (tmp_path / "a.slice" / "cpu.max").write_text(f"{slice_} 100000\n")
    (tmp_path / "a.slice" / "b.service" / "cpu.max").write_text(f"{service} 100000\n")
    assert default_threads(tmp_path, own) == threads


def test_a_system_without_masks_has_all_its_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert default_threads() == counted_threads(None) == os.cpu_count()
