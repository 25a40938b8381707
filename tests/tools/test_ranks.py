"""Bundles of several ranks from folder to tokens: interpreted together, and in processes that torchrun starts."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.ge.weights import bundle_index
from draftwood.compiler.targets.bundled import whole_npu_weights
from draftwood.environment import torch_npu_installed
from draftwood.errors import BundleError, RequestError, UserError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.options import Options
from draftwood.runtime.policy import FixedTree
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.tests import fixtures
from draftwood.tests.checked import checked
from draftwood.tools.cli import main
from draftwood.tools.comparison.differences import agreement
from draftwood.tools.measure.conversations import Conversation, tokenizer_of
from draftwood.tools.prompts import read_prompts
from draftwood.tools.reference import torchrun as ranks_module
from draftwood.tools.reference.ge import GeEngine
from draftwood.tools.reference.torchrun import RanksEngine, local_executor
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
    npu_bundle: Path,
    save_one_pass: dict[str, Callable[[Path], None]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Build:
    """A bundle of a kind of drafter on a number of ranks, made once."""
    folder, made = tmp_path_factory.mktemp("ranks"), {("medusa", 1): Bundle.open(npu_bundle)}

    def drafter(kind: str) -> Path:
        path = {"medusa": tiny_heads, **tiny_drafters}.get(kind, folder / kind)
        if not path.exists():
            save_one_pass[kind](path)
        return path

    def make(kind: str, ranks: int) -> Bundle:
        if (kind, ranks) not in made:
            trees = (("plain", Topology.plain()), ("backbone", Topology.backbone(2, 3)))
            trees += (("budget", Budget(4, 3, 2)),) if kind == "eagle3" else ()
            out = folder / f"{kind}-{ranks}"
            asked = BuildRequest(
                model=tiny_teacher, drafter=drafter(kind), trees=trees, slots=(128,), prefill_rows=(16,),
                targets=("ge",), ranks=ranks,
            )  # fmt: skip
            build(asked, out)
            made[kind, ranks] = Bundle.open(out)
        return made[kind, ranks]

    return make


def texts(engine: Engine, tokens: int = 16) -> list[tuple[int, ...]]:
    """Of every gear, greedy and sampled."""
    found = []
    for sampling in (Sampling(), Sampling(temperature=0.8, seed=3)):
        options = Options(max_new_tokens=tokens, sampling=sampling, ignore_eos=True)
        for gear in engine.bundle.manifest.gears:
            name = None if gear.tree == "plain" else gear.name
            policy = FixedTree(engine.bundle, name)
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


def torchrun(ranks: int, *words: object) -> tuple[int, str, str]:
    """How a command of all ranks ended, and its output."""
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    given = {**os.environ, "PYTHONPATH": paths, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *map(str, words)], env=given, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout, done.stderr


def in_processes(bundle: Bundle, how: str = "") -> list[tuple[int, ...]]:
    code, out, said = torchrun(bundle.npu_graphs().ranks, __file__, bundle.folder, how)
    assert code == 0, said
    return [tuple(text) for text in json.loads(out)]


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        pytest.param(kind, ranks, marks=[pytest.mark.slow] * ((kind, ranks) != ("medusa", 2)))
        for kind in KINDS
        for ranks in (2, 4)
    ],
)
def test_processes_decode_what_one_rank_does(bundle_of: Build, kind: str, ranks: int) -> None:
    assert in_processes(bundle_of(kind, ranks)) == texts(GeEngine(bundle_of(kind, 1)))


@pytest.mark.slow
def test_processes_go_torchairs_way(bundle_of: Build) -> None:
    """As on devices, but that the traced program is run, and gloo is between the ranks."""
    found = in_processes(bundle_of("medusa", 2), "torchair")
    assert one_text(found, 2)


@pytest.mark.slow
def test_the_built_in_prompts_on_two_ranks(tmp_path: Path) -> None:
    """Two halves of a sum round otherwise than one: texts may part where two logits are a step of bf16 apart."""
    engines = []
    for ranks in (1, 2):
        trees = (("plain", Topology.plain()), ("backbone", Topology.backbone(3, 2)))
        pair = BuildRequest(model=fixtures.TEACHER, drafter=fixtures.MEDUSA, trees=trees, slots=(128,))
        build(replace(pair, targets=("ge",), ranks=ranks), tmp_path / str(ranks))
        engines.append(GeEngine(Bundle.open(tmp_path / str(ranks))))
    texts = list(zip(prompts_decoded(engines[0]), in_processes(engines[1].bundle, "prompts"), strict=True))
    differing = [n for n, (one, two) in enumerate(texts) if one != two]
    assert len(texts) == 12 and len(differing) <= 3, differing
    prompts = built_in_prompts(engines[0])
    for n in differing:
        at = agreement(*texts[n])
        for engine in engines:
            ids = np.array([*prompts[n], *texts[n][0][:at]])
            logits_V = engine.prefill(engine.begin(128), ids).logits_RV[0].astype(np.float64)
            second, first = np.argsort(logits_V)[-2:]
            assert {first, second} == {text[at] for text in texts[n]}, n
            step = 2.0 ** (math.floor(math.log2(abs(logits_V[first]))) - 7)  # bf16 has seven bits after the point
            assert logits_V[first] - logits_V[second] <= step, n


def test_check_compares_all_ranks(bundle_of: Build) -> None:
    """With eager PyTorch of the whole model, the heads of all ranks' caches too; all faults are caught."""
    whole(checked(bundle_of("medusa", 2).folder), 9)


