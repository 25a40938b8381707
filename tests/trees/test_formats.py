import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.errors import TreeError
from draftwood.tests.tree_texts import written
from draftwood.trees import (
    Topology,
    formats,
    parse_draftwood,
    parse_medusa,
    parse_nxdi,
    parse_specs,
    parse_tree,
    read_tree,
)

FIXED = settings(derandomize=True, deadline=None, max_examples=60, database=None)
READERS = {"draftwood": parse_draftwood, "medusa": parse_medusa, "tuples": parse_medusa, "nxdi": parse_nxdi}


@st.composite
def topologies(draw, gaps=True):
    paths = {()}
    for _ in range(draw(st.integers(0, 12))):
        parent = draw(st.sampled_from(sorted(paths)))
        siblings = sum(path[:-1] == parent for path in paths if path)
        paths.add((*parent, draw(st.integers(0, 4)) if gaps else siblings))
    return Topology.from_paths(paths - {()})


@FIXED
@given(topologies(), st.sampled_from(["draftwood", "medusa", "tuples"]))
def test_round_trip(tree, form):
    text = written(tree, form)
    assert READERS[form](text, "x") == parse_tree(text, "x") == tree


@FIXED
@given(topologies(gaps=False))
def test_round_trip_of_adjacency(tree):
    text = written(tree, "nxdi")
    assert parse_nxdi(text, "x") == parse_tree(text, "x") == tree


def test_medusa_choices_as_python_assignments():
    text = "# trees\nmc_sim_7b_63 = [[0], [0, 0], [1]]\nother = [(0,), (0, 0)]\n"
    assert parse_medusa(text, "x", "mc_sim_7b_63") == Topology.from_paths([(0,), (1,), (0, 0)])
    assert parse_medusa(text, "x", "other") == Topology.chain(2)
    assert parse_tree("mc = [[0]]", "x") == Topology.chain(1)
    with pytest.raises(TreeError, match=r"expected one tree, got \['mc_sim_7b_63', 'other'\]"):
        parse_medusa(text, "x")
    with pytest.raises(TreeError, match="no tree named 'third'"):
        parse_medusa(text, "x", "third")


def test_no_tree_of_a_python_file_is_passed_over():
    """Neither the first of two without a name or of one name, nor one whose type is said."""
    for text, which in (("[(0,)]\n[(1,)]", "have no name"), ("a = [(0,)]\na = [(1,)]", "are named 'a'")):
        with pytest.raises(TreeError, match=f"x: 2 trees {which}; keep one, or give each a name of its own"):
            parse_tree(text, "x")
    typed = "a: list[tuple[int, ...]] = [(0,), (0, 0)]\n"
    assert parse_tree(typed, "x") == Topology.chain(2)
    with pytest.raises(TreeError, match=r"expected one tree, got \['a', 'b'\]"):
        parse_tree(typed + "b = [(1,)]", "x")


def test_adjacency_ids_need_no_order_and_may_be_integers():
    tree = parse_nxdi('{"7": ["3"], "0": ["9", "7"], "9": [5, 4]}', "x")
    assert tree == Topology.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)])
    assert parse_nxdi("{}", "x") == parse_nxdi('{"0": []}', "x") == Topology.plain()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"0": ["1"], "1": ["0"]}', "lies on a cycle"),
        ('{"0": ["1"], "2": ["3"], "3": ["2"]}', r"lies on a cycle of \['2', '3'\]|of \['3', '2'\]"),
        ('{"0": ["1"], "1": ["1"]}', "has two parents, '0' and '1'"),
        ('{"0": ["1", "2"], "1": ["2"]}', "'2' has two parents, '0' and '1'"),
        ('{"0": ["1"], "2": ["3"]}', "'2' cannot be reached from the root '0'"),
        ('{"1": ["0"]}', "the root '0' is listed as a child of '1'"),
        ('{"0": ["1"], "0": ["2"]}', "the key '0' occurs twice"),
        ('{"0": "1"}', "expected a list of children"),
        ('{"0": ["01"]}', "expected a node id"),
        ('{"root": []}', "expected a node id"),
        ('{"0": [-1]}', "expected a node id"),
        ('{"0": [true]}', "expected a node id"),
    ],
)
def test_refused_adjacency(text, message):
    with pytest.raises(TreeError, match=message) as caught:
        parse_tree(text, "tree.json")
    assert str(caught.value).startswith("tree.json: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no tree found"),
        ("hello", "no tree found"),
        ("[[0], [0, 0", "not a tree"),
        ("[[0], [x]]", "not a tree"),
        ("[__import__('os').getcwd()]", "not a tree"),
        ("[(0), (1)]", "expected a list of ranks"),
        ("[[0, 0]]", "its parent"),
        ("[[0], [0]]", "listed twice"),
        ("[[0.5]]", "a rank is an integer"),
        ("[" * 4000, "not a tree"),
        ("{", "not JSON"),
        ('{"a":' * 100_000, "not JSON"),
        ('{"format": "draftwood.rank-paths"}', "expected an object with format 'draftwood.tree'"),
        ('{"format": "draftwood.tree", "version": 2, "paths": []}', "expected version 1"),
        ('{"format": "draftwood.tree", "version": 1, "paths": [[0]], "paths": []}', "the key 'paths' occurs twice"),
        ('{"format": "draftwood.tree", "version": 1}', "missing required field `paths`"),
        ('{"format": "draftwood.tree", "version": 1, "paths": [], "x": 0}', "unknown field `x`"),
        ('{"format": "draftwood.tree", "version": 1, "paths": 3}', "Expected `array`, got `int` - at `\\$.paths`"),
    ],
)
def test_refused_text(text, message):
    with pytest.raises(TreeError, match=message) as caught:
        parse_tree(text, "tree.json")
    assert str(caught.value).startswith("tree.json: ") and "\n" not in str(caught.value)


