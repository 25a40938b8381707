"""Weights of four and eight bits in Qualcomm's emulator: they stay as they are packed, and rows are fp16."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.errors import BundleError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding, Options
from draftwood.runtime.engines.qnn import PROVIDER, HtpEngine
from draftwood.runtime.policy import policy_for
from draftwood.tests.packed_checkpoints import save_packed
from draftwood.tools.comparison.compare import QUANTISED_TOLERANCE, Pair, compare_gear
from draftwood.tools.reference.eager import EagerEngine
from draftwood.trees import Topology

TREES = (("plain", Topology.plain()), ("full", Topology.full((2, 1))))


def pair_of(teacher: Path, folder: Path, drafter: Path | None) -> Pair:
    """Its packed layers in the emulator, beside eager PyTorch, whose rows are rounded block by block."""
    trees = TREES if drafter else TREES[:1]
    asked = BuildRequest(
        model=teacher, drafter=drafter, trees=trees, slots=(128,), prefill_rows=(32,), precision="nbits"
    )
    build(asked, folder)
    bundle = Bundle.open(folder)
    return Pair("qnn", EagerEngine(bundle), HtpEngine(bundle), QUANTISED_TOLERANCE)


def assert_alike(pair: Pair, gear: str, prompt: NDArray[np.int64]) -> None:
    found = list(compare_gear(pair, pair.engine.bundle.gear(gear), prompt))
    assert [one for one in found if not one.ok] == [] and set(pair.engine.nodes) == {PROVIDER}


def test_four_bits_with_zeros(tiny_teacher: Path, tmp_path: Path, short_prompt: NDArray[np.int64]) -> None:
    save_packed(tiny_teacher, tmp_path / "teacher", "awq")
    assert_alike(pair_of(tmp_path / "teacher", tmp_path / "bundle", None), "plain-kv128", short_prompt)


def test_eight_bits_of_a_w8a8_teacher(
    quantised_teacher: Path, tiny_heads: Path, tmp_path: Path, short_prompt: NDArray[np.int64]
) -> None:
    pair = pair_of(quantised_teacher, tmp_path / "bundle", tiny_heads)
    assert_alike(pair, "full-kv128", short_prompt)
    bundle, options = pair.engine.bundle, Options(max_new_tokens=10, ignore_eos=True)
    plain, tree = (
        Decoding(pair.engine, short_prompt.tolist(), options, policy_for(bundle, f"{gear}-kv128")).run()
        for gear in ("plain", "full")
    )
    assert tree.token_ids == plain.token_ids and tree.steps < plain.steps


def test_rows_in_eight_bits_are_refused(tiny_bundle: Path) -> None:
    bundle = Bundle.open(tiny_bundle)
    (graphs,) = bundle.manifest.graph_sets
    int8 = msgspec.structs.replace(graphs, precision=msgspec.structs.replace(graphs.precision, weights="int8"))
    with pytest.raises(BundleError, match=r"rounds rows to int8, which .* build it with --precision nbits") as caught:
        HtpEngine(replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, graph_sets=(int8,))))
    assert "\n" not in str(caught.value)
