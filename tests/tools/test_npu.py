"""NPU graphs from the command line: built, shown, checked, executed; and the engine of a device without one."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from draftwood.environment import torch_npu_installed
from draftwood.errors import BundleError
from draftwood.manifest import File
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding
from draftwood.runtime.options import Options
from draftwood.runtime.policy import FixedTree, widest_gear
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.tests.checked import checked
from draftwood.tools.cli import main

needs_converters = pytest.mark.skipif(not torch_npu_installed(), reason="needs the torch_npu package")


def output(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main([str(argument) for argument in (*arguments, "--json")]) == 0
    return json.loads(capsys.readouterr().out)


@needs_converters
def test_inspect_shows_every_graph(npu_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = output(capsys, "inspect", npu_bundle, "--npu")
    assert [graph["name"] for graph in found["graphs"]] == [
        "prefill-t16-kv128",
        "decode-kv128",
        "verify-t7-kv128",
        *(f"accept-{draws}-t{rows}" for rows in (2, 7) for draws in ("greedy", "sampled")),
        "draft",
    ]
    for graph in found["graphs"]:
        assert (npu_bundle / graph["air"]).is_file()
        assert graph["in_place"]["proved"] and len(graph["caches"]) == (
            0 if graph["kind"] in ("draft", "accept") else 4
        )
        assert [f for f in graph["findings"] if f["level"] == "error"] == []
        if graph["kind"] in ("decode", "verify"):
            counted = graph["kernels"]
            assert counted["layers"] == 2 and not {"Transpose", "GatherV2", "Pack"} & counted["layer"].keys()
            assert counted["all"] == counted["outside"] + 2 * sum(counted["layer"].values())
            assert counted["outside"] <= 24 and counted["joins"] == 2  # the values of each layer
        assert graph["engines"] == {"AI Core": graph["engines"]["AI Core"], "AI CPU": 0, "none": 0}
        # Runs from any folder: with ATC in its place something that says where it runs, and what it was given.
        atc = "atc() { cd $ASCEND_WORK_PATH/..; pwd; echo $2 $3; }"
        said = subprocess.run(["sh", "-c", f"{atc}; {graph['atc']}"], cwd="/", capture_output=True)
        assert said.stdout.decode().split()[0] == str((npu_bundle / "npu").resolve()) and not said.returncode
        assert graph["atc"].endswith("--tiling_schedule_optimize=1") and f"--model={graph['name']}.air" in graph["atc"]
    assert found["weights"]["bound"] and found["dtype"] == "bfloat16"
    assert main(["inspect", str(npu_bundle), "--npu"]) == 0
    text = capsys.readouterr().out
    assert "if GE runs one for each join of rows" in text and "ATC reads all weights for every graph, 0.0 GB" in text
    assert "each one RefData with one write and no copy: proved" in text


@needs_converters
def test_check_compares_all_three_ways(npu_bundle: Path) -> None:
    report = checked(npu_bundle)
    assert report["ok"] and report["mutations"] == report["mutations_caught"] > 0
    graphs = report["graphs"]
    assert set(graphs["verify-t7-kv128"]) == {"cpu", "cpu blocks", "static", "static blocks", "ge", "eager"}
    assert set(graphs["prefill-t16-kv128"]) == {"static", "static blocks", "ge"}
    assert all(entry["ok"] for graph in graphs.values() for entry in graph.values())
    accepted = {c["quantity"] for c in report["comparisons"] if c["graphs"] == "ge"}
    assert accepted >= {"greedy tokens", "sampled tokens", "filtered tokens"}
    faults = {(c["graphs"], c["fault"]) for c in report["controls"]}
    for fault in (
        "mask inverted in the graph",
        "one cache write dropped from the graph",
        "path index misrouted",
        "teacher's states misplaced",
    ):
        assert ("ge", fault) in faults


@needs_converters
def test_check_finds_a_wrong_graph(npu_bundle: Path, tmp_path: Path) -> None:
    """An RMS norm of layer 1 has another epsilon than its program: a fault that only numbers show."""
    from draftwood import manifest as m
    from draftwood.compiler.ge.torchair_bridge import ge_ir

    folder = tmp_path / "wrong"
    shutil.copytree(npu_bundle, folder)
    path = folder / "npu" / "verify-t7-kv128.air"
    model = ge_ir().ModelDef.FromString(path.read_bytes())
    next(op for op in model.graph[0].op if op.name == "AddRmsNorm_1").attr["epsilon"].f = 1.0
    path.write_bytes(model.SerializeToString())
    fields = json.loads((folder / m.MANIFEST_FILE).read_text())
    listed = m.list_file(path)
    fields["files"]["npu/verify-t7-kv128.air"] = {"bytes": listed.bytes, "sha256": listed.sha256}
    (folder / m.MANIFEST_FILE).write_text(json.dumps(fields))
    report = checked(folder, "ge", code=1)
    assert not report["graphs"]["verify-t7-kv128"]["ge"]["ok"] and report["graphs"]["decode-kv128"]["ge"]["ok"]


@needs_converters
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_on_the_npus_graphs_changes_no_token(npu_bundle: Path, temperature: float) -> None:
    """Whole decodings on the interpreted graphs; bf16 rows of one token do not depend on the tree around it."""
    from draftwood.tools.reference.ge import GeEngine

    engine = GeEngine(Bundle.open(npu_bundle))
    options = Options(max_new_tokens=12, sampling=Sampling(temperature=temperature, seed=3), ignore_eos=True)
    prompt = [5, 9, 23, 41, 7]
    plain = Decoding(engine, prompt, options, FixedTree(engine.bundle)).run()
    tree = Decoding(engine, prompt, options, FixedTree(engine.bundle, widest_gear(engine.bundle))).run()
    assert plain.token_ids == tree.token_ids
    assert tree.steps <= plain.steps


@needs_converters
def test_other_weights_chips_and_releases_never_meet_a_compiled_step(
    npu_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import msgspec

    from draftwood.compiler.targets.online import compile_cache

    bundle = Bundle.open(npu_bundle)
    npu = bundle.manifest.graph_set("ge")
    assert npu is not None
    graph, files = npu.graphs[0], bundle.manifest.files
    other = msgspec.structs.replace(bundle.manifest, files=files | {npu.weights: File(bytes=0, sha256="0" * 64)})
    assert compile_cache(bundle.folder, bundle.manifest, graph) != compile_cache(bundle.folder, other, graph)
    (tmp_path / "version.cfg").write_text("runtime_running_version=[9.1.0:9.1.0]\n")
    here = {compile_cache(bundle.folder, bundle.manifest, graph, chip=chip) for chip in ("", "Ascend910B3")}
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert len(here) == 2 and compile_cache(bundle.folder, bundle.manifest, graph) not in here
    unbound = msgspec.structs.replace(bundle.manifest, files={n: d for n, d in files.items() if n != npu.weights})
    with pytest.raises(BundleError, match="no weights are bound; run draftwood bind"):
        compile_cache(bundle.folder, unbound, graph)


@needs_converters
def test_engines_by_name(npu_bundle: Path, tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = ("--prompt-ids", "5,9,23", "--max-new-tokens", 4)
    by_cpu = output(capsys, "run", npu_bundle, *ids, "--engine", "cpu")
    by_ge = output(capsys, "run", npu_bundle, *ids, "--engine", "ge")
    assert len(by_ge["token_ids"]) == len(by_cpu["token_ids"]) == 4
    assert main(["run", str(npu_bundle), *map(str, ids), "--engine", "npu"]) == 2
    assert "no NPU is found here" in capsys.readouterr().err
    assert main(["run", str(tiny_bundle), *map(str, ids), "--engine", "ge"]) == 2
    assert "holds no ge graphs; build it with --target onnx,ge" in capsys.readouterr().err
