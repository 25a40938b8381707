"""EAGLE-3 drafters in the layouts of others: our reader makes the exported network of them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwood.compiler.drafters.eagle3.model import Eagle3Model
from draftwood.compiler.drafters.eagle3.network import Eagle3, Eagle3Config
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.errors import RequestError

IDS = "eagle_aux_hidden_state_layer_ids"


def made(
    make: Any, folder: Path, teacher: Checkpoint, draft: int = 40, shuffled: bool = False, **fields: object
) -> Any:
    """A drafter as SafeAILab writes it, opened."""
    config, tensors = make.eagle3_config("SafeAILab", draft), make.eagle3_tensors(draft=draft)
    if shuffled:
        ids = (torch.arange(draft) + tensors["d2t"]).flip(0)
        tensors |= {"d2t": ids - torch.arange(draft), "lm_head.weight": tensors["lm_head.weight"].flip(0)}
    return Eagle3Model.open(make.save(folder, config | fields, tensors), teacher).checkpoint


def exported(opened: Any, layout: str, verifier: str) -> Any:
    return Eagle3Model.exported(opened, opened.teacher, layout, verifier)


def read_back(make: Any, folder: Path, teacher: Checkpoint, opened: Any, layout: str) -> Any:
    return Eagle3Model.open(make.save(folder, *exported(opened, layout, "teacher")), teacher).checkpoint


@pytest.mark.parametrize("layout", ["speculators", "specforge"])
@pytest.mark.parametrize("drafter", [{}, {"draft": 101}, {"shuffled": True}], ids=["subset", "whole", "unsorted"])
def test_what_is_read_back_is_the_same_network(
    make: Any, teacher: Checkpoint, tmp_path: Path, load: Callable, layout: str, drafter: dict
) -> None:
    before = made(make, tmp_path / "one", teacher, **drafter)
    after = read_back(make, tmp_path / "two", teacher, before, layout)
    free = {"max_positions": before.config.block.max_positions, "eos": (), "bos": None}
    same = replace(after.config, block=replace(after.config.block, **free))
    assert same == replace(before.config, block=replace(before.config.block, **free))
    networks = [dict(load(Eagle3, one).state_dict()) for one in (before, after)]
    order = before.ids.argsort()
    for name in ("draft_head.weight", "teacher_ids"):
        if name in networks[0]:
            networks[0][name] = networks[0][name][order]
    torch.testing.assert_close(networks[1], networks[0], rtol=0, atol=0)
    assert torch.equal(after.ids, before.ids[order])


def test_ids_are_written_in_the_layouts_own_meaning(make: Any, teacher: Checkpoint, tmp_path: Path) -> None:
    before = made(make, tmp_path / "one", teacher)
    entered = list(before.config.aux_layers)
    assert exported(before, "speculators", "teacher")[0][IDS] == entered
    assert exported(before, "specforge", "teacher")[0]["eagle_config"][IDS] == [layer - 1 for layer in entered]


def test_keys_are_the_layouts_own(make: Any, teacher: Checkpoint, tmp_path: Path) -> None:
    before = made(make, tmp_path / "one", teacher)
    speculators, specforge = (exported(before, layout, "teacher")[1] for layout in ("speculators", "specforge"))
    assert {key.replace("layers.0.", "midlayer.") for key in speculators} == specforge.keys()
    assert specforge["t2d"].dtype == torch.bool and specforge["t2d"].sum() == 40
    whole = made(make, tmp_path / "two", teacher, draft=101)
    assert (
        "d2t" not in exported(whole, "speculators", "teacher")[1]
        and exported(whole, "specforge", "teacher")[1]["t2d"].all()
    )


@pytest.mark.parametrize(
    ("changed", "layout", "said"),
    [
        ({"norm_before_residual": True}, "specforge", "no form of norm_before_residual; export to speculators"),
        ({"feature_norm": "whole"}, "specforge", "no form of norm_before_fc"),
        ({"norm_output": True}, "specforge", "no form of norm_output, whose meaning there has changed"),
        ({"aux_layers": (2, 4)}, "specforge", "no form of 2 states of the teacher; it takes 3"),
        ({"aux_layers": (0, 2, 4)}, "specforge", "no form of the state that enters layer 0"),
        ({"window": 128}, "speculators", "a window of 128 tokens, which some of its readers ignore"),
        ({}, "gguf", "gguf: no layout of EAGLE-3 that is written; expected speculators or specforge"),
    ],
)
def test_what_a_layout_has_no_form_of_is_refused(
    make: Any, teacher: Checkpoint, tmp_path: Path, changed: dict, layout: str, said: str
) -> None:
    before = made(make, tmp_path / "one", teacher)
    config: Eagle3Config = replace(before.config, **changed)
    with pytest.raises(RequestError, match=said):
        exported(replace(before, config=config), layout, "teacher")


def test_rope_that_readers_compute_differently_is_refused(make: Any, teacher: Checkpoint, tmp_path: Path) -> None:
    before = made(make, tmp_path / "one", teacher, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(RequestError, match="specforge: rope dynamic, which its readers compute in different ways"):
        exported(before, "specforge", "teacher")


@pytest.mark.parametrize("layout", ["speculators", "specforge"])
def test_rope_is_kept(make: Any, teacher: Checkpoint, tmp_path: Path, layout: str) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 16}
    before = made(make, tmp_path / "one", teacher, rope_scaling=rope)
    after = read_back(make, tmp_path / "two", teacher, before, layout)
    assert after.config.block.rope_scaling == before.config.block.rope_scaling is not None
