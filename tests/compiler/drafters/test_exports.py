"""DSpark and Medusa in the layouts of others: our reader makes the exported network of them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwood.compiler.drafters.common.export import embedding, output_matrix
from draftwood.compiler.drafters.kind import MEDUSA
from draftwood.compiler.drafters.model import OpenedDrafter
from draftwood.compiler.drafters.registry import open_drafter
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.errors import RequestError

MASK = 99
DSPARK = {"mask_token_id": MASK, "target_layer_ids": [1, 3, 5], "markov_rank": 12, "enable_confidence_head": True}
# How a DSpark is made: draft vocabulary (None for the teacher's matrices), fields; and the layouts it has.
CASES: dict[str, tuple[int | None, dict, tuple[str, ...]]] = {
    "vanilla": (None, {"markov_head_type": "vanilla"}, ("speculators", "deepspec")),
    "gated": (
        None,
        {"markov_head_type": "gated", "confidence_head_with_markov": False},
        ("speculators", "deepspec"),
    ),
    "rnn": (None, {"markov_head_type": "rnn"}, ("speculators", "deepspec")),
    "cut": (40, {"markov_head_type": "rnn"}, ("speculators",)),
}
WRITTEN = [(case, layout) for case, (*_, layouts) in CASES.items() for layout in layouts]


def folder_of(make: Any, teacher: Checkpoint, case: str) -> tuple[dict, dict]:
    """config.json and tensors; ids of a cut vocabulary descend."""
    draft, own, _ = CASES[case]
    qwen3 = make.sizes | {"model_type": "qwen3", "num_hidden_layers": 2}
    confidence = "markov" if own.get("confidence_head_with_markov", True) else "hidden"
    tensors = make.dflash_tensors(2, 3, draft) | make.sequential_head(12, own["markov_head_type"], confidence, draft)
    if draft is None:
        return qwen3 | {"block_size": 4, "architectures": ["Qwen3DSparkModel"], **DSPARK} | own, tensors
    tensors |= {"embed_tokens.weight": teacher.weight("embed.weight"), "d2t": _descending(tensors["d2t"])}
    stated = {
        "aux_hidden_state_layer_ids": [2, 4, 6],
        "draft_vocab_size": draft,
        "block_size": 4,
        "mask_token_id": MASK,
    }
    told = {"speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"], "sample_from_anchor": True}
    told |= {"markov_rank": 12, "enable_confidence_head": True}
    return told | stated | {"transformer_layer_config": qwen3} | own, tensors


def _descending(d2t: torch.Tensor) -> torch.Tensor:
    order = torch.arange(len(d2t))
    return (order + d2t).flip(0) - order


def written_again(make: Any, teacher: Checkpoint, folder: Path, case: str, layout: str) -> tuple[Any, Any, Any]:
    """The drafter, its export, and the drafter that is read from that."""
    source = make.save(folder / "one", *folder_of(make, teacher, case))
    before = open_drafter(source, teacher)
    written = before.model.exported(before.checkpoint, teacher, layout, "teacher")
    return before, written, open_drafter(make.save(folder / "two", *written), teacher)


def by_teachers_ids(opened: OpenedDrafter) -> dict[str, torch.Tensor]:
    """Every weight, the rows of a draft vocabulary in the order of the teacher's ids; both ends, if it has them."""
    one: Any = opened.checkpoint
    inner = [name for name in one.names() if name not in ("draft_embed.weight", "draft_head.weight")]
    found = {name: one.weight(name) for name in inner}
    if (bias := "markov_head.markov_w2.weight") in found:
        found[bias] = found[bias][one.ids.argsort()]
    return found | {"embedding": embedding(one), "output": output_matrix(one), "ids": one.ids.sort().values}


@pytest.mark.parametrize(("case", "layout"), WRITTEN, ids=["-to-".join(pair) for pair in WRITTEN])
def test_what_is_read_back_is_the_same_network(
    make: Any, teacher: Checkpoint, tmp_path: Path, case: str, layout: str
) -> None:
    before, _, after = written_again(make, teacher, tmp_path, case, layout)
    assert after.model.kind == before.model.kind
    torch.testing.assert_close(by_teachers_ids(after), by_teachers_ids(before), rtol=0, atol=0)
    free = {"max_positions": 1, "eos": (), "bos": None}
    configs = [replace(one.model.config, block=replace(one.model.config.block, **free)) for one in (before, after)]
    # Where the two ends lie may change; what they hold was compared above.
    assert replace(configs[1], own_embedding=False, tied_head=True) == replace(
        configs[0], own_embedding=False, tied_head=True
    )


