"""The public surface: the result of `draftwood.open`, alone, in a row and from several threads."""

import ast
import asyncio
import inspect
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import draftwood
from draftwood.errors import NumericError, RequestError
from draftwood.runtime import decoding, opened
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding
from draftwood.runtime.engines import registry
from draftwood.runtime.engines.choice import open_engine
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.engines.opening import USUAL, Opening
from draftwood.runtime.engines.registry import EngineKind, register
from draftwood.runtime.opened import OpenedBundle
from draftwood.runtime.options import Asked, Options
from draftwood.runtime.policy import FixedTree
from draftwood.runtime.sharing import advance
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.runtime.speculation.step import Outcome
from draftwood.runtime.trace import Trace
from draftwood.trees.calibration import Calibration


@pytest.fixture(scope="module")
def model(tiny_bundle: Path) -> OpenedBundle:
    return draftwood.open(tiny_bundle, threads=1)


def test_a_prompt_is_text_messages_or_ids(model: OpenedBundle) -> None:
    tokenizer = model.bundle.tokenizer
    assert tokenizer is not None
    chat = [{"role": "user", "content": "the cat"}]
    prompts = (("the cat", tokenizer.encode("the cat")), (chat, tokenizer.chat(chat)), ([5, 6], [5, 6]))
    for prompt, ids in (*prompts, ({"messages": chat, "tools": None}, tokenizer.chat(chat))):
        result = model.generate(prompt, max_new_tokens=6, ignore_eos=True)
        assert result.token_ids == model.generate(ids, max_new_tokens=6, ignore_eos=True, policy="plain").token_ids
        assert result.text == tokenizer.decode(result.token_ids) and result.steps >= 1


@pytest.mark.parametrize(
    ("prompt", "goes_on"),
    [
        ("The cat", True),
        ([3, 5], True),
        ([{"role": "user", "content": "a"}], False),
        ({"messages": [], "continue_final_message": True}, True),
    ],
    ids=["text", "ids", "chat", "continued chat"],
)
def test_an_answer_goes_on_with_its_prompt_unless_a_turn_begins(
    model: OpenedBundle, monkeypatch: pytest.MonkeyPatch, prompt: Any, goes_on: bool
) -> None:
    monkeypatch.setattr(opened, "prompt_ids", lambda bundle, prompt: [3, 5, 7])
    made = []
    monkeypatch.setattr(decoding, "Stream", lambda *args, after, **more: made.append(after))
    model.stream(prompt, max_new_tokens=1)
    assert made == [(3, 5, 7) if goes_on else ()]


def test_opening_again_imports_what_it_needs(tiny_bundle: Path, python: Callable[..., str]) -> None:
    """Each of these takes a twentieth of an opening or more; templates that have been parsed are not parsed again."""
    with draftwood.open(tiny_bundle, threads=1) as model:
        assert model.bundle.tokenizer is not None and model.bundle.tokenizer.has_chat
    unused = ("asyncio", "ssl", "jinja2", "importlib.metadata", "torch", "llguidance")
    code = f"import sys, draftwood\nwith draftwood.open({str(tiny_bundle)!r}, threads=1) as model:\n"
    assert python(f"{code}    print(*sorted(set({unused}) & set(sys.modules)))").split() == []


