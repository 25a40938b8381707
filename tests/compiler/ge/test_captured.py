"""Captured launches: text and caches of the same steps launched as they are, few records, nothing of the host in one,
caches written where they lie. Held against a stand-in for torch_npu's NPUGraph."""

import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx, nn

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.targets import captured
from draftwood.compiler.targets.captured import BufferPool, CapturedExecutor, Records, write_in_place
from draftwood.compiler.targets.online import InPlaceStep, Started, TorchairExecutor
from draftwood.compiler.targets.staging import HostInputs
from draftwood.errors import InvariantError, LoweringError, RequestError
from draftwood.manifest import Gear, GraphSignature
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding
from draftwood.runtime.engines.npu import EXECUTORS, CapturedEngine
from draftwood.runtime.engines.static import StaticEngine
from draftwood.runtime.options import Options
from draftwood.runtime.policy import FixedTree
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.trees import Topology

from .npugraph import HostRead, Npu

PROMPT = list(range(5, 25))
TREES = (("plain", Topology.plain()), ("ragged", Topology.from_paths([(0,), (1,), (0, 0), (1, 0)])))
SLOW = [pytest.param(one, marks=pytest.mark.slow) for one in (("eagle3", False), ("medusa", True), ("eagle3", True))]


@pytest.fixture(scope="module", params=[("medusa", False), *SLOW], ids=str)
def bundle(request, npu_bundle, tiny_teacher, tiny_drafters, tiny_heads, tmp_path_factory) -> Bundle:
    kind, whole = request.param
    if (kind, whole) == ("medusa", False):
        return Bundle.open(npu_bundle)
    drafter = (tiny_drafters | {"medusa": tiny_heads})[kind]
    asked = BuildRequest(
        model=tiny_teacher, drafter=drafter, trees=TREES, slots=(128,), prefill_rows=(8,), targets=("ge",), whole=whole
    )
    folder = tmp_path_factory.mktemp("captured") / "bundle"
    build(asked, folder)
    return Bundle.open(folder)


@pytest.fixture(scope="module")
def traced(bundle: Bundle) -> dict[str, InPlaceStep]:
    """Steps that were traced, by graph: it takes longer than all that is done with them."""
    return {}


@pytest.fixture
def opened(
    bundle: Bundle, traced: dict[str, InPlaceStep], monkeypatch: pytest.MonkeyPatch
) -> Callable[[], tuple[CapturedEngine, Npu]]:
    """Engines on devices of their own."""
    trace = TorchairExecutor.traced

    def once(executor: TorchairExecutor, graph: GraphSignature) -> InPlaceStep:
        if graph.name not in traced:
            traced[graph.name] = trace(executor, graph)
        return traced[graph.name]

    def one() -> tuple[CapturedEngine, Npu]:
        npu = Npu()
        monkeypatch.setattr(CapturedExecutor, "traced", once)
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, "torch_npu", SimpleNamespace(npu=npu))  # type: ignore[arg-type]
            executor = CapturedExecutor(bundle.folder, bundle.manifest, device="cpu")
        return CapturedEngine(bundle, executor=executor), npu

    return one


def decoded(engine: StaticEngine, temperature: float = 0.0, gear: str = "") -> tuple[int, ...]:
    """With the bundle's tree unless a gear is named."""
    options = Options(max_new_tokens=10, sampling=Sampling(temperature=temperature, seed=3), ignore_eos=True)
    policy = FixedTree(engine.bundle, gear or engine.bundle.manifest.gears[-1].name)
    return tuple(Decoding(engine, PROMPT, options, policy).run().token_ids)


def stepped(engine: StaticEngine, gears: list[Gear]) -> Any:
    state = engine.begin(128)
    engine.start(state, np.array(PROMPT))
    for gear in gears:
        engine.step([state], [gear])
    return state


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_that_of_the_graphs(bundle: Bundle, opened: Callable, temperature: float) -> None:
    from draftwood.tools.reference.ge import GeEngine

    engine, npu = opened()
    texts = {
        decoded(one, temperature, gear.name) for one in (engine, GeEngine(bundle)) for gear in bundle.manifest.gears
    }
    assert len(texts) == 1 and sum(graph.replays for graph in npu.records) > len(npu.records)


