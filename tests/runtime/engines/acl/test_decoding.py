"""Whole decodings on the ``.om`` files: the tokens of the interpreter's engine, every call as documented."""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.errors import RequestError
from draftwood.manifest import MANIFEST_FILE, Gear
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding
from draftwood.runtime.engines.acl.model import Staging
from draftwood.runtime.options import Options
from draftwood.runtime.policy import FixedTree, widest_gear
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.trees import Topology

from .conftest import compiled
from .om import FLAGS

PROMPT = [5, 9, 23, 41, 7]


def decoded(engine, temperature, plain=False, tokens=12):
    options = Options(max_new_tokens=tokens, sampling=Sampling(temperature=temperature, seed=3), ignore_eos=True)
    policy = FixedTree(engine.bundle) if plain else FixedTree(engine.bundle, widest_gear(engine.bundle))
    return Decoding(engine, PROMPT, options, policy).run()


def interpreted(folder):
    from draftwood.tools.reference.ge import GeEngine

    return GeEngine(Bundle.open(folder))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_tokens_are_those_of_the_interpreter(compiled_bundle: Path, opened: Callable, temperature: float) -> None:
    engine, acl = opened(compiled_bundle)
    reference = interpreted(compiled_bundle)
    texts = {decoded(one, temperature, plain).token_ids for one in (engine, reference) for plain in (True, False)}
    assert len(texts) == 1 and acl.misuses == []
    assert decoded(engine, temperature).steps == decoded(reference, temperature).steps < 12


def test_the_caches_hold_what_the_interpreter_writes(compiled_bundle: Path, opened: Callable) -> None:
    states = []
    for engine in (opened(compiled_bundle)[0], interpreted(compiled_bundle)):
        states.append(engine.begin(128))
        engine.start(states[-1], np.array(PROMPT))
        for _ in range(3):
            engine.step([states[-1]], [engine.bundle.manifest.gears[-1]])
    got, want = states
    assert got.length == want.length > len(PROMPT)
    for mine, theirs in zip(got.kv.buffers, want.kv.buffers, strict=True):
        assert np.array_equal(np.asarray(mine), theirs.float().numpy())


def test_check_compares_it_like_a_device(compiled_bundle: Path, opened: Callable) -> None:
    from draftwood.runtime.rounding import HALF_TOLERANCE
    from draftwood.tools.comparison.compare import Pair, compare_gear
    from draftwood.tools.reference.eager import EagerEngine

    engine, _ = opened(compiled_bundle)
    pair = Pair("acl", EagerEngine(engine.bundle, npu=True), engine, HALF_TOLERANCE)
    found = list(compare_gear(pair, engine.bundle.manifest.gears[-1], np.arange(20)))
    assert {"logits", "choice"} < {one.quantity for one in found} and all(one.ok for one in found)


def calls_of_four_steps(engine, acl, gear: Gear) -> Counter[str]:
    """How often each function was called, after a first step."""
    state = engine.begin(128)
    engine.start(state, np.array(PROMPT))
    engine.step([state], [gear])
    before = len(acl.calls)
    for _ in range(4):
        engine.step([state], [gear])
    return Counter(acl.calls[before:])


def test_a_step_allocates_nothing(compiled_bundle: Path, opened: Callable) -> None:
    """Plain decoding verifies and accepts: one copy each way, one launch, one wait of either. Only the branch and the
    place of the accepted features are bound anew."""
    engine, acl = opened(compiled_bundle)
    counted = calls_of_four_steps(engine, acl, engine.bundle.manifest.gears[0])
    assert counted == {
        "aclrtSetCurrentContext": 8,
        "aclUpdateDataBuffer": 12,
        "aclrtMemcpyAsync": 16,
        "aclmdlExecuteAsync": 8,
        "aclrtSynchronizeStream": 8,
    }


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_noise_is_sent_where_something_is_drawn(
    compiled_bundle: Path, opened: Callable, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    engine, acl = opened(compiled_bundle)
    sent, upload = Counter[str](), Staging.upload
    monkeypatch.setattr(Staging, "upload", lambda self: (sent.update(self.arrays.keys()), upload(self))[1])
    found = decoded(engine, temperature)
    assert sent["noise"] == (found.steps if temperature else 0) and sent["tokens"] > found.steps and not acl.misuses


def test_weights_lie_on_the_device_once(compiled_bundle: Path, opened: Callable) -> None:
    _, acl = opened(compiled_bundle)
    files = list((compiled_bundle / "npu" / "om" / "weight").iterdir())
    models = len(list((compiled_bundle / "npu" / "om").glob("*.om")))
    weights = sum(path.stat().st_size for path in files)
    assert acl.calls.count("aclmdlSetExternalWeightAddress") == len(files) * models
    # One block holds them all; what is left is work memory, shared too, and staging, of a model this small much.
    assert len([b for b in acl.device.blocks if weights <= b.size <= weights + 544 * (len(files) + 1)]) == 1
    assert acl.device.peak < models / 2 * weights


def test_any_thread_may_call(compiled_bundle: Path, opened: Callable) -> None:
    engine, acl = opened(compiled_bundle)
    found: list = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: found.append(decoded(engine, 0.0, tokens=4).token_ids))
        thread.start()
        thread.join()
    assert found[0] == found[1] == decoded(engine, 0.0, tokens=4).token_ids and acl.misuses == []