def test_the_times_are_those_that_were_tuned_with_as_many_threads(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []
    monkeypatch.setattr(opened, "tuned_times", lambda bundle, engine, threads: asked.append(threads) or ())
    draftwood.open(tiny_bundle, threads=1).close()
    assert asked == [1]


@pytest.mark.parametrize("prompt", [3, None, [1, "a"], [{"role": "user"}], [True], {"chat": []}, b"ab"], ids=str)
def test_what_is_no_prompt_is_refused(model: OpenedBundle, prompt: Any) -> None:
    with pytest.raises(RequestError, match=r"prompt|chat"):
        model.generate(prompt)


def test_numpys_numbers_are_numbers(model: OpenedBundle) -> None:
    own = model.generate([5, 6], max_new_tokens=3, stop_token_ids=[7], temperature=0.5)
    asked = {"max_new_tokens": np.int64(3), "stop_token_ids": np.array([7]), "temperature": np.float32(0.5)}
    for prompt in (np.array([5, 6]), [np.int64(5), np.int64(6)]):
        assert model.generate(prompt, **asked).token_ids == own.token_ids
    assert Options.of(stop_token_ids=range(7, 9)).stop_token_ids == (7, 8)


# A program's mistakes: what Python would iterate, compare or take for true.
ODD = (None, True, 5, -1, 1.5, "false", "hello", b"x", ["a", 1], [1.5], [None], {"a": 1}, {1.5: 1.0}, {1, 2}, object(),
       range(3), np.array(3.5), np.array(["a"]), "\ud800", int)  # fmt: skip


@pytest.mark.parametrize("name", Asked.__annotations__)
def test_an_option_is_of_its_type_or_refused_in_one_line(name: str) -> None:
    for value in ODD:
        try:
            options = Options.of(**{name: value})
        except RequestError as error:
            assert name in str(error) or "options" in str(error) or "stop" in str(error), error
            continue
        chosen = {field: getattr(part, field) for part in (options, options.sampling, options.wishes)
                  for field in part.__slots__}  # fmt: skip
        kept = chosen["stop_strings" if name == "stop" else name]
        assert kept in (value, (value,)) or list(kept) == list(value)
        assert not isinstance(value, str) or name in ("stop", "grammar")


@pytest.mark.parametrize(
    "value", [5, 1.5, b"x", ["a"], {"a": 1}, object(), int], ids=lambda value: type(value).__name__
)
def test_what_is_no_policy_trace_opening_or_folder_is_refused(model: OpenedBundle, value: Any) -> None:
    for name in ("policy", "trace"):
        with pytest.raises(RequestError, match=f"{name}: expected"):
            model.generate([5], max_new_tokens=2, **{name: value})
    for call in (lambda: draftwood.open(value), lambda: draftwood.open(model.bundle.folder, value)):
        with pytest.raises(RequestError, match=r"expected .*, got"):
            call()
    for name in ("calibration", "limits", "latency", "sampled", "occupancy"):
        with pytest.raises(RequestError, match=rf"{name}: expected .*, got"):
            draftwood.plan(**{"calibration": Calibration(), name: value})


def test_streamed_pieces_are_the_text(model: OpenedBundle, prompt: list[int]) -> None:
    stream = model.stream(prompt, max_new_tokens=20, temperature=0.9, seed=4, ignore_eos=True)
    pieces = "".join(stream)
    assert stream.result is not None and pieces == stream.result.text
    again = model.generate(prompt, max_new_tokens=20, temperature=0.9, seed=4, ignore_eos=True)
    assert stream.result.token_ids == again.token_ids
    assert stream.result.finish_reason == "length"


def test_a_closed_bundle_answers_no_more(tiny_bundle: Path, prompt: list[int]) -> None:
    with draftwood.open(tiny_bundle, threads=1) as model:
        begun = iter(model.stream(prompt, ignore_eos=True))
        next(begun)
    model.close()
    for refused in (lambda: model.generate(prompt), lambda: next(begun)):
        with pytest.raises(RequestError, match="is closed; open it again"):
            refused()


def test_a_closed_bundle_answers_no_more_on_asyncio(tiny_bundle: Path, prompt: list[int]) -> None:
    async def closed() -> None:
        model = draftwood.open(tiny_bundle, threads=1)
        begun = model.astream(prompt, ignore_eos=True)
        await anext(begun)
        model.close()
        for refused in (model.agenerate(prompt), anext(begun)):
            with pytest.raises(RequestError, match="is closed; open it again"):
                await refused

    asyncio.run(closed())


def test_a_text_is_decoded_once_however_often_it_is_iterated_over(model: OpenedBundle, prompt: list[int]) -> None:
    left, ended = (model.stream(prompt, max_new_tokens=30, ignore_eos=True) for _ in range(2))
    whole = ended.run()
    for _ in left:
        if left.tokens:
            break
    begun = tuple(left.tokens)
    result = left.run()
    assert result.finish_reason == "cancelled" and result.token_ids == begun == whole.token_ids[: len(begun)]
    assert ended.run() is whole


def test_a_text_has_one_reader_at_a_time(model: OpenedBundle, prompt: list[int]) -> None:
    stream = model.stream(prompt, max_new_tokens=5, ignore_eos=True)
    reader = iter(stream)
    next(reader)
    for second in (stream.run, lambda: next(iter(stream))):
        with pytest.raises(RequestError, match="stream: another iterator over it is open"):
            second()
    list(reader)
    assert stream.run().finish_reason == "length"
    assert (model.figures().running, model.figures().running_bytes) == (0, 0)


def test_a_result_has_the_log_probabilities_that_were_asked_for(model: OpenedBundle, prompt: list[int]) -> None:
    logprobs = model.generate(prompt, max_new_tokens=6, ignore_eos=True, logprobs=2).logprobs
    assert logprobs is not None and [len(one.top) for one in logprobs] == [2] * 6
    assert all(one.logprob == one.top[0][1] for one in logprobs)
    assert model.generate(prompt, max_new_tokens=6).logprobs is None


def test_a_trace_is_of_one_text(model: OpenedBundle, prompt: list[int], tmp_path: Path) -> None:
    trace, path = Trace(), str(tmp_path / "run.jsonl")
    model.generate(prompt, max_new_tokens=3, trace=trace)
    trace.write(path)
    assert Trace.read(path).events == trace.events
    with pytest.raises(RequestError, match="trace: has the events of another text"):
        model.generate(prompt, max_new_tokens=3, trace=trace)
    trace = Trace()
    begun = [model.stream(prompt, max_new_tokens=3, trace=trace) for _ in range(2)]
    assert len(begun[0].run().token_ids) == 3
    with pytest.raises(RequestError, match="trace: has the events of another text"):
        begun[1].run()
    assert model.figures().running == 0


class Always(FixedTree):
    """A user's policy."""

    def __init__(self, choice: Any) -> None:
        self.choice = choice

    def choose(self, length: int, late: int = 0, match: int = 0) -> Any:
        return self.choice


def test_a_policy_of_a_user_that_cannot_be_followed_is_told_so(model: OpenedBundle) -> None:
    least = min(model.manifest.gears, key=lambda gear: gear.slots)
    refused = {
        "policy: expected adaptive, plain": Always,
        "gear '': not in": "",
        "policy: chose None after 120 tokens; expected a gear": Always(None),
        "policy: chose 'plain' after 120 tokens; expected a gear": Always("plain"),
        f"policy: chose gear {least.name} of KV length {least.slots} after": Always(least),
        r"policy: chose Gear\(.*; expected a gear of manifest": Always(replace(least, slots=512)),
        r"policy: chose Gear\(name='own.*; expected a gear of manifest": Always(replace(least, name="own")),
    }
    for message, policy in refused.items():
        with pytest.raises(RequestError, match=message):
            model.generate([5] * 120, max_new_tokens=20, ignore_eos=True, policy=policy)  # type: ignore[arg-type]


def test_a_special_token_that_the_vocabulary_lacks_is_refused(model: OpenedBundle, prompt: list[int]) -> None:
    with pytest.raises(RequestError, match="special_tokens: '<thnik>' is no token of this bundle"):
        model.generate(prompt, special_tokens=["<thnik>"])


def test_texts_of_asyncio_that_wait_for_room_take_no_thread_of_those_that_have_it(
    model: OpenedBundle, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened, "ASYNC_THREADS", 2)
    asked: Any = {"max_new_tokens": 3, "ignore_eos": True}
    room = model.engine.begin(min(gear.slots for gear in model.manifest.gears)).bytes
    few = OpenedBundle(model.bundle, model.engine, Opening(cache_bytes=room))

    async def streamed() -> str:
        return "".join([piece async for piece in few.astream(prompt, **asked)])

    async def together() -> list[str]:
        return await asyncio.wait_for(asyncio.gather(*(streamed() for _ in range(6))), 20)

    assert asyncio.run(together()) == [model.generate(prompt, **asked).text] * 6


def test_a_type_checker_sees_what_a_program_may_write() -> None:
    """The options of asyncio's twins, iterators that can be closed, and the package's own names alone."""
    generate, agenerate, astream, begun = map(
        inspect.signature, (OpenedBundle.generate, OpenedBundle.agenerate, OpenedBundle.astream, Decoding.__iter__)
    )
    assert generate.parameters == agenerate.parameters == astream.parameters
    assert (astream.return_annotation, begun.return_annotation) == (
        "AsyncGenerator[str, None]", "Generator[str, None, None]",
    )  # fmt: skip
    top = ast.parse(Path(draftwood.__file__).read_text()).body
    assert "__getattr__" not in [node.name for node in top if isinstance(node, ast.FunctionDef)]


def requests(count: int) -> list[dict[str, Any]]:
    """Random requests: prompts of many lengths, greedy and sampled."""
    drawn = random.Random(7)
    return [
        {
            "prompt": [drawn.randrange(2, 300) for _ in range(drawn.randrange(1, 90))],
            "max_new_tokens": drawn.randrange(1, 24),
            "temperature": drawn.choice([0.0, 0.7, 1.1]),
            "top_p": drawn.choice([1.0, 0.9]),
            "seed": drawn.randrange(1000),
        }
        for _ in range(count)
    ]


def test_eight_threads_on_one_bundle(tiny_draft_bundles: dict[str, Path]) -> None:
    """Every text is the plain one, whatever the other threads do."""
    with draftwood.open(tiny_draft_bundles["fasteagle"], threads=1) as model:
        asked = requests(32)
        plain = [model.generate(**one, policy="plain").token_ids for one in asked]
        with ThreadPoolExecutor(8) as pool:
            got = list(pool.map(lambda one: model.generate(**one).token_ids, asked))
    assert got == plain


def test_texts_take_turns_within_a_step(model: OpenedBundle, prompt: list[int]) -> None:
    """Interleaved by hand, step by step, in one thread."""
    plain = [model.generate(prompt[i:], max_new_tokens=15, policy="plain").token_ids for i in range(3)]
    streams = [model.stream(prompt[i:], max_new_tokens=15) for i in range(3)]
    going = [iter(stream) for stream in streams]
    while going:
        going = [one for one in going if next(one, None) is not None]
    assert [stream.result.token_ids for stream in streams] == plain


class EightAtOnce(CpuEngine):
    """A toy engine: one call advances up to eight sequences, in one launch as far as decoding can tell."""

    def __init__(self, bundle: Bundle, opening: Opening = USUAL) -> None:
        super().__init__(bundle, opening)
        self.max_batch = 8
        self.batches: list[int] = []

    def step(self, states, gears):  # type: ignore[no-untyped-def]
        self.batches.append(len(states))
        steps = zip(states, gears, strict=True)
        return [outcome for state, gear in steps for outcome in super(EightAtOnce, self).step([state], [gear])]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})  # for this test alone
    register(EngineKind(name="eight", help="eight texts a step", source=EightAtOnce, graph="step"))


