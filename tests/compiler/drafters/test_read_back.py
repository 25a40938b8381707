"""Published drafters as students, which count them: the network that the folder describes, or a refusal in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from draftwood.compiler.training.student import Student
from draftwood.compiler.training.teacher import FrozenTeacher
from draftwood.errors import CheckpointError, RequestError
from draftwood.tools.training.students import load

LAYERS, HIDDEN, VOCABULARY = 8, 64, 300
ROPE = {"rope_type": "linear", "factor": 4.0}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory, save_tiny: Callable[..., Path]) -> FrozenTeacher:
    return FrozenTeacher.open(save_tiny(tmp_path_factory.mktemp("teacher"), num_hidden_layers=LAYERS))


@pytest.fixture
def read(tmp_path: Path, teacher: FrozenTeacher, tiny_eagle3: Path) -> Callable[..., Student]:
    """The student of a folder whose config.json gets other fields; None leaves one out."""

    def read(folder: Path = tiny_eagle3, **fields: Any) -> Student:
        copied = shutil.copytree(folder, tmp_path / "drafter")
        config = json.loads((copied / "config.json").read_text()) | fields
        (copied / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        return load(copied, teacher, 3)

    return read


@pytest.mark.parametrize(
    ("fields", "entered"),
    [
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 4, 6]}}, (1, 5, 7)),  # SpecForge's are left
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 4, 6]}, "aux_layer_ids": [0, 1, 2]}, (0, 1, 2)),
        ({}, (2, 4, 5)),
    ],
)
def test_a_student_reads_the_states_that_a_bundle_reads(
    read: Callable[..., Student], fields: dict[str, Any], entered: tuple[int, ...]
) -> None:
    assert read(**{"aux_layer_ids": None, **fields}).aux == entered


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"rope_scaling": ROPE}, "rope scaling"),
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"normed_feedback": True}, "normed feedback"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 64}, "a window"),
    ],
)
def test_what_no_student_computes_is_refused(read: Callable[..., Student], fields: dict[str, Any], what: str) -> None:
    with pytest.raises(CheckpointError, match=f"a drafter with {what}; expected one as trainings here make it; to"):
        read(**fields)


def test_dsparks_published_fields_are_enough(
    read: Callable[..., Student], tmp_path: Path, save_one_pass: dict[str, Callable[[Path], None]]
) -> None:
    save_one_pass["dspark"](tmp_path / "dspark")
    assert read(tmp_path / "dspark", aux_layer_ids=None, target_layer_ids=[0, 4, 6]).aux == (1, 5, 7)


def test_heads_without_biases_for_a_part_of_the_vocabulary(tmp_path: Path, teacher: FrozenTeacher) -> None:
    ids, matrix = torch.arange(5, VOCABULARY, 7), torch.randn(HIDDEN, HIDDEN)
    output = torch.randn(len(ids), HIDDEN)
    save_file(
        {"blocks.0.layers.0.weight": matrix, "lm_heads.0.weight": output, "token_map": ids},
        tmp_path / "model.safetensors",
    )
    config = {"model_type": "medusa", "vocab_size": VOCABULARY, "truncated_vocab_size": len(ids)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    student, hidden = load(tmp_path, teacher), torch.randn(4, HIDDEN)
    student.output_VH = student.output_VH.float()  # bfloat16 on a CPU that multiplies it fast
    (head,) = student.heads
    features = hidden + torch.nn.functional.silu(hidden @ matrix.T)
    torch.testing.assert_close(head.features(hidden), features)
    assert torch.equal(student.best(student.logits(features, 0), 3), ids[(features @ output.T).topk(3).indices])


def test_kinds_without_a_training_say_how_to_count_them(
    tmp_path: Path, teacher: FrozenTeacher, save_one_pass: dict[str, Callable[[Path], None]]
) -> None:
    save_one_pass["peagle"](tmp_path / "peagle")
    with pytest.raises(RequestError, match=r"peagle: .*; to count one, build a bundle with it and calibrate that"):
        load(tmp_path / "peagle", teacher)