def test_what_a_text_held_is_given_back_for_the_next(compiled_bundle: Path, opened: Callable) -> None:
    engine, acl = opened(compiled_bundle)
    engine.begin(128)
    peak = acl.device.peak
    for _ in range(3):
        engine.begin(128)
    assert acl.device.peak == peak
    held = engine.begin(128), engine.begin(128)
    assert acl.device.peak > peak and all(state.length == 0 for state in held)


def test_a_closed_engine_refuses_and_leaves_nothing(compiled_bundle: Path, opened: Callable) -> None:
    engine, acl = opened(compiled_bundle)
    state = engine.begin(128)
    engine.close()
    engine.close()
    with pytest.raises(RequestError, match="is closed; open it again"):
        engine.start(state, np.array(PROMPT))
    assert not any(block.live for block in acl.device.blocks)


def test_another_user_of_the_library_keeps_it(compiled_bundle: Path, opened: Callable) -> None:
    """torch_npu in the same process has called aclInit before; it is not ours to end."""
    engine, acl = opened(compiled_bundle, already=True)
    assert decoded(engine, 0.0, tokens=4).token_ids
    engine.close()
    assert "aclFinalize" not in acl.calls


def test_atc_is_called_with_these_flags(compiled_bundle: Path) -> None:
    lines = (compiled_bundle.parent / "atc.txt").read_text().splitlines()
    assert len(lines) == len(list((compiled_bundle / "npu").glob("*.air")))
    assert all(flag in line.split() for line in lines for flag in (*FLAGS, "--soc_version=Ascend910B3"))
    assert (compiled_bundle / "npu" / "om" / "manifest.sha256").is_file() and (
        compiled_bundle / MANIFEST_FILE
    ).is_file()


def built(teacher: Path, drafter: Path, folder: Path, tree: Topology, whole: bool = False) -> Path:
    trees = (("plain", Topology.plain()), ("backbone", tree))
    request = BuildRequest(
        model=teacher, drafter=drafter, trees=trees, slots=(128,), prefill_rows=(16,), targets=("ge",), whole=whole
    )
    build(request, folder / "bundle")
    return compiled(folder / "bundle", folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "fasteagle"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafters_with_caches(
    tiny_teacher: Path, tiny_drafters: dict[str, Path], tmp_path: Path, opened: Callable, kind: str, temperature: float
) -> None:
    folder = built(tiny_teacher, tiny_drafters[kind], tmp_path, Topology.backbone(3, 2))
    engine, acl = opened(folder)
    reference = interpreted(folder)
    got, want = decoded(engine, temperature, tokens=24), decoded(reference, temperature, tokens=24)
    assert got.token_ids == want.token_ids == decoded(engine, temperature, plain=True, tokens=24).token_ids
    assert got.steps == want.steps < 24 and acl.misuses == []


@pytest.mark.slow
def test_a_whole_step_is_one_launch(tiny_teacher: Path, tiny_heads: Path, tmp_path: Path, opened: Callable) -> None:
    """One copy each way, one launch, one wait; and the text of the interpreter's."""
    folder = built(tiny_teacher, tiny_heads, tmp_path, Topology.backbone(2, 3), whole=True)
    engine, acl = opened(folder)
    for temperature in (0.0, 0.8):
        assert decoded(engine, temperature).token_ids == decoded(interpreted(folder), temperature, plain=True).token_ids
    calls = calls_of_four_steps(engine, acl, engine.bundle.manifest.gears[1])
    counted = {name: calls[name] for name in ("aclrtMemcpyAsync", "aclmdlExecuteAsync")}
    assert counted == {"aclrtMemcpyAsync": 8, "aclmdlExecuteAsync": 4} and acl.misuses == []
