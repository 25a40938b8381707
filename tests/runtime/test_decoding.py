import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from draftwood.errors import RequestError
from draftwood.manifest import Gear
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.engines.static import OnnxStaticEngine
from draftwood.runtime.options import Options
from draftwood.runtime.policy import FixedTree
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.runtime.trace import Trace
from draftwood.tests.decoded import decoded

SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.8, seed=11),
    "nucleus": Sampling(temperature=1.0, top_p=0.9, top_k=40, seed=2),
}
GEARS = ["plain-kv256", "chain-2-kv128", "ragged-kv128", "ragged-kv256"]


@pytest.fixture(scope="module", params=[CpuEngine, OnnxStaticEngine], ids=["cpu", "static"])
def engine(request: pytest.FixtureRequest, bundle: Bundle) -> Engine:
    return request.param(bundle)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("gear", GEARS)
def test_the_text_is_that_of_plain_decoding(engine: Engine, prompt: list[int], gear: str, sampling: Sampling) -> None:
    plain = decoded(engine, prompt, "plain-kv128", sampling=sampling)
    tree = decoded(engine, prompt, gear, sampling=sampling)
    assert tree.token_ids == plain.token_ids
    assert len(tree.token_ids) == 60 and tree.finish_reason == "length"


def test_speculation_saves_steps(engine: Engine, prompt: list[int]) -> None:
    plain, tree = (decoded(engine, prompt, gear) for gear in ("plain-kv128", "ragged-kv128"))
    assert plain.steps == 59 and tree.steps < 50  # drafts hit, else the equality above shows little


def test_another_seed_is_another_text(engine: Engine, prompt: list[int]) -> None:
    texts = {
        decoded(engine, prompt, "ragged-kv128", sampling=Sampling(temperature=1.0, seed=s)).token_ids for s in range(3)
    }
    assert len(texts) == 3


@pytest.mark.parametrize("gear", GEARS)
def test_the_context_limit_is_a_clean_end(engine: Engine, prompt: list[int], gear: str) -> None:
    result = decoded(engine, prompt, gear, max_new_tokens=1000)
    assert result.finish_reason == "context"
    assert len(prompt) + len(result.token_ids) == engine.bundle.manifest.dims.context
    assert result.token_ids == decoded(engine, prompt, "plain-kv128", max_new_tokens=1000).token_ids


def test_kv_length_grows_by_moving_to_the_next_gear(engine: Engine, prompt: list[int]) -> None:
    trace = Trace()
    decoded(engine, prompt, "ragged-kv128", trace, max_new_tokens=150)
    gears = [event.gear for event in trace.events if event.kind != "prefill"]
    assert gears == sorted(gears, key=lambda name: int(name.rpartition("kv")[2]))
    assert set(gears) == {"ragged-kv128", "ragged-kv256"}


class Noted(FixedTree):
    """Notes the late tokens that it hears of, and drafts at every third step."""

    def choose(self, length: int, late: int = 0, match: int = 0) -> Gear | None:
        self.late = [*getattr(self, "late", []), late]
        return self.gears[len(self.late) % 3 == 0]


def test_a_policy_is_told_how_far_the_drafter_is_behind(tiny_draft_bundles: dict[str, Path], prompt: list[int]) -> None:
    bundle = Bundle.open(tiny_draft_bundles["fasteagle"])
    policy, trace = Noted(bundle), Trace()
    policy.gears = [bundle.gear(name) for name in ("plain-kv256", "planned-kv256")]
    Decoding(CpuEngine(bundle), prompt, Options(max_new_tokens=40, ignore_eos=True), policy, trace).run()
    n = len(prompt)
    assert policy.late[:4] == [0, n, n + 1, 0]  # before the prefill, after it, after a plain step, after a draft
    # The draft's own step gained some, which every draft writes; a plain one more is one late, with them.
    assert policy.late[4] == trace.events[2].accepted + 1 and policy.late[6] == 0