@pytest.mark.slow
def test_check_compares_processes(bundle_of: Build) -> None:
    folder = bundle_of("medusa", 2).folder
    code, _, said = torchrun(2, __file__, folder, "check")
    assert code == 0, said
    whole(json.loads((folder / "check-ranks.json").read_text()), 7)  # none is planted in a graph


def test_ranks_of_two_models_are_refused(bundle_of: Build, tmp_path: Path) -> None:
    """A norm is the same on all ranks of one."""
    folder, manifest = tmp_path / "bundle", bundle_of("medusa", 2).manifest
    shutil.copytree(bundle_of("medusa", 2).folder, folder)
    rank = manifest.rank_sets("ge")[1]
    with (folder / rank.weights).open("r+b") as file:
        file.seek(bundle_index(folder, rank).constants["norm.weight"].offset)
        file.write(b"\x01\x02")
    with pytest.raises(BundleError, match="is not rank 1's part of what all ranks have"):
        whole_npu_weights(folder, manifest)


def whole(report: dict[str, Any], faults: int) -> None:
    assert report["mutations"] == report["mutations_caught"] >= faults
    assert {one["quantity"] for one in report["comparisons"]} >= {"logits", "cache after commit", "draft scores"}


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("killed", "its report names the first that failed|another rank has ended, or did not"),
        pytest.param("refused", "rank 1: ValueError: no memory", marks=pytest.mark.slow),
        pytest.param("stopped", "did not come to a collective within 5 s", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_lost_ends_all(bundle_of: Build, how: str, says: str) -> None:
    code, out, said = torchrun(2, __file__, bundle_of("medusa", 2).folder, how)
    ours = [line for line in said.splitlines() if line.startswith("draftwood: error: ")]
    assert code != 0 and not out and len(re.findall(says, "\n".join(ours))) == 1 and said.count("Traceback") == 1, (
        said
    )  # torchrun's own


def test_torchrun_ends_no_rank_before_its_line() -> None:
    """SIGTERM comes after the first rank has seen the loss, and before it has said so."""
    program = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom draftwood.tools.reference import torchrun\n"
        "thread = torchrun.tell_at_the_end(Path('bundle'))\ntorchrun.TOLD.acquire()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\nthread.join()\nsys.exit('draftwood: error: the loss')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "draftwood: error: the loss\n")


def test_a_rank_that_takes_no_order_is_a_loss_as_at_a_collective(tmp_path: Path) -> None:
    """One that is stopped between two of them; rank 0 would wait for a year."""
    program = (
        "import os, signal, sys\nfrom datetime import timedelta\nfrom torch import distributed\n"
        "from draftwood.tools.reference.orders import Orders, Stop\n"
        "store, rank = f'file://{sys.argv[1]}', int(sys.argv[2])\n"
        "distributed.init_process_group('gloo', init_method=store, rank=rank, world_size=2)\n"
        "orders = Orders(timedelta(seconds=1))\n"
        "if rank:\n    orders.receive()\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "for _ in range(2):\n    orders.send(Stop())\n"
    )
    command = [sys.executable, "-P", "-c", program, str(tmp_path / "store")]
    given = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    with subprocess.Popen([*command, "1"], env=given) as stopped:
        try:
            done = subprocess.run([*command, "0"], env=given, capture_output=True, text=True, timeout=120)
        finally:
            stopped.kill()
    assert done.returncode == 1 and "Timed out waiting 1000ms for send" in done.stderr, done.stderr


def test_ranks_are_started_by_torchrun(bundle_of: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="torchrun did not start this process; start it as torchrun --standalone"):
        RanksEngine(bundle_of("medusa", 2))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(ranks_module, "npu_count", lambda: 1)
    with pytest.raises(RequestError, match="is of 2 ranks, a device each, and torch_npu finds 1 here; look at ASCEND"):
        RanksEngine(bundle_of("medusa", 2))


def test_hccl_is_as_patient_as_the_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its own two minutes pass while another rank compiles its first graph."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for given, expected in ((None, "600"), ("1800", "1800")):
        monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", given or "")
        if given is None:
            del os.environ["HCCL_CONNECT_TIMEOUT"]
        assert ranks_module._own_number(tmp_path, 2, 2) == 0
        assert os.environ["HCCL_CONNECT_TIMEOUT"] == expected


@pytest.mark.slow
def test_as_many_processes_as_ranks(bundle_of: Build) -> None:
    code, _, said = torchrun(3, __file__, bundle_of("medusa", 2).folder, "check")
    assert code != 0 and said.count("is of 2 ranks, and torchrun started 3") == 1


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


def prompts_decoded(engine: Engine) -> list[tuple[int, ...]]:
    """The built-in prompts, each with the largest tree."""
    bundle = engine.bundle
    policy, options = FixedTree(bundle, bundle.manifest.gears[-1].name), Options(max_new_tokens=24)
    return [Decoding(engine, prompt, options, policy).run().token_ids for prompt in built_in_prompts(engine)]


def built_in_prompts(engine: Engine) -> list[list[int]]:
    return [Conversation(tokenizer_of(engine)).ask(prompt) for prompt in read_prompts(None)]


def faulty(how: str) -> Callable[[Bundle, int], Any]:
    """Rank 1 fails at its fourth launch, in this way."""

    def made(bundle: Bundle, rank: int) -> Any:
        executor, left = local_executor(bundle, rank), iter((True, True, True))
        run = executor.run

        def fails(*given: Any) -> Any:
            if not next(left, False):
                if how == "refused":
                    raise ValueError("no memory")
                os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[how])
            return run(*given)

        if rank == 1:
            executor.run = fails
        return executor

    return made


def of_torchair(bundle: Bundle, rank: int) -> Any:
    from draftwood.compiler.targets.online import TorchairExecutor

    return TorchairExecutor(bundle.folder, bundle.manifest, "cpu", eagerly=True, rank=rank)


def rank_of_a_test(folder: str, how: str) -> None:
    """The work of each process of `torchrun`."""
    if how == "check":
        sys.exit(main(["check", folder, "--engine", "ranks"]))
    ranks_module.PATIENCE = timedelta(seconds=5 if how == "stopped" else 600)
    local = {"": local_executor, "prompts": local_executor, "torchair": of_torchair}.get(how) or faulty(how)
    try:
        engine = RanksEngine(Bundle.open(Path(folder)), local=local)
        found = prompts_decoded(engine) if how == "prompts" else texts(engine)
    except UserError as error:
        sys.exit(f"draftwood: error: {error}")
    print(json.dumps(found))
    engine.close()


if __name__ == "__main__":
    rank_of_a_test(*sys.argv[1:])
