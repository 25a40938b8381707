"""One graph of all releases of torch_npu: attributes that one of them alone writes are left out."""

from pathlib import Path

from draftwood.compiler.ge.graph import Graph
from draftwood.compiler.ge.torchair_bridge import ge_ir
from draftwood.tests.house.releases import compared, table


def test_topk_has_no_attribute_that_no_cann_knows(npu_bundle: Path) -> None:
    """2.13 writes sort_policy, and 2.9 would refuse the bundle at its first draft."""
    found = [node for path in (npu_bundle / "npu").glob("*.air") for node in Graph.load(path).nodes.values()]
    ranked = [node for node in found if node.type == "TopKV2"]
    assert ranked
    for node in ranked:
        assert {name for name in node.attributes if not name.startswith("_")} <= {"sorted", "dim", "largest"}


def test_what_a_release_leaves_to_its_default_is_the_same(npu_bundle: Path, tmp_path: Path) -> None:
    """2.8 writes no pse_type and out_dtype, and knows two operands less."""
    path = next((npu_bundle / "npu").glob("decode-*.air"))

    def other(pse_type: int | None, operands: int) -> str:
        model = ge_ir().ModelDef.FromString(path.read_bytes())
        for op in model.graph[0].op:
            if op.type == "FusedInferAttentionScore":
                del op.attr["pse_type"], op.attr["out_dtype"], op.input[operands:], op.input_desc[operands:]
                if pse_type is not None:
                    op.attr["pse_type"].i = pse_type
        (tmp_path / "other.air").write_bytes(model.SerializeToString())
        return compared(path, tmp_path / "other.air")

    assert other(None, -2) == other(0, -2) == "other bytes, the same nodes"
    assert other(1, -2).startswith("parts at FusedInferAttentionScore") and other(None, 3).startswith("parts at")


def test_two_releases_are_compared_by_bytes_and_by_nodes(npu_bundle: Path, tmp_path: Path) -> None:
    draft = npu_bundle / "npu" / "draft.air"
    model = ge_ir().ModelDef.FromString(draft.read_bytes())
    (same, other) = (tmp_path / name for name in ("same.air", "other.air"))
    same.write_bytes(draft.read_bytes())
    ranked = next(op for op in model.graph[0].op if op.type == "TopKV2")
    ranked.attr["sort_policy"].i = 1
    other.write_bytes(model.SerializeToString())
    assert compared(draft, same) == "equal" and compared(draft, other) == f"parts at TopKV2 {ranked.name}"
    assert table(["2.9"], {"a": ["equal"], "b": ["equal"], "c": ["x"]}).splitlines()[2:] == [
        "| a, b | equal |",
        "| c | x |",
    ]