def test_graphs_are_opened_with_the_engine(
    tiny_draft_bundles: dict[str, Path], prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the first draft of a process is no slower than the next."""
    bundle = Bundle.open(tiny_draft_bundles["eagle3"])
    engine = CpuEngine(bundle)
    monkeypatch.setattr("draftwood.runtime.engines.sessions.session", None)
    gear = next(gear.name for gear in bundle.manifest.gears if gear.draft)
    assert decoded(engine, prompt, gear, max_new_tokens=8).token_ids


def test_the_end_token_stops_a_text_inside_an_accepted_path(engine: Engine, prompt: list[int]) -> None:
    free = decoded(engine, prompt, "ragged-kv128")
    end = free.token_ids[20]
    ended = Decoding(engine, prompt, Options(max_new_tokens=60), FixedTree(engine.bundle, "ragged-kv128"))
    ended._ends = frozenset({end})
    result = ended.run()
    assert result.token_ids == free.token_ids[: free.token_ids.index(end) + 1]
    assert result.finish_reason == "stop"


def test_an_end_token_that_its_tokenizer_has_as_plain_is_not_in_the_text(bundle: Bundle, prompt: list[int]) -> None:
    """Of a GGUF file that calls <|im_end|> defined by a user, say; the next turn of a chat would have it twice."""
    free, tokenizer = decoded(CpuEngine(bundle), prompt, "ragged-kv128"), bundle.tokenizer
    assert tokenizer is not None
    at = free.token_ids.index(end := free.token_ids[20])
    teacher = msgspec.structs.replace(bundle.manifest.teacher, eos=(end,))
    engine = CpuEngine(replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, teacher=teacher)))
    for shown in (False, True):
        ended = decoded(engine, prompt, "ragged-kv128", ignore_eos=False, include_stop_str_in_output=shown)
        assert ended.token_ids == free.token_ids[: at + 1] and ended.finish_reason == "stop"
        assert ended.text == tokenizer.decode(free.token_ids[: at + shown])


def test_a_policy_is_told_of_the_whole_step_that_a_text_ends_within(
    engine: Engine, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gained(tokens: int) -> list[int]:
        told = list[int]()
        monkeypatch.setattr(FixedTree, "observe", lambda _, outcome: told.append(outcome.gained))
        decoded(engine, prompt, "ragged-kv128", max_new_tokens=tokens)
        return told

    free = gained(60)
    step = next(step for step, tokens in enumerate(free) if tokens > 1)
    within = 1 + sum(free[:step]) + 1  # the prefill's token, whole steps, and one token of the next
    assert gained(within) == free[: step + 1]


def test_the_trace_tells_the_whole_text(engine: Engine, prompt: list[int]) -> None:
    trace = Trace()
    result = decoded(engine, prompt, "ragged-kv128", trace)
    told = [token for event in trace.events for token in event.tokens]
    assert tuple(told[: len(result.token_ids)]) == result.token_ids
    positions = [event.position for event in trace.events]
    gained = [event.accepted for event in trace.events]
    assert positions == [0, *np.cumsum(gained)[:-1].tolist()]


@pytest.mark.parametrize(
    ("prompt_ids", "message"),
    [([], "empty"), ([300], "vocabulary 0 to 299"), ([-1], "vocabulary"), ([5] * 255, "context is 255")],
    ids=["empty", "past-vocabulary", "negative", "too-long"],
)
def test_a_prompt_that_cannot_be_decoded_is_refused(engine: Engine, prompt_ids: list[int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        decoded(engine, prompt_ids, "plain-kv128")


def test_unknown_gears_and_empty_texts_are_refused(bundle: Bundle) -> None:
    with pytest.raises(RequestError, match=r"it holds plain-kv128, .*; other policies are adaptive and plain"):
        FixedTree(bundle, "nonsense")
    for wrong in (0, "3", None):
        with pytest.raises(RequestError, match=f"max_new_tokens: expected a whole number of at least 1, got {wrong!r}"):
            Options(max_new_tokens=wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="max_tokens: no such option; expected one of max_new_tokens, temperature"):
        Options.of(max_tokens=3)  # type: ignore[call-arg]


def test_a_stop_string_ends_the_text_before_it(bundle: Bundle, prompt: list[int]) -> None:
    free = decoded(CpuEngine(bundle), prompt, "ragged-kv128")
    assert free.text is not None
    stop = free.text[12:15]
    stopped = decoded(CpuEngine(bundle), prompt, "ragged-kv128", stop_strings=(stop,))
    assert (stopped.text, stopped.finish_reason) == (free.text[: free.text.index(stop)], "stop")
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]


def test_a_bundle_runs_where_there_is_no_torch(
    tiny_bundle: Path, prompt: list[int], bundle: Bundle, python: Callable[..., str]
) -> None:
    arguments = ["run", str(tiny_bundle), "--prompt-ids", ",".join(map(str, prompt)), "--max-new-tokens", "20"]
    arguments += ["--policy", "ragged-kv128", "--json"]
    blocked = ("torch", "onnx", "onnxscript", "networkx", "safetensors", "transformers", "matplotlib")
    printed = python(f"from draftwood.tools.cli import main; main({arguments!r})", blocked=blocked)
    expected = decoded(CpuEngine(bundle), prompt, "plain-kv128", max_new_tokens=20)
    assert tuple(json.loads(printed)["token_ids"]) == expected.token_ids


def test_a_program_with_sessions_of_its_own_is_left_alone(
    tiny_bundle: Path, prompt: list[int], bundle: Bundle, python: Callable[..., str]
) -> None:
    code = f"""
import json, onnxruntime
from pathlib import Path
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.decoding import Decoding
from draftwood.runtime.options import Options
from draftwood.runtime.policy import Policies
bundle = Bundle.open(Path({str(tiny_bundle)!r}))
policy, options = Policies(bundle).new(True, 20), Options(max_new_tokens=20, ignore_eos=True)
decoding = Decoding(CpuEngine(bundle), {prompt}, options, policy)
print(json.dumps(decoding.run().token_ids))
onnxruntime.InferenceSession({str(tiny_bundle / "onnx" / "draft.onnx")!r})
"""
    expected = decoded(CpuEngine(bundle), prompt, "plain-kv128", max_new_tokens=20)
    assert tuple(json.loads(python(code))) == expected.token_ids
