"""Reading of CANN's lists: rows, layouts, configurations of single chips, functions that were read by hand."""

from draftwood.compiler.ge.element_types import element_types
from draftwood.tests.house.operator_types import BY_HAND, SOURCES, _configured, _rows

DEFINITION = """
static const std::vector<ge::DataType> wide = {ge::DT_FLOAT, ge::DT_FLOAT};
class Some : public OpDef {
  explicit Some(const char* name) : OpDef(name) {
    this->Input("x").ParamType(REQUIRED)
        .DataType({ge::DT_BF16, ge::DT_FLOAT16}).Format({ge::FORMAT_ND, ge::FORMAT_FRACTAL_NZ});
    this->Input("bias").ParamType(OPTIONAL).DataType(wide);
    this->Output("y").Follow("x");
    this->AICore().AddConfig("ascend910b");
    OpAICoreConfig other;
    other.Input("bias").DataType({ge::DT_INT32, ge::DT_INT4});
    this->AICore().AddConfig("ascend310p", other);
  }
};
"""


def rows(chip: str) -> list[tuple[str, ...]]:
    lists = {"wide": "ge::DT_FLOAT, ge::DT_FLOAT"}
    columns, count = dict(_configured(DEFINITION, lists))[chip]
    assert count == 2 and [*columns] == ["x", "bias", "y'"]
    return _rows(columns, [*columns])


def test_rows_of_other_layouts_than_nd_are_left_out_and_a_chip_has_its_own() -> None:
    assert rows("ascend910b") == [("b2", "f4", "b2")]
    assert rows("ascend310p") == [("b2", "i4", "b2")]


def test_the_table_names_what_it_was_made_of() -> None:
    table = element_types()
    assert [(one.release, one.repository) for one in table.sources] == [(r, n) for r, n, _, _ in SOURCES]
    assert all(len(one.commit) == 40 for one in table.sources)
    assert {name: one.read for name, one in table.operators.items() if name in BY_HAND} == {
        name: path for name, (path, *_) in BY_HAND.items() if name in table.operators
    }
