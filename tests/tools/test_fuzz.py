"""The fuzzing harness: the faults that it must notice, and a short run of it over everything."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from draftwood.errors import RequestError
from draftwood.tests.fuzz import worker
from draftwood.tests.fuzz.mutate import json_damaged, safetensors_damaged, special
from draftwood.tests.fuzz.seeds import make_seeds
from draftwood.tests.fuzz.subjects import CANARY, SUBJECTS, Subject, of_case
from draftwood.tests.fuzz.targets import Wrong


def crash(folder: Path, rng: random.Random) -> str:
    os.kill(os.getpid(), signal.SIGSEGV)
    return ""


def hang(folder: Path, rng: random.Random) -> str:
    time.sleep(60)
    return ""


def fill(folder: Path, rng: random.Random) -> str:
    return str(len(bytearray(8 << 30)))


def refuse(folder: Path, rng: random.Random) -> str:
    raise RequestError(f"no\n{folder}")


def execute(folder: Path, rng: random.Random) -> str:
    (folder.parent / CANARY).touch()
    return "ran"


def contradict(folder: Path, rng: random.Random) -> str:
    raise Wrong("other tokens")


def fail(folder: Path, rng: random.Random) -> str:
    raise KeyError("missing")


@pytest.mark.parametrize(
    ("target", "what", "says"),
    [
        (crash, "abort", "signal 11"),
        (hang, "hang", "no end"),
        (fill, "traceback", "MemoryError"),
        (refuse, "refused", r"no\n"),
        (execute, "executed", "ran"),
        (contradict, "wrong", "other tokens"),
        (fail, "traceback", "KeyError"),
    ],
)
def test_every_outcome_is_told_apart(
    target: object, what: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "WALL_SECONDS", 3)
    for name in ("seed", "teacher", "bundles/medusa"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "seed" / "a").write_text("right")
    subject = Subject("toy", ("seed",), lambda folder, rng: "nothing", target)  # type: ignore[arg-type]
    outcome = worker.run_case(tmp_path, subject, 0, 1, tmp_path / "kept")
    assert (outcome.what, outcome.mutation) == (what, "nothing")
    assert says in outcome.says
    assert outcome.good == (what == "refused") != (tmp_path / "kept" / "toy-0-1" / "outcome.json").exists()


@pytest.mark.parametrize("damage", [json_damaged, safetensors_damaged])
def test_a_mutation_depends_on_its_number_alone(damage: object) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    data = len(header).to_bytes(8, "little") + header + b"\0" * 4 if damage is safetensors_damaged else header
    found = [damage(data, random.Random(i)) for i in range(200)]  # type: ignore[operator]
    assert found == [damage(data, random.Random(i)) for i in range(200)]  # type: ignore[operator]
    assert len(set(found)) > 100


def test_special_files_take_the_place_of_a_file(tmp_path: Path) -> None:
    kinds = set()
    for i in range(100):
        path = tmp_path / str(i)
        path.write_text("a")
        kinds.add(special(path, random.Random(i)))
    assert kinds > {"fifo", "device link", "socket", "folder", "dangling link", "link out", "missing"}


def test_every_subject_has_its_turn() -> None:
    wheel = sum(subject.share for subject in SUBJECTS)
    assert {of_case(number).name for number in range(wheel)} == {subject.name for subject in SUBJECTS}
    assert {of_case(number, ("plans",)).name for number in range(3)} == {"plans"}


@pytest.mark.slow  # .ci/run has a stage of its own for it
def test_a_run_over_everything(tiny_bundles: dict[str, Path], tmp_path: Path) -> None:
    """Some cases of every subject, by the command itself: none ends in a way that it must not."""
    import subprocess
    import sys

    make_seeds(tmp_path / "seeds", tiny_bundles)
    command = [sys.executable, "-m", "draftwood.tests.fuzz", "--cases", "130", "--seed", "7", "--json"]
    command += ["--seeds", str(tmp_path / "seeds")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["ok"], report["bad"]
    assert report["cases"] == 130 and set(report["subjects"]) == {subject.name for subject in SUBJECTS}
