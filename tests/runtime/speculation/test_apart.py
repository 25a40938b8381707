"""Grammars in their own processes: the same texts, and a grammar's damage to its process is its text's alone."""

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import draftwood
from draftwood.errors import RequestError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.opened import OpenedBundle
from draftwood.runtime.speculation.apart import ApartGrammar, ApartGrammars
from draftwood.tests.decoded import drafting_gears

pytest.importorskip("llguidance")

PROMPT = "the cat sat on the mat"
LIST = {"type": "array", "items": {"enum": ["cat", "hat"]}, "minItems": 2, "maxItems": 4}
# Takes memory and time without end.
ENDLESS = {"multipleOf": 2147483647}
# References that lead on and on, until llguidance 1.9 has no stack left and is ended by a signal.
DEADLY = {"$ref": "#/$defs/0", "$defs": {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(9999)} | {"9999": True}}


def apart(bundle: Bundle) -> ApartGrammars:
    assert bundle.tokenizer is not None
    return ApartGrammars(bundle.tokenizer, bundle.manifest.dims.vocabulary, bundle.manifest.teacher.eos)


@pytest.fixture(scope="module", params=["medusa", "eagle3", "fasteagle"])
def model(request: pytest.FixtureRequest, tiny_bundles: dict[str, Path]) -> Iterator[OpenedBundle]:
    """Drafts that rank levels, that follow nodes, and that choose their tree."""
    with draftwood.open(tiny_bundles[request.param], threads=1, prefixes=False) as opened:
        yield opened


@pytest.fixture(scope="module")
def beside(model: OpenedBundle) -> ApartGrammars:
    return apart(model.bundle)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.7}], ids=str)
@pytest.mark.parametrize("grammar", [LIST, "start: /[xqw]{24}/", 'start: "and the hat and the cat"'], ids=str)
def test_texts_and_steps_are_those_of_one_process(
    model: OpenedBundle, beside: ApartGrammars, grammar: Any, sampling: dict
) -> None:
    prompt = model.bundle.tokenizer.encode(PROMPT)  # type: ignore[union-attr]
    for policy in ("plain", *drafting_gears(model.manifest)):
        asked: Any = {"policy": policy, "max_new_tokens": 40, "seed": 5} | sampling
        expected = model.generate(prompt, grammar=grammar, **asked)
        held = beside.begin()
        held.compile(grammar, len(prompt))
        found = model.stream(prompt, held=held, **asked).run()
        assert (found.token_ids, found.steps) == (expected.token_ids, expected.steps)
        held.close()


@pytest.fixture(scope="module")
def grammars(tiny_bundle: Path) -> ApartGrammars:
    return apart(Bundle.open(tiny_bundle))


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (DEADLY, "grammar: is given up, because it ended the process that it was read in"),
        (ENDLESS, "grammar: takes more than "),
        ({"type": "nonsense"}, "grammar: "),
        ("start: (", "grammar: it cannot be followed: "),
        (
            {"oneOf": [{"type": "string"}, {"minLength": 3}]},
            "grammar: it cannot be followed: oneOf constraints are not supported.",
        ),
        ({"enum": [object()]}, "grammar: the schema is not JSON"),
        ({"maximum": 10**400, "type": "integer", "minimum": 10**399}, "grammar: "),
    ],
    ids=["deadly", "endless", "schema", "lark", "one of", "object", "long number"],
)
def test_what_a_grammar_does_is_its_texts_alone(grammars: ApartGrammars, grammar: Any, said: str) -> None:
    beside, held = grammars.begin(), grammars.begin()
    beside.compile(LIST, 0)
    with pytest.raises(RequestError) as found:
        held.compile(grammar, 0)
        for position in range(99):
            held.take(position, int(held.allowed(position).argmax()))
    assert str(found.value).startswith(said) and "\n" not in str(found.value)
    assert beside.allowed(0).any()


def test_who_waits_is_woken_by_the_end_of_its_text(grammars: ApartGrammars) -> None:
    held, ended = grammars.begin(), threading.Event()

    def compile_() -> None:
        with pytest.raises(RequestError, match="grammar: "):
            held.compile(ENDLESS, 0)
        ended.set()

    thread = threading.Thread(target=compile_)
    thread.start()
    held.close()
    assert ended.wait(300)
    thread.join()


def children(grammars: ApartGrammars) -> list[str]:
    assert grammars._process is not None
    pid = grammars._process.pid
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_a_process_ends_with_its_text_and_with_its_program(bundle: Bundle) -> None:
    grammars = apart(bundle)
    texts = [grammars.begin() for _ in range(3)]
    for text in texts:
        text.compile(LIST, 0)
    assert len(children(grammars)) == 3
    ends = [os.pidfd_open(int(child)) for child in children(grammars)]
    texts[0].close()
    program = grammars._process.pid  # type: ignore[union-attr]
    os.kill(program, signal.SIGKILL)
    os.waitid(os.P_PID, program, os.WEXITED | os.WNOWAIT)  # until then it may be sent a text that nobody reads
    assert texts[1].allowed(0).any()  # what has begun goes on
    after = grammars.begin()
    after.compile(LIST, 0)
    assert after.allowed(0).any()
    for text in texts:
        text.close()
    for end in ends:  # each becomes readable once its process has ended
        assert select.select([end], [], [], 60)[0]
        os.close(end)


def test_masks_are_those_of_one_process(bundle: Bundle, grammars: ApartGrammars) -> None:
    held: ApartGrammar = grammars.begin()
    held.compile(LIST, 7)
    near, random = bundle.grammars.begin(LIST), np.random.default_rng(0)
    position = 7
    for _ in range(60):
        allowed_V = near.allowed(position)
        assert (held.allowed(position) == allowed_V).all()
        token = int(random.choice(np.flatnonzero(allowed_V)))
        assert held.allows(position, token)
        for one in (near, held):
            one.take(position, token)
        position = max(7, position + 1 - 3 * (random.random() < 0.2))  # goes back now and then


def test_no_text_takes_a_second_at_every_answer(python: Callable[..., str]) -> None:
    """Of ten answers of 0.3 s of processor time each, the saved second gives three."""
    code = """
import os, socket, time
from draftwood.runtime.speculation import keeper

class Slow:
    def begin(self, grammar, thought):
        return self

    def copied(self):
        return self

    def allows(self, position, token):
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
        return True

ours, theirs = socket.socketpair()
process = os.fork()
if process == 0:
    ours.close()
    keeper.serve(theirs, Slow)
    os._exit(0)
theirs.close()
source, answered = ours.makefile("rb"), 0
ours.sendall(keeper.framed(("compile", "x", False, 0, None)))
assert keeper.read(source) == ["", None]
for position in range(10):
    ours.sendall(keeper.framed(("allows", [], position, 5)))
    if keeper.read(source) is None:
        break
    answered += 1
ours.close(), source.close()
print(answered, os.WTERMSIG(os.waitpid(process, 0)[1]))
"""
    answered, ended = map(int, python(code).split())
    assert 0 < answered < 6 and ended == signal.SIGPROF
