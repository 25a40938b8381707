"""The table of published drafters lists what is read, and each row's folder is recognised as the row says."""

from pathlib import Path

import pytest

from draftwood.compiler.drafters import registry
from draftwood.compiler.drafters.dflash.checkpoint import NAMES
from draftwood.compiler.drafters.dspark.checkpoint import NAMES as DSPARK_NAMES
from draftwood.compiler.drafters.eagle3.layouts import WRITERS
from draftwood.compiler.drafters.peagle.model import OWN

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "drafters.md"
ROWS = [
    [cell.strip().strip("`") for cell in line.strip("| \n").split("|")]
    for line in DOCUMENT.read_text().split("## ")[0].splitlines()
    if line.startswith("| ") and not line.startswith("| kind")
]
# Marks of a folder besides its architecture.
MARKS: dict[str, dict] = {
    "medusa_num_heads": {"medusa_num_heads": 3},
    "eagle3": {"speculators_model_type": "eagle3"},
    "peagle": {"speculators_model_type": "peagle"},
    "dflash": {"speculators_model_type": "dflash"},
    "parallel_drafting": {"parallel_drafting": True},
    "ptd_token_id": {"ptd_token_id": 3},
    "markov_rank": {"markov_rank": 0},
    "above": {"markov_rank": 64},
    "dspark": {"speculators_model_type": "dspark"},
    "projector_type": {"dflash_config": {"projector_type": "dspark"}, "speculators_model_type": None},
}


@pytest.mark.parametrize("row", ROWS, ids=[f"{row[0]}-{row[1]}-{row[2]}" for row in ROWS])
def test_a_row_is_recognised(row: list[str], tmp_path: Path) -> None:
    kind, _, name, told = row[:4]
    fields = {"architectures": [name]} if name != "any" else {}
    for mark, values in MARKS.items():
        fields |= values if mark in told and (mark in told.split() or f"`{mark}" in f"`{told}") else {}
    if "medusa_lm_head" in told:
        (tmp_path / "medusa_lm_head.safetensors").touch()
    found = next(one for one in registry.kinds() if one.model.recognises(tmp_path, fields))
    assert found.name == kind


def test_every_layout_has_a_row() -> None:
    named = {(row[0], row[2]) for row in ROWS}
    assert {name for kind, name in named if kind == "eagle3"} == set(WRITERS)
    assert {name for kind, name in named if kind == "peagle"} >= set(OWN)
    assert {name for kind, name in named if kind == "dflash"} == set(NAMES)
    assert {name for kind, name in named if kind == "dspark"} == {*DSPARK_NAMES, "DFlashDraftModel"}
    assert {kind for kind, _ in named} == {kind.name for kind in registry.SHIPPED}
