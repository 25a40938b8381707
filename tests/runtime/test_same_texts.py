"""A text is a function of its request in a model of SmolLM2's own blocks: of eight layers, and in slow tests as deep as
real ones. If DRAFTWOOD_GGUF names its file, it also has its own numbers and thirty layers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.tests.gguf_files import real_files, save_gguf
from draftwood.tests.same_texts import differences
from draftwood.trees.spec import read_specs

TEXTS, NEW = 12, 12
# Depth lets a difference grow until a token shows it; engines/test_companions.py holds two layers to equal bits.
MODELS = [
    pytest.param((precision, layers), id=f"{precision}-{layers}", marks=pytest.mark.slow if layers == 30 else [])
    for precision, layers in (("nbits", 8), ("nbits", 30), ("exact", 30), ("w8a8", 30))
]
# Words that answers repeat, so that trees are looked up, and numbers of tokens that leave a row for a last block.
ASKED = "the cat sat on the mat and the hat; the cat saw the hat, and number {} is on the mat with the cat. " * 4


@pytest.fixture(scope="module", params=MODELS)
def bundle(
    request: pytest.FixtureRequest,
    save_tiny: Callable[..., Path],
    kept: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    precision, layers = request.param
    folder = tmp_path_factory.mktemp("texts")
    model = next((file for file in real_files() if "SmolLM2" in file.name), None)
    if model is None:
        (folder / "teacher").mkdir()
        model = folder / "model.gguf"
        save_gguf(save_tiny(folder / "teacher", num_hidden_layers=layers), model, "Q4_1")
    trees = read_specs("lookup:chain:3").trees
    asked = BuildRequest(
        model=model, drafter=None, trees=trees, slots=(256,), prefill_rows=(), precision=precision, texts=8
    )
    return kept(f"texts-{precision}-{layers}-{model.stem}", lambda made: build(asked, made))


def prompts(bundle: Path) -> list[list[int]]:
    tokenizer = Bundle.open(bundle).tokenizer
    assert tokenizer is not None
    return [tokenizer.encode(ASKED.replace("{}", str(number)))[: 33 + 4 * number] for number in range(TEXTS)]


def test_a_deep_models_texts_are_functions_of_their_requests(bundle: Path) -> None:
    asked = prompts(bundle)
    assert set(map(len, asked)) > {33, 65}  # a row more than blocks of 32
    found = differences(bundle, asked, NEW)
    assert len(found) == 4 and not any(found.values()), found


def test_a_text_that_depends_on_its_company_is_found(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = CpuEngine.verify

    def beside(self, states, drafts):
        outputs = own(self, states, drafts)
        for output in outputs if len(states) > 1 else ():
            output.logits_RV[:] = np.roll(output.logits_RV, 1, axis=-1)
        return outputs

    monkeypatch.setattr(CpuEngine, "verify", beside)
    found = differences(bundle, prompts(bundle)[:8], 4)
    assert found.pop("together with seven others") and not any(found.values())
