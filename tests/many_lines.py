"""Lines for tokenizers: six languages, code, emoji and odd spaces, in every company."""

from __future__ import annotations

import random
from collections.abc import Iterator

_WORDS = (
    "the quick brown foxes don't WE'VE I'll", "der größere Käse läuft über die Straße", "l'été à Noël, ça va où",
    "¿qué tal, señor? mañana", "Привет, мир и ещё раз", "你好世界今天天气很好", "日本語のテキスト", "한국어 문장입니다",
    "def f(x): return x**2 + 0x1F # it's", "for(int i=0;i<10;++i){a[i]+=2;}", "SELECT * FROM t WHERE id>=42;",
    "https://example.org/a?b=c&d=%20", "{\"key\": [1, 2.5e-3, null]}", "<div class='x'>&amp;</div>",
    "👩\u200d👧 🏳\ufe0f\u200d🌈 😀👍🏽", "e\u0301 o\u0308 \u0e01\u0e33", "3.14159 1,000,000 ١٢٣ Ⅳ ½ ²",
    "~~ --- ... !!! ?!",
    "\u2581under ▁▁ x", "<|im_start|>user", "<|endoftext|>", "</s>", "<s>", "ﬁ ﬀ ǅ ß",
)  # fmt: skip
_SPACES = (" ", "  ", "   ", "\t", "\n", "\r\n", "\n\n  ", " \n", "\u00a0", "\u2003", "\u200b", "\v", "", "", " \t ")


def lines(count: int, seed: int = 0) -> Iterator[str]:
    """So many of them, always the same."""
    chosen = random.Random(seed)
    pieces = [piece for words in _WORDS for piece in (words, *words.split(" "))]
    for _ in range(count):
        yield "".join(chosen.choice(pieces) + chosen.choice(_SPACES) for _ in range(chosen.randint(1, 9)))
