"""Long prompts made of short ones."""

import pytest

from draftwood.runtime.text.tokenizer import Tokenizer
from draftwood.tests import fixtures
from draftwood.tools.documents import behind_documents
from draftwood.tools.prompts import BUILT_IN, read_prompts


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(fixtures.TEACHER)


@pytest.mark.parametrize("tokens", [100, 700, 3000])
def test_a_question_comes_behind_others_up_to_its_length(tokenizer: Tokenizer, tokens: int) -> None:
    prompts = read_prompts(BUILT_IN)
    found = behind_documents(prompts, 3, tokens, tokenizer)
    assert found is not None and found.text.endswith("\n\n" + prompts[3].text)
    assert found.text.startswith(prompts[4].text) and found.conversation == prompts[3].conversation
    # Prompts are read again as one text, in which neighbouring words may be other tokens.
    assert len(tokenizer.chat([{"role": "user", "content": found.text}])) == pytest.approx(tokens, rel=0.04)
    assert behind_documents(prompts, 3, 5, tokenizer) is None
