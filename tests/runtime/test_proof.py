"""The quick proof: it passes on a built bundle, and refuses an engine or a graph that decodes something else."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import draftwood
from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.errors import BundleError
from draftwood.manifest import Manifest
from draftwood.runtime import proving
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.engines.opening import Opening
from draftwood.runtime.engines.static import OnnxStaticEngine
from draftwood.runtime.proof import prove
from draftwood.runtime.proving import _prove_apart as prove_apart
from draftwood.trees.spec import read_specs

PROCESSOR = "draftwood.runtime.proving.processor_name"


@pytest.fixture(scope="module")
def bundles(tiny_bundles: dict[str, Path]) -> dict[str, Bundle]:
    return {kind: Bundle.open(folder) for kind, folder in tiny_bundles.items()}


@pytest.mark.parametrize("engine", [CpuEngine, OnnxStaticEngine], ids=["cpu", "static"])
@pytest.mark.parametrize("kind", ["medusa", "eagle3", "fasteagle"])
def test_what_was_built_passes(bundles: dict[str, Bundle], kind: str, engine: type[CpuEngine]) -> None:
    prove(engine(bundles[kind], Opening(threads=1)))


@pytest.mark.parametrize(("tree", "engine"), [("full:10x11", "cpu"), ("full:8x8", "bitwise")])
def test_the_largest_tree_has_room_in_the_smallest_cache(
    tiny_teacher: Path, tmp_path: Path, tree: str, engine: str
) -> None:
    """The prompt of the proof is as short as it has to be."""
    lookup = read_specs(f"lookup:{tree}").trees
    build(BuildRequest(model=tiny_teacher, drafter=None, trees=lookup, slots=(128,), bitwise=True), tmp_path / "b")
    with draftwood.open(tmp_path / "b", engine=engine, threads=1) as model:
        assert len(model.generate([5, 6, 7], max_new_tokens=4, ignore_eos=True).token_ids) == 4


def causal(draft):  # type: ignore[no-untyped-def]
    return draft._replace(tree=replace(draft.tree, mask=np.tri(draft.tree.rows, dtype=np.bool_)))


def shifted(draft):  # type: ignore[no-untyped-def]
    depths = draft.tree.depths
    return draft._replace(tree=replace(draft.tree, depths=depths + 5 * (depths > 0)))


@pytest.mark.parametrize("spoil", [causal, shifted], ids=["mask", "positions"])
def test_a_wrong_tree_is_refused(bundles: dict[str, Bundle], spoil) -> None:  # type: ignore[no-untyped-def]
    engine = CpuEngine(bundles["medusa"], Opening(threads=1))
    honest = engine.verify
    engine.verify = lambda states, drafts: honest(states, [spoil(draft) for draft in drafts])  # type: ignore[method-assign]
    with pytest.raises(BundleError, match=r"gear (chain-2|ragged)-kv128 .*draftwood check"):
        prove(engine)


@pytest.mark.parametrize(
    ("quantised", "moved", "passes"), [(True, 6e-3, True), (True, 3e-1, False), (False, 6e-3, False)]
)
def test_a_prompts_rounding_to_int8_is_no_fault(
    bundles: dict[str, Bundle], monkeypatch: pytest.MonkeyPatch, quantised: bool, moved: float, passes: bool
) -> None:
    """Rows read alone and together differ by steps of int8 where attention sums in another order."""
    monkeypatch.setattr(Manifest, "quantised", property(lambda self: quantised))
    engine = CpuEngine(bundles["medusa"], Opening(threads=1))
    honest = engine.append

    def rounded(state, tokens):  # type: ignore[no-untyped-def]
        output = honest(state, tokens)
        logits_RV = output.logits_RV
        return output._replace(logits_RV=logits_RV + moved * np.abs(logits_RV).max() * (len(tokens) > 1))

    engine.append = rounded  # type: ignore[method-assign]
    with (
        nullcontext()
        if passes
        else pytest.raises(BundleError, match=r"reading a prompt .* allowed by what rounding moves here, from")
    ):
        prove(engine)


def test_a_dropped_commit_is_refused(bundles: dict[str, Bundle]) -> None:
    engine = CpuEngine(bundles["medusa"], Opening(threads=1))
    honest = engine.verify

    def forgetful(states, drafts):  # type: ignore[no-untyped-def]
        states[0].kv._move = lambda *_: None
        return honest(states, drafts)

    engine.verify = forgetful  # type: ignore[method-assign]
    with pytest.raises(BundleError, match="gear ragged-kv128"):
        prove(engine)


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The engines of the proofs that run apart, on a machine that has proved nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[str] = []

    def noted(bundle: Bundle, opening: Opening) -> bool:
        asked.append(str(opening.engine))
        return prove_apart(bundle, opening)

    monkeypatch.setattr(proving, "_prove_apart", noted)
    return asked


def test_opening_proves_once(tiny_bundle: Path, proofs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proving, "prove", lambda engine: proofs.append("here"))
    for engine in ("cpu", "cpu", "static"):
        draftwood.open(tiny_bundle, engine=engine, threads=1).close()
    assert proofs == ["cpu", "static"]


def test_other_kernels_are_proved_again(tiny_bundle: Path, proofs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proving, "_prove_apart", lambda bundle, opening: not proofs.append("cpu"))
    for name, value in ((None, None), ("onnxruntime.__version__", "99.0.0"), (PROCESSOR, lambda: "another")):
        if name is not None:
            monkeypatch.setattr(name, value)
        before = len(proofs)
        for _ in range(2):
            draftwood.open(tiny_bundle, engine="cpu", threads=1).close()
        assert len(proofs) == before + 1


def test_without_an_interpreter_the_proof_runs_here(
    tiny_bundle: Path, proofs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr(proving, "prove", lambda engine: proofs.append("here"))
    draftwood.open(tiny_bundle, engine="cpu", threads=1).close()
    assert proofs == ["cpu", "here"]


@pytest.mark.parametrize(
    ("child", "line"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGFPE)", "ends the process \\(SIGFPE\\)"),
        ("import sys; print('gear x gives tokens'); sys.exit(3)", "gear x gives tokens"),
    ],
    ids=["abort", "refusal"],
)
def test_what_ends_a_proof_is_one_line_here(
    tiny_bundle: Path, proofs: list[str], monkeypatch: pytest.MonkeyPatch, child: str, line: str
) -> None:
    monkeypatch.setattr(proving, "_CHILD", child)
    for _ in range(2):  # not remembered
        with pytest.raises(BundleError, match=line):
            draftwood.open(tiny_bundle, engine="cpu", threads=1)
    assert proofs == ["cpu", "cpu"]
