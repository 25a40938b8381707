"""Bundles of several ranks from folder to tokens: interpreted together, and in processes with gloo between them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.environment import torch_npu_installed
from draftwood.errors import BundleError, RequestError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding, Options
from draftwood.runtime.engines import StagedEngine
from draftwood.runtime.policy import policy_for
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.tools.reference.ge import GeEngine
from draftwood.tools.reference.gloo import GlooEngine
from draftwood.trees import Topology
from draftwood.trees.spec import Budget

pytestmark = pytest.mark.skipif(not torch_npu_installed(), reason="needs the converters of torch_npu")

KINDS = ("medusa", "eagle3", "fasteagle", "peagle", "dflash")
PROMPT = list(range(5, 25))
Build = Callable[[str, int], Bundle]


@pytest.fixture(scope="module")
def bundle_of(
    tiny_teacher: Path,
    tiny_heads: Path,
    tiny_drafters: dict[str, Path],
    save_one_pass: dict[str, Callable[[Path], None]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Build:
    """A bundle of a kind of drafter on so many ranks, made once."""
    folder, made = tmp_path_factory.mktemp("ranks"), dict[tuple[str, int], Bundle]()

    def drafter(kind: str) -> Path:
        path = {"medusa": tiny_heads, **tiny_drafters}.get(kind, folder / kind)
        if not path.exists():
            save_one_pass[kind](path)
        return path

    def make(kind: str, ranks: int) -> Bundle:
        if (kind, ranks) not in made:
            trees = (("plain", Topology.plain()), ("backbone", Topology.backbone(2, 2)))
            trees += (("budget", Budget(4, 3, 2)),) if kind == "eagle3" else ()
            out = folder / f"{kind}-{ranks}"
            asked = BuildRequest(
                model=tiny_teacher, drafter=drafter(kind), trees=trees, slots=(128,), prefill_rows=(8,),
                targets=("ge",), ranks=ranks,
            )  # fmt: skip
            build(asked, out)
            made[kind, ranks] = Bundle.open(out)
        return made[kind, ranks]

    return make


def texts(engine: StagedEngine, tokens: int = 16) -> list[tuple[int, ...]]:
    """Of every gear, greedy and sampled."""
    found = []
    for sampling in (Sampling(), Sampling(temperature=0.8, seed=3)):
        options = Options(max_new_tokens=tokens, sampling=sampling, ignore_eos=True)
        for gear in engine.bundle.manifest.gears:
            name = None if gear.tree == "plain" else gear.name
            policy = policy_for(engine.bundle, name)
            found.append(Decoding(engine, PROMPT, options, policy).run().token_ids)
    return found


def one_text(found: list[tuple[int, ...]], gears: int) -> bool:
    """Whether all gears decode alike, and sampled text is another one."""
    greedy, sampled = set(found[:gears]), set(found[gears:])
    return len(greedy) == len(sampled) == 1 and greedy != sampled


def test_two_ranks_interpreted_together_decode_one_text(bundle_of: Build) -> None:
    bundle = bundle_of("medusa", 2)
    sets = bundle.manifest.rank_sets("ge")
    assert [(one.rank, one.ranks, one.weights) for one in sets] == [
        (0, 2, "npu/rank-0/weights.bin"),
        (1, 2, "npu/rank-1/weights.bin"),
    ]
    assert sets[0].graphs == sets[1].graphs and not (bundle.folder / "npu/atc.sh").exists()
    assert one_text(texts(GeEngine(bundle), 10), 2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_lowered_graphs_of_ranks_decode_what_one_rank_does(bundle_of: Build, kind: str, ranks: int) -> None:
    found, one = (texts(GeEngine(bundle_of(kind, n))) for n in (ranks, 1))
    assert found == one and one_text(found, len(bundle_of(kind, 1).manifest.gears))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_processes_decode_what_one_rank_does(bundle_of: Build, kind: str) -> None:
    found = []
    for ranks in (1, 2, 4):
        engine = GlooEngine(bundle_of(kind, ranks))
        try:
            found.append(texts(engine))
        finally:
            engine.close()
    assert found[0] == found[1] == found[2] and one_text(found[0], len(bundle_of(kind, 1).manifest.gears))


@pytest.fixture
def engine(bundle_of: Build) -> Iterator[GlooEngine]:
    found = GlooEngine(bundle_of("medusa", 2))
    yield found
    found.close()


def test_a_rank_that_dies_ends_the_others(engine: GlooEngine) -> None:
    options = Options(max_new_tokens=4, ignore_eos=True)
    policy = policy_for(engine.bundle)
    assert len(Decoding(engine, PROMPT, options, policy).run().token_ids) == 4
    victim, other = engine.executor.processes[1], engine.executor.processes[0]
    os.kill(victim.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(BundleError, match=r"rank 1 of 2 ended \(SIGKILL\); all ranks are ended") as first:
        Decoding(engine, PROMPT, options, policy).run()
    assert time.monotonic() - began < 10  # seconds; what is looked at takes one
    assert "\n" not in str(first.value) and other.poll() is not None and victim.poll() is not None
    with pytest.raises(BundleError, match="rank 1 of 2 ended"):
        Decoding(engine, PROMPT, options, policy).run()


DIES = """
import sys
from pathlib import Path
from draftwood.runtime.bundle import Bundle
from draftwood.tools.reference.gloo import GlooEngine
engine = GlooEngine(Bundle.open(Path(sys.argv[1])))
print(*(process.pid for process in engine.executor.processes), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_no_rank_outlives_the_one_that_started_it(bundle_of: Build) -> None:
    words = [sys.executable, "-c", DIES, str(bundle_of("medusa", 2).folder)]
    started = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    ranks = [int(word) for word in started.stdout.readline().split()]
    assert len(ranks) == 2
    started.kill()
    started.wait()
    until = time.monotonic() + 20
    while time.monotonic() < until and any(Path(f"/proc/{rank}/cmdline").exists() for rank in ranks):
        time.sleep(0.1)
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"ranks": 3}, "--ranks 3: the teacher has 4 query and 2 key/value heads"),
        ({"ranks": 17}, "--ranks 17: expected 1 to 16 devices"),
        ({"ranks": 2, "targets": ("onnx",)}, "--ranks 2: splits the graphs of an NPU; give --target ge as well"),
    ],
)
def test_ranks_that_cannot_be_are_refused(tiny_teacher: Path, tmp_path: Path, changed: dict, line: str) -> None:
    trees = (("plain", Topology.plain()),)
    asked = {"model": tiny_teacher, "drafter": None, "trees": trees, "slots": (128,), "targets": ("ge",), **changed}
    with pytest.raises(RequestError, match=line):
        build(BuildRequest(**asked), tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
