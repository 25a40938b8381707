"""The options of opening travel as one object, and are refused in one line."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from draftwood.errors import BundleError, RequestError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.choice import open_engine
from draftwood.runtime.engines.opening import USUAL, Opening
from draftwood.runtime.engines.registry import engine_kind
from draftwood.tools.cluster.replica import Deployed
from draftwood.tools.serve.messages import EngineArguments


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"thread": 1}, "thread: no such option of opening; expected one of engine, verify, threads, "),
        ({"threads": 0}, "threads: Expected `int` >= 1"),
        ({"threads": "two"}, "threads: Expected `int | null`, got `str`"),
        ({"verify": "slow"}, "verify: Invalid enum value 'slow'"),
        ({"cache_bytes": 0}, "cache_bytes: Expected `int` >= 1"),
        ({"waiting": -1}, "waiting: Expected `int` >= 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(RequestError) as found:
        USUAL.but(**options)
    assert str(found.value).startswith(line)


@pytest.mark.parametrize("engine", ["static", "openvino", "qnn"])
@pytest.mark.parametrize("four_bits", [False, True])
def test_a_bundle_for_an_npu_alone_is_refused(tiny_bundle: Path, engine: str, four_bits: bool) -> None:
    for package in engine_kind(engine).packages:
        pytest.importorskip(package)
    bundle = Bundle.open(tiny_bundle)
    (graphs,) = bundle.manifest.graph_sets
    weights = "uint4" if four_bits else "float32"
    graphs = msgspec.structs.replace(
        graphs, target="ge", precision=msgspec.structs.replace(graphs.precision, weights=weights)
    )
    manifest = msgspec.structs.replace(bundle.manifest, graph_sets=(graphs,))
    with pytest.raises(BundleError, match="no ONNX graphs of fixed sizes; build it with --target onnx or onnx,ge"):
        open_engine(replace(bundle, manifest=manifest), Opening(engine=engine))


def test_an_opening_reaches_the_engines_process_as_it_is() -> None:
    opening = Opening(engine="cpu", threads=2, cache_bytes=5, prefixes=False, waiting=3, verify="fast")
    for kind in (EngineArguments(bundle="b", opening=opening), Deployed(bundle="b", manifest="", opening=opening)):
        assert msgspec.json.decode(msgspec.json.encode(kind), type=type(kind)) == kind
    assert Opening(threads=2).but(engine="cpu") == Opening(engine="cpu", threads=2)
