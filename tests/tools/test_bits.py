"""`measure.bits`: rows held against plain decoding, turn by turn."""

import json
from pathlib import Path

import pytest

from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding, Options
from draftwood.runtime.engines.bitwise import BitwiseEngine
from draftwood.runtime.policy import policy_for
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.tools.measure.bits import Held, main

NEW = 12


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"id": f"a/{turn}", "conversation": "a", "turn": turn, "prompt": "the quiet harbour"} for turn in (1, 2)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_is_held_is_the_plain_text(tiny_bundle: Path, temperature: float) -> None:
    engine, sampling = BitwiseEngine(Bundle.open(tiny_bundle)), Sampling(temperature=temperature, seed=3)
    held = Held(engine, engine.bundle.gear("ragged-kv128"), sampling)
    options = Options(max_new_tokens=NEW, sampling=sampling)
    plain = Decoding(engine, [5, 6, 7], options, policy_for(engine.bundle)).run()
    assert held.answer([5, 6, 7], NEW) == list(plain.token_ids)
    assert (held.texts, held.tokens) == (1, len(plain.token_ids))


def test_every_row_of_every_turn_is_counted(
    tiny_bundle: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = [str(tiny_bundle), "--prompts", str(prompts), "--max-new-tokens", str(NEW), "--gear", "ragged-kv128"]
    found = {}
    for name, more in (("bitwise", ["--engine", "bitwise"]), ("ordinary", ["--one"])):
        main([*run, *more, "--json"])
        found[name] = json.loads(capsys.readouterr().out)
    tree = Bundle.open(tiny_bundle).trees["ragged"][1]
    for report in found.values():
        counts = report["rows"].values()
        assert report["texts"] == 2 and sum(c["rows"] for c in counts) == report["steps"] * (tree.rows + 1) > 0
    exact = {"apart": 0.0, "redrawn": 0}
    for count in found["bitwise"]["rows"].values():
        assert count == {"rows": count["rows"], "equal_one": count["rows"], "equal_two": count["rows"], **exact}
    # The control: the ordinary engine's rows differ by rounding, which the same comparison must see.
    other = found["ordinary"]["rows"]["other"]
    assert other["equal_one"] < other["rows"] and other["apart"] > 0 and "equal_two" not in other
