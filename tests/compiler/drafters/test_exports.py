"""P-EAGLE, DFlash, DSpark and Medusa in the layouts of others: our reader makes the exported network of them."""

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
# How a drafter is made: kind, draft vocabulary (None for the teacher's matrices), fields; and the layouts it has.
CASES: dict[str, tuple[str, int | None, dict, tuple[str, ...]]] = {
    "peagle": ("peagle", 40, {}, ("speculators",)),
    "peagle-whole": ("peagle", 101, {}, ("speculators",)),
    "dflash": ("dflash", None, {}, ("speculators", "specforge")),
    "dflash-cut": ("dflash", 40, {"sample_from_anchor": False}, ("speculators",)),
    "dspark": ("dspark", None, {"markov_head_type": "vanilla"}, ("speculators", "deepspec")),
    "dspark-gated": (
        "dspark",
        None,
        {"markov_head_type": "gated", "confidence_head_with_markov": False},
        ("speculators", "deepspec"),
    ),
    "dspark-rnn": ("dspark", None, {"markov_head_type": "rnn"}, ("speculators", "deepspec")),
    "dspark-cut": ("dspark", 40, {"markov_head_type": "rnn"}, ("speculators",)),
}
WRITTEN = [(case, layout) for case, (*_, layouts) in CASES.items() for layout in layouts]


def folder_of(make: Any, teacher: Checkpoint, case: str) -> tuple[dict, dict]:
    """config.json and tensors; ids of a cut vocabulary descend."""
    kind, draft, own, _ = CASES[case]
    qwen3 = make.sizes | {"model_type": "qwen3", "num_hidden_layers": 2}
    if kind == "peagle":
        config = make.eagle3_config("speculators", draft, num_hidden_layers=2)
        proposed = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}]}
        config |= {"speculators_model_type": "peagle", "mask_token_id": MASK, "speculators_config": proposed}
        return config | {"architectures": ["PEagleSpeculator"]}, make.eagle3_tensors(
            "layers.0", layers=2, draft=draft
        ) | {"mask_hidden": torch.randn(1, 1, 192, generator=torch.Generator().manual_seed(1))}
    tensors = make.dflash_tensors(2, 3, draft)
    head = own.get("markov_head_type", "vanilla")
    if kind == "dspark":
        confidence = "markov" if own.get("confidence_head_with_markov", True) else "hidden"
        tensors |= make.sequential_head(12, head, confidence, draft)
    if draft is None:
        writer = {"architectures": ["Qwen3DSparkModel"], **DSPARK}
        if kind == "dflash":
            nested = {"mask_token_id": MASK, "target_layer_ids": [1, 3, 5]}
            writer = {"architectures": ["DFlashDraftModel"], "dflash_config": nested}
        return qwen3 | {"block_size": 4} | writer | own, tensors
    tensors |= {"embed_tokens.weight": teacher.weight("embed.weight"), "d2t": _descending(tensors["d2t"])}
    stated = {
        "aux_hidden_state_layer_ids": [2, 4, 6],
        "draft_vocab_size": draft,
        "block_size": 4,
        "mask_token_id": MASK,
    }
    name = {"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}[kind]
    heads = {"markov_rank": 12, "enable_confidence_head": True} if kind == "dspark" else {}
    told = {"speculators_model_type": kind, "architectures": [name], "sample_from_anchor": True, **heads}
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
        ("peagle", "specforge", "specforge: no layout of P-EAGLE that is written; expected speculators"),
        (
            "dflash",
            "deepspec",
            "deepspec: no layout of DFlash that is written; expected speculators or specforge",
        ),
        ("dflash-cut", "specforge", "specforge: no form of a part of the vocabulary; export to speculators"),
        (
            "dspark",
            "specforge",
            "specforge: no layout of DSpark that is written; expected speculators or deepspec",
        ),
        ("dspark-cut", "deepspec", "deepspec: no form of a part of the vocabulary; export to speculators"),
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


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"sample_from_anchor": True}, "a first draft by the root's row, which no server reads"),
        ({"aux_layer_ids": [2, 4, 8]}, "the last layer's state, which its readers take with or without the norm"),
        ({"aux_layer_ids": [0, 4, 6]}, "the state that enters layer 0; export to speculators"),
    ],
)
def test_a_block_that_sglang_reads_otherwise_is_refused(
    make: Any, teacher: Checkpoint, tmp_path: Path, changed: dict, said: str
) -> None:
    config, tensors = folder_of(make, teacher, "dflash")
    source = make.save(tmp_path, config | changed, tensors)
    with pytest.raises(RequestError, match=f"specforge: no form of {said}"):
        opened = open_drafter(source, teacher)
        opened.model.exported(opened.checkpoint, teacher, "specforge", "teacher")


@pytest.mark.parametrize(("name", "of"), [("embed_tokens.weight", "embedding"), ("lm_head.weight", "output matrix")])
def test_ends_that_readers_would_replace_are_refused(
    make: Any, teacher: Checkpoint, tmp_path: Path, name: str, of: str
) -> None:
    config, tensors = folder_of(make, teacher, "dspark")
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