def test_an_engine_is_one_registration(toy: None, tiny_bundle: Path, prompt: list[int]) -> None:
    with draftwood.open(tiny_bundle, engine="eight", threads=1) as model:
        assert isinstance(model.engine, EightAtOnce)
        text = model.generate(prompt, max_new_tokens=20, ignore_eos=True)
        assert text.token_ids == model.generate(prompt, max_new_tokens=20, ignore_eos=True, policy="plain").token_ids
    with pytest.raises(RequestError, match=r"--engine nine: not known; expected one of .*cpu, .*eight"):
        open_engine(Bundle.open(tiny_bundle), Opening(engine="nine"))


def test_a_batch_of_texts_is_one_call_a_step(toy: None, tiny_bundle: Path, prompt: list[int]) -> None:
    """Ten texts on an engine of eight: whole texts equal plain ones, and a call holds as many as it can."""
    engine = open_engine(Bundle.open(tiny_bundle), Opening(engine="eight", threads=1))
    options = [
        Options(max_new_tokens=6 + i, ignore_eos=True, sampling=Sampling(temperature=0.8 * (i % 2), seed=i))
        for i in range(10)
    ]
    gear, plain = FixedTree(engine.bundle, "ragged-kv128"), FixedTree(engine.bundle)
    texts = [Decoding(engine, prompt[i:], one, gear) for i, one in enumerate(options)]
    for text in texts:
        text.start()
    while going := [text for text in texts if not text.finished]:
        advance(engine, going)
    for i, (text, one) in enumerate(zip(texts, options, strict=True)):
        text.end()
        assert text.result.token_ids == Decoding(engine, prompt[i:], one, plain).run().token_ids
    assert engine.batches[:2] == [8, 2]