def test_a_replay_is_the_launch_to_the_bit(bundle: Bundle, opened: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    gears = [bundle.manifest.gears[i] for i in (1, 1, 1, 0, 1, 0, 0, 1, 1)]
    found = stepped(opened()[0], gears)
    monkeypatch.setattr(Records, "recorded", lambda self, name, launch: launch)
    wanted = stepped(opened()[0], gears)
    assert found.length == wanted.length and found.root == wanted.root
    for mine, theirs in ((found.kv, wanted.kv), (found.draft, wanted.draft)):
        for got, want in zip(mine.buffers, theirs.buffers, strict=True):
            length = found.length - 8  # later rows may wait to be moved
            assert got[:, :length].abs().sum() > 0 and torch.equal(got[:, :length], want[:, :length])


def test_texts_come_to_the_addresses_of_those_before_them(opened: Callable) -> None:
    engine, npu = opened()
    first = decoded(engine)
    count = len(npu.records)
    assert [decoded(engine) for _ in range(3)] == [first] * 3 and len(npu.records) == count
    assert all(graph.replays for graph in npu.records[-2:])


def test_an_address_that_moves_is_recorded_anew(opened: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that live at once have memory of their own; and were it new for every text, the count would tell."""
    engine, npu = opened()
    first = decoded(engine)
    held, count = engine.begin(128), len(npu.records)
    assert decoded(engine) == first and count < len(npu.records) <= 2 * count
    del held
    monkeypatch.setattr(BufferPool, "take", lambda self, shape: self._zeros(shape))
    count, kept = len(npu.records), [engine.begin(128)]
    for _ in range(2):
        assert decoded(engine) == first
        kept.append(engine.begin(128))
    assert len(npu.records) > count


def test_a_record_that_is_taken_for_other_addresses_shows(opened: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that the addresses are there for: a step of another text replayed on this one."""
    engine, _ = opened()
    wanted = stepped(engine, [engine.bundle.manifest.gears[1]] * 3)
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda self: 0)
    engine, _ = opened()
    held = stepped(engine, [engine.bundle.manifest.gears[1]] * 3)
    state = stepped(engine, [engine.bundle.manifest.gears[1]] * 3)
    monkeypatch.undo()
    same = [torch.equal(a, b) for a, b in zip(state.kv.buffers, wanted.kv.buffers, strict=True)]
    assert held.length and not all(same)


def test_a_host_read_ends_the_record(opened: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, npu = opened()
    launched = Started._launched

    def reads(self: Started, given: Any, buffers: Any) -> Any:
        taken = launched(self, given, buffers)
        next(iter(given.values())).sum().item()
        return taken

    monkeypatch.setattr(Started, "_launched", reads)
    with pytest.raises(HostRead, match=r"item|local_scalar"):
        decoded(engine)
    assert npu.records == []


def test_nothing_of_the_host_is_in_a_record(opened: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy in and one out are around a launch; recorded operators read and write the device's memory alone."""
    engine, npu = opened()
    sent, upload = [], HostInputs.upload
    monkeypatch.setattr(HostInputs, "upload", lambda self, arrays: (sent.append(self), upload(self, arrays))[1])
    decoded(engine)
    blocks = [block for step in engine.executor._steps.values() for block in step._downloads.values()]
    near = {block._near.untyped_storage().data_ptr() for block in (*sent, *blocks) if len(block._near)}
    assert near and npu.calls and not any(near & call.memory for call in npu.calls)
    far = {block._far.untyped_storage().data_ptr() for block in sent if len(block._far)}
    for (name, *_), (graph, _) in engine.executor._records.kept.items():
        # A draft may read the device's memory and nothing else.
        assert name.startswith("draft") or any(call.memory & far for call in graph.calls), name


def test_caches_are_written_where_they_lie(bundle: Bundle, opened: Callable) -> None:
    """No operator makes anything as large as a cache."""
    engine, npu = opened()
    decoded(engine)
    cache = engine.begin(128).kv.buffers[0].numel()
    names = [call.func.__name__ for call in npu.calls]
    assert "npu_scatter_nd_update.default" not in names
    largest = max(one.numel() for call in npu.calls for one in call.made if one.dtype == torch.bfloat16)
    assert largest < cache, max(npu.calls, key=lambda c: max((o.numel() for o in c.made), default=0)).func
    for graph in npu.records:
        counts = Counter(call.func.__name__.partition(".")[0] for call in graph.calls)
        assert counts["npu_scatter_nd_update_"] >= 2 * counts["npu_fused_infer_attention_score"]
    assert names.count("npu_fused_infer_attention_score.default") >= len(bundle.manifest.teacher.buffers) // 2


def test_the_oldest_record_goes_where_there_are_too_many(opened: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, npu = opened()
    first = decoded(engine)
    monkeypatch.setattr(captured, "MOST", 3)
    engine, npu = opened()
    assert decoded(engine) == first and len(engine.executor._records.kept) == 3
    assert sum(graph.calls is not None for graph in npu.records) == 3 < len(npu.records)


def test_memory_is_free_when_no_view_is_left() -> None:
    blocks = BufferPool(lambda shape: torch.zeros(shape, dtype=torch.bfloat16))
    for view in (
        lambda b: b.swapaxes(0, 1)[1:], lambda b: b[:, :2], lambda b: b.ravel(), lambda b: b.view(-1)[3:].view(3, 7),
    ):  # fmt: skip
        buffer = blocks.take((4, 6))
        buffer.fill_(1)
        with torch.no_grad():
            place, part = buffer.data_ptr(), view(buffer)
        del buffer
        other = blocks.take((4, 6))
        assert other.data_ptr() != place and not other.any()
        del part
        again = blocks.take((4, 6))
        assert again.data_ptr() == place and not again.any()
        del other, again
    assert blocks.take((6, 4)).data_ptr() != place


def test_its_executor_is_known_by_its_name() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]["entry-points"]
    name = CapturedEngine.offered
    assert EntryPoint(name, project[EXECUTORS][name], EXECUTORS).load() is CapturedExecutor


class Program(nn.Module):
    """A program in the form that steps have."""

    def __init__(self, forward: Callable) -> None:
        super().__init__()
        self.graph, self.held, self.written = fx.symbolic_trace(forward), [], [(1, 0)]


def scattered(cache: Any, rows: Any) -> tuple[Any, Any]:
    written = torch.ops.npu.npu_scatter_nd_update.default(cache, rows, rows)
    return written + 1, written


def copied(cache: Any, rows: Any) -> tuple[Any, Any]:
    written = torch.ops.npu.npu_scatter_nd_update.default(cache, rows, rows)
    return cache + 1, written


def grouped(cache: Any, rows: Any) -> tuple[Any, Any]:
    return torch.ops.draftwood.grouped_linear.default(cache, rows, rows), scattered(cache, rows)[1]


def test_what_cannot_be_captured_is_refused() -> None:
    step = Program(scattered)
    write_in_place(step, "BUNDLE: graph one")  # type: ignore[arg-type]
    assert step.written == [] and len(step.graph.graph.output_node().args[0]) == 1
    with pytest.raises(InvariantError, match="BUNDLE: graph one: cache is not written once"):
        write_in_place(Program(copied), "BUNDLE: graph one")  # type: ignore[arg-type]
    with pytest.raises(LoweringError, match=r"graph one: draftwood.grouped_linear.default at .* take --engine npu"):
        write_in_place(Program(grouped), "BUNDLE: graph one")  # type: ignore[arg-type]


@pytest.mark.parametrize("setting", ["ASCEND_LAUNCH_BLOCKING=1", "TASK_QUEUE_ENABLE=2"])
def test_settings_that_let_nothing_be_recorded_are_refused(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*setting.split("="))
    with pytest.raises(RequestError, match=f"with {setting} no launch can be recorded; unset it"):
        CapturedExecutor(Path("nowhere"), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("[SqCqManage]Alloc sq cq fail, stream_id=7, retCode=0x7020023.", "install Ascend HDK 25.5.1 or later"),
        ("ACL stream wait failed\nerror code is 207005", "end other programs on the device"),
        # Of CANN 8.5.0, which knows the name of this error and does not say it.
        ("capture, error code is 207008\n[Error]: Stream resources are insufficient.", "end other programs"),
    ],
)
def test_a_device_that_takes_no_record_is_told_what_helps(words: str, advice: str) -> None:
    npu = Npu()

    def refused(*_: Any, **__: Any) -> Any:
        raise RuntimeError(words)

    npu.graph = refused
    launch = Records(npu).recorded("step", lambda given, buffers: SimpleNamespace())
    with pytest.raises(RequestError, match=advice):
        launch({}, {})
    words = "another error"
    with pytest.raises(RuntimeError, match="another error"):
        launch({}, {})