@pytest.mark.parametrize(
    ("case", "layout", "said"),
    [
        (
            "vanilla",
            "specforge",
            "specforge: no layout of DSpark that is written; expected speculators or deepspec",
        ),
        ("cut", "deepspec", "deepspec: no form of a part of the vocabulary; export to speculators"),
    ],
)
def test_what_a_layout_has_no_form_of_is_refused(
    make: Any, teacher: Checkpoint, tmp_path: Path, case: str, layout: str, said: str
) -> None:
    source = make.save(tmp_path, *folder_of(make, teacher, case))
    with pytest.raises(RequestError) as caught:
        opened = open_drafter(source, teacher)
        opened.model.exported(opened.checkpoint, teacher, layout, "teacher")
    assert str(caught.value) == said


def test_the_last_layers_state_is_refused(make: Any, teacher: Checkpoint, tmp_path: Path) -> None:
    config, tensors = folder_of(make, teacher, "vanilla")
    source = make.save(tmp_path, config | {"aux_layer_ids": [2, 4, 8]}, tensors)
    with pytest.raises(RequestError, match="deepspec: no form of the last layer's state"):
        opened = open_drafter(source, teacher)
        opened.model.exported(opened.checkpoint, teacher, "deepspec", "teacher")


@pytest.mark.parametrize(("name", "of"), [("embed_tokens.weight", "embedding"), ("lm_head.weight", "output matrix")])
def test_ends_that_readers_would_replace_are_refused(
    make: Any, teacher: Checkpoint, tmp_path: Path, name: str, of: str
) -> None:
    config, tensors = folder_of(make, teacher, "vanilla")
    source = make.save(tmp_path, config, tensors | {name: torch.ones(101, 64)})
    with pytest.raises(RequestError, match=f"an? {of} of its own, but its readers take the teacher's"):
        opened = open_drafter(source, teacher)
        opened.model.exported(opened.checkpoint, teacher, "deepspec", "teacher")


@pytest.fixture
def heads(teacher: Checkpoint, tmp_path: Path, save_medusa: Callable) -> Callable[..., OpenedDrafter]:
    def opened(blocks: int = 1, **shape: Any) -> OpenedDrafter:
        (tmp_path / "heads").mkdir()
        save_medusa(tmp_path / "heads", 2, blocks, **shape)
        return MEDUSA.model.open(tmp_path / "heads", teacher)

    return opened


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_heads_are_read_back(
    make: Any, teacher: Checkpoint, tmp_path: Path, heads: Callable, blocks: int, tied: bool
) -> None:
    before = heads(blocks, tied=tied)
    after = open_drafter(
        make.save(tmp_path / "two", *before.model.exported(before.checkpoint, teacher, "vllm", "t")), teacher
    )
    for name in before.checkpoint.names():
        assert torch.equal(after.checkpoint.weight(name), before.checkpoint.weight(name))
    assert after.model.config == replace(before.model.config, tied=False)
    for head in range(2 if tied else 0):
        assert torch.equal(after.checkpoint.weight(f"heads.{head}.out.weight"), teacher.weight("lm_head.weight"))


def test_heads_of_a_part_of_the_vocabulary(make: Any, teacher: Checkpoint, tmp_path: Path) -> None:
    ids, random = torch.tensor([70, 3, 9]), torch.Generator().manual_seed(2)
    tensors = {"blocks.0.layers.0.weight": torch.randn(64, 64, generator=random), "token_map": ids}
    fields = {"model_type": "medusa", "architectures": ["MedusaModel"], "truncated_vocab_size": 3, "vocab_size": 101}
    source = make.save(
        tmp_path / "one", fields, tensors | {"lm_heads.0.weight": torch.randn(101, 64, generator=random)}
    )
    before = open_drafter(source, teacher)
    after = open_drafter(
        make.save(tmp_path / "two", *before.model.exported(before.checkpoint, teacher, "vllm", "t")), teacher
    )
    for name in before.checkpoint.names():
        assert torch.equal(after.checkpoint.weight(name), before.checkpoint.weight(name))
    assert torch.equal(after.checkpoint.buffers(8)["teacher_ids"], ids) and after.model == before.model


def test_heads_have_one_layout(teacher: Checkpoint, heads: Callable) -> None:
    opened = heads(2)
    with pytest.raises(RequestError, match="speculators: no layout of Medusa that is written; expected vllm"):
        opened.model.exported(opened.checkpoint, teacher, "speculators", "t")