def test_logits_that_are_no_numbers_end_a_text(model: OpenedBundle, prompt: list[int]) -> None:
    """Greedy and sampled: an error, and never a token."""
    engine = CpuEngine(model.bundle, Opening(threads=1))
    honest = engine.verify

    def broken(states, drafts):  # type: ignore[no-untyped-def]
        (output,) = honest(states, drafts)
        output.logits_RV[:, 17] = np.nan
        return [output]

    engine.verify = broken  # type: ignore[method-assign]
    for temperature in (0.0, 0.8):
        stream = OpenedBundle(model.bundle, engine).stream(prompt, temperature=temperature)
        with pytest.raises(NumericError, match=r"expected finite values, got nan at token 17"):
            stream.run()
        assert stream.result is None and len(stream.tokens) == 1


def test_two_threads_open_one_tokenizer(tiny_bundle: Path) -> None:
    bundle = Bundle.open(tiny_bundle)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(bundle.tokenizer)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and all(one.encode("the cat") == found[0].encode("the cat") for one in found)


@pytest.fixture
def plain_texts(model: OpenedBundle, prompt: list[int]) -> list[tuple[int, ...]]:
    return [one.token_ids for one in (model.generate(prompt[i % 5 :], policy="plain", **asked(i)) for i in range(12))]


