"""A text is a function of its request in a model as deep as real ones: SmolLM2's thirty layers and its own blocks. If
DRAFTWOOD_GGUF names its file, it also has its own numbers."""

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
LAYERS = 30
SLOW = pytest.mark.slow
# Words that answers repeat, so that trees are looked up, and numbers of tokens that leave a row for a last block.
ASKED = "the cat sat on the mat and the hat; the cat saw the hat, and number {} is on the mat with the cat. " * 4


@pytest.fixture(scope="module", params=["nbits", pytest.param("exact", marks=SLOW), pytest.param("w8a8", marks=SLOW)])
def bundle(
    request: pytest.FixtureRequest,
    save_tiny: Callable[..., Path],
    kept: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    model = next((file for file in real_files() if "SmolLM2" in file.name), None)
    if model is None:
        (folder / "teacher").mkdir()
        model = folder / "model.gguf"
        save_gguf(save_tiny(folder / "teacher", num_hidden_layers=LAYERS), model, "Q4_1")
    trees = read_specs("lookup:chain:3").trees
    asked = BuildRequest(
        model=model, drafter=None, trees=trees, slots=(256,), prefill_rows=(8,), precision=request.param, texts=8
    )
    return kept(f"deep-{request.param}-{model.stem}", lambda made: build(asked, made))


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