def test_files(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(written(Topology.full((2, 2)), "draftwood"))
    assert json.loads(path.read_text())["paths"][0] == [0]
    assert read_tree(path) == Topology.full((2, 2))
    path.write_bytes(b"\xff\xfe")
    for bad in (path, tmp_path / "none", tmp_path):
        with pytest.raises(TreeError, match="cannot read the tree file"):
            read_tree(bad)


def test_specs_name_trees_and_put_plain_first(tmp_path):
    medusa, ours = tmp_path / "my tree!.py", tmp_path / "Chain-3.json"
    medusa.write_text("a = [[0], [2]]\nb = [[0], [3]]\n")
    ours.write_text(written(Topology.full((2, 2)), "draftwood"))
    text = f"chain:3, full:3x2x1,backbone:4:5,plain,full:1x1x1,medusa:{medusa}#a,tree:{ours}"
    specs = dict(parse_specs(text))
    assert list(specs) == ["plain", "chain-3", "full-3x2x1", "backbone-4-5", "a", "Chain-3-2"]
    assert specs["backbone-4-5"] == Topology.backbone(4, 5) and specs["plain"].rows == 1
    assert specs["Chain-3-2"] == Topology.full((2, 2))
    medusa.write_text("[[0], [2]]")
    assert [name for name, _ in parse_specs(f"medusa:{medusa}")] == ["plain", "my-tree"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unknown kind ''"),
        ("chain:3,,plain", "unknown kind ''"),
        ("star:3", "unknown kind 'star'"),
        ("plain:1", "unknown kind 'plain'"),
        ("chain", "expected whole numbers"),
        ("chain:0", "expected whole numbers"),
        ("chain:-2", "expected whole numbers"),
        ("chain:²", "expected whole numbers"),
        ("chain:3:3", "expected whole numbers"),
        ("full:3x0", "expected whole numbers"),
        ("full:", "expected whole numbers"),
        ("backbone:3", "expected whole numbers"),
        ("chain:9999999", "expected whole numbers"),
        ("chain:256", "at most 256 rows, root counted, got 257"),
        ("full:99999x99999x99999", "at most 256 rows"),
        ("backbone:51:6", "at most 256 rows"),
        ("medusa:", "expected a file name"),
        ("tree:/nonexistent/t.json", "cannot read the tree file"),
    ],
)
def test_refused_specs(text, message):
    with pytest.raises(TreeError, match=message) as caught:
        parse_specs(text)
    assert "\n" not in str(caught.value)


def test_files_over_the_row_limit_are_refused(tmp_path):
    path = tmp_path / "wide.json"
    path.write_text(json.dumps([[rank] for rank in range(256)]))
    for kind in ("tree", "medusa"):
        with pytest.raises(TreeError, match="got 257"):
            parse_specs(f"{kind}:{path}")
    assert parse_specs("chain:255")[1][1].rows == 256


def test_a_deep_chain_of_edges_is_read_in_linear_time() -> None:
    depth = 20_000  # rank paths of which would hold 200 million numbers
    chain = parse_tree(json.dumps({str(row): [str(row + 1)] for row in range(depth)}), "chain")
    assert chain == Topology.chain(depth)


def test_another_form_is_one_row(tmp_path, monkeypatch):
    """Trees as edges, one "parent rank" a line, read wherever a tree is named."""

    def parse(text, where):
        paths = [()]
        for parent, rank in (map(int, line.split()) for line in text.splitlines()[1:]):
            paths.append((*paths[parent], rank))
        return Topology.from_paths(paths[1:])

    edges = formats.TreeFormat(lambda text: text.startswith("edges"), parse)
    monkeypatch.setattr(formats, "FORMATS", [edges, *formats.FORMATS])
    path = tmp_path / "tree.edges"
    path.write_text("edges\n0 0\n0 1\n1 0\n")
    tree = Topology.from_paths([(0,), (1,), (0, 0)])
    assert read_tree(path) == tree and parse_specs(f"tree:{path}")[1:] == [("tree", tree)]
    assert parse_tree("[[0]]", "x") == Topology.chain(1)
