"""Texts through OpenVINO's CPU device: with any tree they equal plain decoding, and onnxruntime's."""

from pathlib import Path

import numpy as np
import pytest

from draftwood.errors import RequestError
from draftwood.manifest import GraphSignature
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.opening import Opening
from draftwood.runtime.engines.openvino import OpenVinoEngine
from draftwood.runtime.engines.static import OnnxStaticEngine
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.tests.decoded import decoded
from draftwood.threads import default_threads

pytest.importorskip("openvino")
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, top_p=0.9, seed=3)}


@pytest.fixture(scope="module", params=["medusa", "eagle3", "fasteagle"])
def engine(request: pytest.FixtureRequest, tiny_bundles: dict[str, Path]) -> OpenVinoEngine:
    return OpenVinoEngine(Bundle.open(tiny_bundles[request.param]), Opening(threads=1))


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_every_gear_gives_the_plain_text(engine: OpenVinoEngine, sampling: Sampling, prompt: list[int]) -> None:
    slots = min(gear.slots for gear in engine.bundle.manifest.gears)
    gears = [gear.name for gear in engine.bundle.manifest.gears if gear.slots == slots]
    asked = {"sampling": sampling, "max_new_tokens": 40}
    texts = {gear: decoded(engine, prompt, gear, **asked).token_ids for gear in gears}
    plain = decoded(OnnxStaticEngine(engine.bundle, Opening(threads=1)), prompt, f"plain-kv{slots}", **asked).token_ids
    assert len(gears) > 1 and len(plain) == 40
    assert texts == dict.fromkeys(gears, plain)


def test_a_text_grows_into_the_next_kv_length(bundle: Bundle, prompt: list[int]) -> None:
    engine = OpenVinoEngine(bundle, Opening(threads=1))
    texts = [decoded(engine, prompt, gear, max_new_tokens=120) for gear in ("plain-kv128", "ragged-kv128")]
    assert texts[0].token_ids == texts[1].token_ids and len(texts[0].token_ids) == 120  # past 128 slots
    assert texts[1].steps < texts[0].steps


def test_caches_are_the_requests_own_tensors(bundle: Bundle, prompt: list[int]) -> None:
    engine = OpenVinoEngine(bundle, Opening(threads=1))
    state = engine.begin(128)
    engine.start(state, np.array(prompt))
    graph: GraphSignature = next(graph for graph in engine.graphs if graph.kind == "prefill" and graph.slots == 128)
    bindings, _ = engine.executor.open(graph)
    for name, buffer in zip(graph.caches, state.kv.buffers, strict=True):
        for end in (name, f"{name}.out"):
            assert bindings._request.get_tensor(end).data.ctypes.data == buffer.ctypes.data
        assert np.abs(buffer[:, : len(prompt)]).min(axis=(0, 2)).all() and not buffer[:, 100:-1].any()


def test_a_prompt_beyond_the_context_is_refused(bundle: Bundle) -> None:
    with pytest.raises(RequestError, match="prompt: 255 tokens, but the bundle's context is 255 with the answer"):
        decoded(OpenVinoEngine(bundle, Opening(threads=1)), [7] * 255, "plain-kv128")


@pytest.mark.parametrize("threads", [1, 2])
def test_as_many_threads_as_were_asked_for(bundle: Bundle, threads: int) -> None:
    engine = OpenVinoEngine(bundle, Opening(threads=threads))
    compiled = engine.executor.blobs.compiled(engine.graphs[0])
    assert compiled.get_property("INFERENCE_NUM_THREADS") == min(threads, default_threads())
    assert compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name() == "f32"


def test_no_threads_are_refused(bundle: Bundle) -> None:
    with pytest.raises(RequestError, match="threads 0: expected 1 to"):
        OpenVinoEngine(bundle, Opening(threads=0))