def asked(number: int) -> dict[str, Any]:
    return {"max_new_tokens": 8 + number, "temperature": 0.8 * (number % 2), "seed": number, "ignore_eos": True}


def test_threads_share_launches(
    model: OpenedBundle, prompt: list[int], plain_texts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve threads on an engine of four texts: every text is its own, and most launches are full."""
    sizes: list[int] = []
    honest = model.engine.step
    monkeypatch.setattr(model.engine, "step", lambda states, gears: sizes.append(len(states)) or honest(states, gears))
    with ThreadPoolExecutor(12) as threads:
        texts = list(threads.map(lambda i: model.generate(prompt[i % 5 :], **asked(i)).token_ids, range(12)))
    assert texts == plain_texts
    assert max(sizes) == model.engine.max_batch == 4
    assert sum(sizes) / len(sizes) > 2


def test_asyncio_twins_share_launches(
    model: OpenedBundle, prompt: list[int], plain_texts: list[tuple[int, ...]]
) -> None:
    async def streamed(number: int) -> str:
        return "".join([piece async for piece in model.astream(prompt[number % 5 :], **asked(number))])

    async def all_texts() -> tuple[list[Any], list[str]]:
        results = await asyncio.gather(*(model.agenerate(prompt[i % 5 :], **asked(i)) for i in range(8)))
        return results, await asyncio.gather(*(streamed(i) for i in range(8)))

    results, pieces = asyncio.run(all_texts())
    assert [one.token_ids for one in results] == plain_texts[:8]
    assert pieces == [one.text or "" for one in results]


def test_a_text_fails_alone(
    model: OpenedBundle, prompt: list[int], plain_texts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of one text that are no numbers end that text; those next to it go on unchanged."""
    engine = CpuEngine(model.bundle, Opening(threads=1))
    shared = OpenedBundle(model.bundle, engine)
    honest, bad = engine.verify, set[int]()

    def spoiled(states, drafts):  # type: ignore[no-untyped-def]
        outputs = honest(states, drafts)
        for state, output in zip(states, outputs, strict=True):
            if id(state) in bad:
                output.logits_RV[:] = np.nan
        return outputs

    monkeypatch.setattr(engine, "verify", spoiled)
    streams = [shared.stream(prompt[i % 5 :], **asked(i)) for i in range(4)]

    def finished(stream: Decoding) -> tuple[int, ...] | None:
        try:
            for number, _ in enumerate(stream):
                if stream is streams[1] and number == 2:
                    bad.add(id(stream.state))
        except NumericError:
            return None
        assert stream.result is not None
        return stream.result.token_ids

    with ThreadPoolExecutor(4) as threads:
        texts = list(threads.map(finished, streams))
    assert texts == [plain_texts[0], None, *plain_texts[2:4]]


def test_a_policy_that_fails_ends_its_own_text(
    model: OpenedBundle, prompt: list[int], plain_texts: list[tuple[int, ...]]
) -> None:
    """The step had been taken for all: those next to it would lose its tokens if they did not receive them."""

    class Odd(FixedTree):
        steps = 0

        def observe(self, outcome: Outcome) -> None:
            self.steps += 1
            if self.steps == 5:  # by then the others have begun
                raise ZeroDivisionError

    def finished(number: int) -> tuple[int, ...] | None:
        policy = Odd(model.bundle) if number == 0 else "adaptive"
        try:
            return model.generate(prompt[number % 5 :], policy=policy, **asked(number)).token_ids
        except ZeroDivisionError:
            return None

    with ThreadPoolExecutor(4) as threads:
        for _ in range(3):
            assert list(threads.map(finished, range(4))) == [None, *plain_texts[1:4]]


def test_a_reader_that_stops_delays_nobody(model: OpenedBundle, prompt: list[int]) -> None:
    """A stream that nobody reads on holds no launch back, and its place is free."""
    held = iter(model.stream(prompt, **asked(3)))
    next(held), next(held)
    assert model.generate(prompt, **asked(1)).token_ids == model.generate(prompt, policy="plain", **asked(1)).token_ids
    del held
