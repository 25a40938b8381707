"""The cache of measured step times: a file that is no table of this bundle's gears counts as absent."""

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from draftwood.planned import StepTime
from draftwood.runtime import tuned
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.tuned import keep_times, tuned_file, tuned_times


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return Bundle.open(tiny_bundle, "fast")


def right(bundle: Bundle) -> tuple[StepTime, ...]:
    return tuple(StepTime(gear=gear.name, length=16, us=900.0) for gear in bundle.manifest.gears)


@pytest.mark.parametrize(
    "content", [b"\xff\xfe", b"", b"[" * 100_000, b"{}", None], ids=["utf8", "empty", "deep", "object", "fifo"]
)
def test_what_is_no_table_is_ignored(content: bytes | None, bundle: Bundle) -> None:
    path = keep_times(bundle, "cpu", 1, right(bundle))
    assert tuned_times(bundle, "cpu", 1) == right(bundle)
    path.unlink()
    os.mkfifo(path) if content is None else path.write_bytes(content)
    assert tuned_times(bundle, "cpu", 1) == ()


@pytest.mark.parametrize("wild", [{"us": 1e-300}, {"us": 0.5}, {"length": 10**9}, {"late": 10**9}, {"gear": "other"}])
def test_wild_figures_are_ignored(wild: dict[str, object], bundle: Bundle) -> None:
    first, *rest = right(bundle)
    keep_times(bundle, "cpu", 1, (replace(first, **wild), *rest))
    assert tuned_file(bundle, "cpu", 1).exists() and tuned_times(bundle, "cpu", 1) == ()


@pytest.mark.parametrize("changed", ["draftwood", "onnxruntime", "openvino"])
def test_times_of_another_release_are_told_and_not_used(
    changed: str, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tuned.releases_here("openvino")
    keep_times(bundle, "openvino", 1, right(bundle))
    assert here.keys() >= {"draftwood", "onnxruntime"} and tuned_times(bundle, "openvino", 1) == right(bundle)
    monkeypatch.setattr(tuned, "releases_here", lambda engine: here | {changed: "99.0"})
    said = rf"step times were measured with {changed} {here.get(changed, 'absent')} \(here 99\.0\); .* draftwood tune"
    with pytest.warns(tuned.OldTimes, match=said):
        assert tuned_times(bundle, "openvino", 1) == ()
    keep_times(bundle, "openvino", 1, right(bundle))
    assert tuned_times(bundle, "openvino", 1) == right(bundle)
