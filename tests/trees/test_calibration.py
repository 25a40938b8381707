import hashlib
import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.errors import TreeError
from draftwood.trees.calibration import END, LENGTH_STEP, Calibration, fold_of
from draftwood.trees.calibration_file import read_calibration, write_calibration

from .samples import COUNTED, FIXED, HELDOUT, PATHS, calibrated

CONTEXTS = st.lists(
    st.fixed_dictionaries(
        {"path": PATHS, "group": st.sampled_from(["a", "b", 1, 2, 3])},
        optional={
            "context": st.integers(0, 200),
            "task": st.sampled_from(["code", "chat"]),
        },
    ),
    max_size=12,
)


def collect(items):
    result = Calibration()
    for item in items:
        result.add(**item)
    return result


@FIXED
@given(CONTEXTS, CONTEXTS, st.randoms())
def test_equal_contents_give_equal_bytes_and_merges_add_up(one, two, random):
    together = [*one, *two]
    random.shuffle(together)
    merged = collect(one)
    merged.merge(collect(two))
    assert merged.to_bytes() == collect(together).to_bytes()
    again = Calibration.from_bytes(merged.to_bytes())
    assert again == merged and again.grouped == all(isinstance(item["group"], str) for item in together)
    assert again.contexts.total == len(together)
    assert sum(again.part(part).total for part in ("counted", "heldout")) == len(together)


@FIXED
@given(CONTEXTS)
def test_every_context_keeps_what_was_known_of_it(items):
    calibration = collect(items)
    found, contexts, expected = [], calibration.contexts, []
    for i, count in enumerate(contexts.counts_N.tolist()):
        path = tuple(rank for rank in contexts.ranks_ND[i].tolist() if rank != END)
        task = calibration.tasks[contexts.tasks_N[i]]
        found += [(path, int(contexts.steps_N[i]), task)] * count
    for item in items:
        context = item.get("context")
        step = 0 if context is None else max(1, -(-context // LENGTH_STEP))
        expected.append((item["path"], step, item.get("task", "")))
    assert sorted(found) == sorted(expected)


def test_a_count_of_a_thousand_is_one_row():
    calibration = calibrated({(0, 2): 1000})
    assert calibration.contexts.counts_N.tolist() == [1000]
    assert len(calibration.to_bytes()) < 500


def test_folds_never_change_and_texts_stay_together():
    # Files of other versions and machines must hold out the same texts.
    assert [fold_of(name) for name in ("", "a", "text 1")] == [100, 64, 60]
    calibration = calibrated({(0,): 5, (1, 1): 5, (): 2})
    assert len(set(calibration.contexts.folds_N.tolist())) == 1
    assert calibration.part("counted").total == 12 and calibrated({(): 3}, HELDOUT).part("heldout").total == 3


def test_an_eighth_of_the_texts_is_held_out():
    folds = np.bincount([fold_of(f"text {i}") % 8 for i in range(16000)], minlength=8)
    assert folds.min() > 1800 and folds.max() < 2200  # 2000 each, five standard deviations of 42 allowed


def test_an_empty_file_survives():
    assert Calibration.from_bytes(Calibration().to_bytes()).contexts.total == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"path": [255]}, "below 255"),
        ({"path": [-1]}, "a rank is an integer"),
        ({"path": 3}, "expected a list of ranks"),
        ({"path": [0], "context": -1}, "expected a number of tokens"),
    ],
)
def test_refused_contexts(values, message):
    with pytest.raises(TreeError, match=message):
        Calibration().add(**({"group": 1} | values))


def test_damage_is_refused():
    data = calibrated({(0, 1): 2, (1,): 1}, context=70).to_bytes()
    for broken in (data[:-1], data + b"x", data[:-1] + bytes([data[-1] ^ 1]), b"\xff\n", b"", b"[]", b"{}\n"):
        with pytest.raises(TreeError, match=r"^stats: "):
            Calibration.from_bytes(broken, "stats")


def test_statistics_of_an_older_version_are_refused():
    old = calibrated({(0,): 1}).to_bytes().replace(b'"version":2', b'"version":1')
    with pytest.raises(TreeError, match=r"^stats: expected version 2 of draftwood.calibration, got 1; make the file"):
        Calibration.from_bytes(old, "stats")


def test_columns_out_of_range_are_refused():
    def with_column(index, value):
        calibration = calibrated({(0, 1): 1})
        data = calibration.to_bytes()
        header, payload = data.split(b"\n", 1)
        fields = json.loads(header)
        payload = payload[:index] + bytes([value]) + payload[index + 1 :]
        fields["sha256"] = hashlib.sha256(payload).hexdigest()
        return json.dumps(fields).encode() + b"\n" + payload

    assert Calibration.from_bytes(with_column(0, 2)).contexts.total == 1  # the path's length as it was
    for index, value in ((0, 1), (1, 128), (2, 1), (5, 0), (9, 255)):
        with pytest.raises(TreeError):
            Calibration.from_bytes(with_column(index, value))


def test_files_are_whole_or_absent(tmp_path):
    path = tmp_path / "deep" / "stats"
    write_calibration(calibrated({(0,): 1}), path)
    assert read_calibration(path) == calibrated({(0,): 1})
    assert [file.name for file in path.parent.iterdir()] == ["stats"]
    with pytest.raises(TreeError, match="cannot read"):
        read_calibration(tmp_path / "none")
    with pytest.raises(TreeError, match="cannot be written"):
        write_calibration(Calibration(), path / "below a file")


def test_merging_in_any_order_is_the_same():
    parts = [calibrated({(0,): 1}), calibrated({(1,): 2}, task="b"), calibrated({(2,): 3}, COUNTED, task="a")]
    found = set()
    for order in itertools.permutations(parts):
        merged = Calibration()
        for part in order:
            merged.merge(part)
        found.add(merged.to_bytes())
    assert len(found) == 1
