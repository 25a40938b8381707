"""Streaming equals decoding at once; chat prompts are those of transformers."""

import contextlib
import functools
import itertools
import json
import os
import resource
import shlex
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from draftwood.errors import BundleError, RequestError
from draftwood.runtime.stream import Stream
from draftwood.runtime.text import tokenizer
from draftwood.runtime.text.tokenizer import Tokenizer
from draftwood.tests.bpe import CHAT_TEMPLATE

SPECIAL = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
LINES = [
    "the quick brown fox jumps over the lazy dog",
    "draft trees, 42 of them",
    "中文字符",
    "naïve café 😀👍🏽",
] * 3
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
MESSAGES = [
    {"role": "system", "content": "  Be brief.\n"},
    {"role": "user", "content": "Is 1 < 2 & 'so' on? é 😀"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?"},
]
LLAMA_3 = (
    "{%- if not date_string is defined %}\n"
    "    {%- set date_string = strftime_now('%d %b %Y') %}\n{%- endif %}\n"
    "{%- if tools is not none %}{{- raise_exception('tools are not none') }}{%- endif %}\n"
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
    "+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}\n"
    "    {% if messages[0]['role'] == 'tool' %}\n"
    "{{ raise_exception('No tool may speak first.') }}\n    {% endif %}\n"
    "{{ {'a': '<é>', 'eos': eos_token} | tojson }}{{ date_string }}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LOOP = (
    "{% for message in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}"
)


def byte_level():
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    # Added tokens are spelled as text: one with characters that are no bytes, one that looks like bytes.
    tokenizer.add_tokens([AddedToken("中 x"), AddedToken("Ġé")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    return tokenizer


def metaspace():
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator([*LINES, "a \ufffd b\ufffd"], trainer)
    return tokenizer


def llama_2():
    """As transformers converts a SentencePiece model: prepended space, byte fallback, one space stripped."""
    pieces = ["<unk>", "<s>", *BYTE_TOKENS, "▁", "a", "b", "▁a", "ab", "▁b", "\ufffd", "中"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[("▁", "a"), ("a", "b"), ("▁", "b")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def mixed():
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("q", "Q")])
    return tokenizer


def wordpiece():
    words = ["[UNK]", "the", "fox", "##es", "##y", ".", "don", "'", "t"]
    tokenizer = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


MAKERS = {
    "byte_level": byte_level,
    "metaspace": metaspace,
    "llama_2": llama_2,
    "mixed": mixed,
    "wordpiece": wordpiece,
}


def save(folder, tokenizer, **config):
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: Tokenizer.load(save(root / name, make())) for name, make in MAKERS.items()}


def streamed(text, ids, cuts=(), stops=()):
    """All that a stream returns if ``ids`` is pushed in chunks that end at ``cuts``."""
    stream, edges = Stream(text, stops), [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    pushed = "".join(stream.push(ids[a:b]) for a, b in itertools.pairwise(edges))
    return pushed + stream.finish(), stream


any_text = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("ab 中文字é\u0301😀👍🏽\u200d\ufffd\n"))
)
any_cuts = st.lists(st.integers(0, 1000), max_size=8)


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=80, deadline=None)
@given(source=any_text, cuts=any_cuts)
def test_streamed_text_is_the_decoded_text(texts, name, source, cuts):
    ids = texts[name].encode(source)
    assert streamed(texts[name], ids, cuts)[0] == texts[name].decode(ids)


@pytest.mark.parametrize("name", ["metaspace", "llama_2", "wordpiece"])
@settings(max_examples=80, deadline=None)
@given(source=st.text("ab the.\n"), cut=st.integers(0, 1000))
def test_a_text_that_goes_on_keeps_its_first_space(texts, name, source, cut):
    ids = texts[name].encode(source)
    before, rest = ids[: cut % (len(ids) + 1)], ids[cut % (len(ids) + 1) :]
    stream = Stream(texts[name], after=before)
    assert texts[name].decode(before) + stream.push(rest) + stream.finish() == texts[name].decode(ids)


@pytest.mark.parametrize("name", ["byte_level", "metaspace", "wordpiece"])
@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 450), max_size=60), cuts=any_cuts)
def test_streamed_text_of_any_tokens_is_the_decoded_text(texts, name, ids, cuts):
    assert streamed(texts[name], ids, cuts)[0] == texts[name].decode(ids)


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.sampled_from([0xC3, 0xE4, 0xB8, 0xAD, 0xF0, 0x9F, 0x98, 0x80, 0xEF, 0xBF, 0xBD, 0xFF, 0x61, -1]))
)
def test_streamed_broken_bytes_are_the_decoded_bytes(texts, ids):
    """Bytes that begin, continue and break characters, and a special token (-1) that may stand among them."""
    alphabet = {bytes_of: texts["byte_level"].token_id(bytes_of) for bytes_of in pre_tokenizers.ByteLevel.alphabet()}
    spelled = {byte: alphabet[character] for byte, character in spelling().items()} | {-1: 1}
    tokens = [spelled[byte] for byte in ids]
    assert streamed(texts["byte_level"], tokens)[0] == texts["byte_level"].decode(tokens)


@functools.cache
def spelling():
    """Byte -> character, as the tokenizers library spells it, found by asking it."""
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    table = {}
    for point in (
        *range(0x80),
        *range(0x80, 0x800, 0x40),
        *range(0x80, 0xC0),
        *range(0x800, 0x10FFFF, 0x1000),
    ):
        if not 0xD800 <= point < 0xE000:
            table |= dict(zip(chr(point).encode(), pre.pre_tokenize_str(chr(point))[0][0], strict=True))
    return table | {0xFF: "ÿ"}


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 270), max_size=31), cuts=any_cuts)
def test_streamed_byte_fallback_is_the_decoded_text(texts, ids, cuts):
    """At most 31 byte tokens in a row: a longer run is released before it is known to be valid."""
    assert streamed(texts["llama_2"], ids, cuts)[0] == texts["llama_2"].decode(ids)


def test_a_long_run_of_byte_tokens_is_released_before_it_ends(texts):
    text = texts["llama_2"]
    ids = text.encode("😀" * 40)
    stream = Stream(text)
    released = [len(stream.push([token])) for token in ids]
    assert max(released) <= 9
    assert streamed(text, ids)[0] == "😀" * 40


@pytest.mark.parametrize("name", ["byte_level", "mixed"])
def test_a_character_is_never_split(texts, name):
    stream = Stream(texts[name])
    pushed = [stream.push([token]) for token in texts[name].encode("x𝄞y")]
    assert [piece for piece in pushed if piece] == ["x", "𝄞", "y"]


@settings(max_examples=150, deadline=None)
@given(source=st.text("ab é中😀", max_size=14))
def test_a_byte_token_is_at_the_offset_of_its_character(texts, source):
    """Although the character is not final yet."""
    text, ids = texts["llama_2"], texts["llama_2"].encode(source)
    stream, characters = Stream(text), 0
    for at, token in enumerate(ids):
        if (spelled := text.spelling(token)) in BYTE_TOKENS:
            characters += BYTE_TOKENS.index(spelled) & 0xC0 != 0x80
            expected = characters - 1
        else:
            expected, characters = characters, len(text.decode(ids[: at + 1]))
        assert stream.offset_of(token) == expected
        stream.push([token])


def test_invalid_bytes_are_not_held_for_ever(texts):
    (lead,) = [texts["byte_level"].token_id(character) for byte, character in spelling().items() if byte == 0xE4]
    stream = Stream(texts["byte_level"])
    assert [stream.push([lead]) for _ in range(4)] == ["", "\ufffd", "\ufffd", "\ufffd"]
    assert stream.finish() == "\ufffd"


def test_metaspace_drops_the_first_space_only(texts):
    text = texts["metaspace"]
    stream, ids = Stream(text), text.encode("the dog the dog")
    assert "".join(stream.push([token]) for token in ids) == "the dog the dog"
    space = text.token_id("▁")
    assert streamed(text, [space] * 5)[0] == text.decode([space] * 5) == " " * 4


def test_the_decoded_window_stays_small(texts, monkeypatch):
    longest = 0
    decode = Tokenizer.decode

    def watched(self, ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(self, ids)

    monkeypatch.setattr(Tokenizer, "decode", watched)
    space = texts["metaspace"].token_id("▁")
    Stream(texts["metaspace"]).push(texts["metaspace"].encode("the quick brown fox " * 50) + [space] * 50)
    Stream(texts["llama_2"]).push(texts["llama_2"].encode("a b ab 中 " * 50))
    assert 0 < longest <= 12


@settings(max_examples=300, deadline=None)
@given(
    source=st.text("abc", max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    least=st.integers(0, 8),
)
def test_a_stop_string_ends_the_text_by_the_token_that_completes_it(texts, source, stops, least):
    """Only after the least tokens; it may have begun within them."""
    text = texts["byte_level"]
    ids = [token for character in source for token in text.encode(character, special=False)]
    stream = Stream(text, tuple(stops), least=least)
    got = "".join(stream.push([token]) for token in ids) + stream.finish()
    for used in range(least + 1, len(source) + 1):
        starts = [used - len(stop) for stop in stops if source[:used].endswith(stop)]
        if starts:
            assert (got, stream.stopped, stream.tokens_used) == (source[: min(starts)], True, used)
            return
    assert (got, stream.stopped) == (source, False)


def test_a_stop_string_across_tokens_ends_the_text(texts):
    text = texts["byte_level"]
    ids = text.encode("the quick brown fox jumps")
    out, stream = streamed(text, ids, range(40), ("wn f",))
    assert (out, stream.stopped) == ("the quick bro", True)
    used = stream.tokens_used
    assert "wn f" in text.decode(ids[:used]) and "wn f" not in text.decode(ids[: used - 1])
    assert stream.push(ids) == stream.finish() == "" and stream.tokens_used == used


def test_the_beginning_of_a_stop_string_is_held_and_then_released(texts):
    text = texts["byte_level"]
    stream = Stream(text, ("the end", "###"))
    assert stream.push(text.encode("see the e")) == "see "
    assert stream.push(text.encode("lk", special=False)) == "the elk"
    assert stream.push(text.encode(" ##", special=False)) == " "
    assert (stream.finish(), stream.stopped, stream.tokens_used > 3) == ("##", False, True)


def test_the_earliest_stop_string_wins(texts):
    ids = texts["byte_level"].encode("one, two; three")
    assert streamed(texts["byte_level"], ids, (), ("; ", ", "))[0] == "one"


@settings(max_examples=100, deadline=None)
@given(
    source=st.text("ab中 ", max_size=40),
    stops=st.lists(st.text("ab中 ", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=any_cuts,
)
@pytest.mark.parametrize("name", ["byte_level", "llama_2"])
def test_stopping_does_not_depend_on_how_tokens_are_grouped(texts, name, source, stops, cuts):
    ids, stops = texts[name].encode(source), tuple(stops)
    out, stream = streamed(texts[name], ids, cuts, stops)
    again, single = streamed(texts[name], ids, range(len(ids)), stops)
    assert (out, stream.stopped, stream.tokens_used) == (again, single.stopped, single.tokens_used)
    assert not any(stop in out for stop in stops)
    full = texts[name].decode(ids)
    assert full.startswith(out) and stream.stopped == any(stop in full for stop in stops)


@pytest.mark.parametrize("stops", ["end", ("",), (3,)], ids=["bare", "empty", "number"])
def test_bad_stop_strings_are_refused(texts, stops):
    with pytest.raises(RequestError, match="non-empty strings"):
        Stream(texts["byte_level"], stops)


def test_encode_and_token_id(texts):
    text = texts["byte_level"]
    assert text.encode("fox") == [0, *text.encode("fox", special=False)]
    assert text.decode(text.encode("fox<|end|>")) == "fox"
    assert (text.token_id("<|end|>"), text.token_id("nothing")) == (1, None)
    for bad, said in (("a\ud800", "lone surrogate .* character 1"), (3, "expected a string, got int")):
        with pytest.raises(RequestError, match=said):
            text.encode(bad)


def test_settings_of_training_do_not_cut_the_prompt(tmp_path):
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    plain = byte_level().encode("the quick brown fox").ids
    assert Tokenizer.load(save(tmp_path, tokenizer)).encode("the quick brown fox") == plain


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, LLAMA_3, LOOP], ids=["demo", "llama_3", "loop"])
@pytest.mark.parametrize("messages", [MESSAGES, MESSAGES[1:2]], ids=["talk", "one"])
def test_chat_is_that_of_transformers(tmp_path, template, messages):
    oracle = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), bos_token="<|begin|>", eos_token="<|end|>", chat_template=template
    )
    config = {"chat_template": template, "bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}}
    text = Tokenizer.load(save(tmp_path, byte_level(), **config))
    flags = {"add_generation_prompt": True, "return_dict": False}
    assert text.render(messages) == oracle.apply_chat_template(messages, tokenize=False, **flags)
    assert text.chat(messages) == oracle.apply_chat_template(messages, tokenize=True, **flags)


# The features of templates such as Qwen3's: tools and calls as JSON, a search from the end, strings' methods, a switch.
TOOLS_AND_THOUGHTS = (
    "{%- if tools %}<tools>{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}\n</tools>{% endif %}\n"
    "{%- set ns = namespace(last=0) %}\n"
    "{%- for message in messages[::-1] %}{% if message.role == 'user' and not ns.last %}"
    "{% set ns.last = messages | length - loop.index0 %}{% endif %}{% endfor %}\n"
    "{%- for message in messages %}\n"
    "    {%- set content = message.content if message.content is string else '' %}\n"
    "    {%- set said = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}\n"
    "    {%- set thought = message.reasoning_content or said %}\n"
    "    {{- '<|' + message.role + '|>' }}\n"
    "    {%- if message.role == 'assistant' and loop.index > ns.last %}\n"
    "        {{- '<think>' + thought + '</think>' }}{% endif %}\n"
    "    {{- content.split('</think>')[-1].lstrip('\n') }}\n"
    "    {%- for call in message.tool_calls or [] %}{% set call = call.function or call %}\n"
    "        {{- call.name + ' ' }}{{ call.arguments if call.arguments is string else call.arguments | tojson }}\n"
    "    {%- endfor %}\n"
    "    {%- if loop.nextitem and loop.nextitem.role != message.role %}{{ '<|end|>' + pad_token }}{% endif %}\n"
    "{%- endfor %}\n"
    "{%- for document in documents or [] %}{{ document.title }}{% endfor %}\n"
    "{%- if add_generation_prompt %}<|assistant|>\n"
    "    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}\n"
    "{%- endif %}"
)
CALL = {"type": "function", "function": {"name": "bus", "arguments": {"to": "río <3>", "stops": [1, 2.5, None, True]}}}
TOOL = {"type": "function", "function": {"name": "bus", "parameters": {"type": "object", "required": ["to"]}}}
CALLED = [
    *MESSAGES[:2],
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nLet me see.", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"line": 4}'},
    {"role": "tool", "content": [{"type": "text", "text": "none"}]},
    {"role": "assistant", "content": None, "reasoning": "so be it", "tool_calls": [{"name": "bus", "arguments": "{}"}]},
]


@pytest.mark.parametrize("tools", [None, [], [TOOL]], ids=["none", "empty", "one"])
@pytest.mark.parametrize("switches", [{}, {"enable_thinking": False}, {"enable_thinking": True}], ids=str)
def test_tools_and_switches_are_those_of_transformers(tmp_path, tools, switches):
    tokens = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    oracle = PreTrainedTokenizerFast(tokenizer_object=byte_level(), chat_template=TOOLS_AND_THOUGHTS, **tokens)
    text = Tokenizer.load(save(tmp_path, byte_level(), chat_template=TOOLS_AND_THOUGHTS, **tokens))
    documents = [{"title": "timetable", "text": ""}] if tools else None
    flags = {"add_generation_prompt": True, "return_dict": False, "tools": tools, "documents": documents, **switches}
    chat = {"messages": CALLED, "tools": tools, "documents": documents, "chat_template_kwargs": switches}
    rendered = oracle.apply_chat_template(CALLED, tokenize=False, **flags)
    assert text.render(chat) == rendered
    in_switches = {"documents": None, "chat_template_kwargs": switches | {"documents": documents}}
    assert text.render(chat | in_switches) == rendered, "as a server's requests have them"
    assert text.chat(chat) == oracle.apply_chat_template(CALLED, tokenize=True, **flags)
    assert ("</think>\n\n" in rendered[-30:]) is (switches == {"enable_thinking": False})
    assert all(said in rendered for said in ("bus {", "so be it", "río <3>")) and ("<tools>" in rendered) is bool(tools)


def test_what_a_message_has_as_null_it_has_not(tmp_path):
    """A template that knows no calls wrote "None", and one that asks for their name went over nothing."""
    calls = "{% if 'tool_calls' in message %}{% for call in message.tool_calls %}{{ call.name }}{% endfor %}{% endif %}"
    template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}" + calls + "{% endfor %}"
    oracle = PreTrainedTokenizerFast(tokenizer_object=byte_level(), chat_template=template)
    text = Tokenizer.load(save(tmp_path, byte_level(), chat_template=template))
    messages = [{"role": "user", "content": "a", "tool_calls": None}, CALLED[-1]]
    assert text.render(messages) == oracle.apply_chat_template(messages, tokenize=False) == "<user>a<assistant>bus"


def test_a_chat_with_tools_takes_the_template_for_tools(tmp_path):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    text = Tokenizer.load(save(tmp_path, byte_level(), chat_template=named))
    assert [text.render({"messages": MESSAGES, "tools": tools}) for tools in (None, [], [TOOL])] == ["d", "t", "t"]


def test_a_template_is_found_in_each_of_its_places(tmp_path):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    save(tmp_path, byte_level(), chat_template=named, bos_token=None)
    assert Tokenizer.load(tmp_path).render(MESSAGES) == "d"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token is defined }}")
    assert Tokenizer.load(tmp_path).render(MESSAGES) == "False"


def test_a_message_that_a_template_leaves_out_for_its_role_is_refused(tmp_path):
    """The model would not see it."""
    chooses = (
        "{% for one in messages %}{% if one.role == 'user' %}<{{ one.content }}>{% elif one.role == 'tool' %}"
        "{% if not loop.first %}[{{ one.content }}]{% endif %}{% endif %}{% endfor %}"
    )
    (tmp_path / "any").mkdir()
    text = Tokenizer.load(save(tmp_path, byte_level(), chat_template=chooses))
    writes_any = Tokenizer.load(save(tmp_path / "any", byte_level(), chat_template=CHAT_TEMPLATE))
    user, human = {"role": "user", "content": "a"}, {"role": "Human", "content": "b"}
    assert text.render([user, {"role": "tool", "content": "c"}]) == "<a>[c]"
    with pytest.raises(RequestError, match="chat: message 1: the template leaves the role 'Human' out"):
        text.render([user, human, user])
    assert "b" in writes_any.render([user, human])


def test_without_a_template_there_is_no_chat(texts, tmp_path):
    only_tools = save(tmp_path, byte_level(), chat_template=[{"name": "tool_use", "template": "t"}])
    for text in (texts["byte_level"], Tokenizer.load(only_tools)):
        assert not text.has_chat
        with pytest.raises(RequestError, match="no chat template"):
            text.chat(MESSAGES)


DEEP: list = []
DEEP.append(DEEP)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("hello", "expected a list of messages, got str"),
        ([], "an empty list"),
        ([MESSAGES[0], "hi"], "message 1: expected an object, got str"),
        ([{"role": "user"}], "message 0: .*no content"),
        ([MESSAGES[0], {"content": "x"}], "message 1: .*no role"),
        ([{"role": "user", "content": 3}], "message 0: content: expected a string, a list of parts or null, got int"),
        ([{"role": 3, "content": "x"}], "message 0: role: expected a string, got int"),
        ([{"role": "user", "content": "x", "name": {1, 2}}], "message 0: name: expected a value of JSON, got set"),
        ([{"role": "user", "content": "x", "deep": DEEP}], "message 0: deep.*: more than 64 levels deep"),
        ({"tools": []}, "expected a list of messages, got NoneType"),
        ({"messages": MESSAGES, "tool": []}, "no field 'tool' is known; expected messages, tools, documents, chat_t"),
        ({"messages": MESSAGES, "tools": ["f"]}, r"tools: expected a list of objects, got \['f'\]"),
        ({"messages": MESSAGES, "chat_template_kwargs": 1}, "chat_template_kwargs: expected an object, got int"),
        (
            {"messages": MESSAGES, "chat_template_kwargs": {"tools": []}},
            "chat_template_kwargs: tools is a field of its",
        ),
        ([{"role": "tool", "content": "x"}], "No tool may speak first."),
    ],
)
def test_bad_messages_are_refused(tmp_path, messages, said):
    config = {"chat_template": LLAMA_3, "bos_token": "<|begin|>", "eos_token": "<|end|>"}
    text = Tokenizer.load(save(tmp_path, byte_level(), **config))
    with pytest.raises(RequestError, match=said):
        text.chat(messages)


def test_a_template_may_fail_on_the_tools(tmp_path):
    """Hermes' writes each tool's description, which OpenAI's interface may leave out."""
    template = "{% for tool in tools %}{{ '- ' + tool.function.description }}{% endfor %}"
    text = Tokenizer.load(save(tmp_path, byte_level(), chat_template=template))
    with pytest.raises(RequestError, match="refuses the messages or the tools: 'dict object' has no attribute 'desc"):
        text.chat({"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "bus"}}]})


@pytest.mark.parametrize(
    "template",
    ["{{ messages + 1 }}", "{{ nothing.at.all }}", "{{ messages.append(1) }}", "{{ ''.__class__.mro() }}"],
)
def test_a_failing_template_is_one_clear_line(tmp_path, template):
    text = Tokenizer.load(save(tmp_path, byte_level(), chat_template=template))
    with pytest.raises(RequestError, match=r"^chat: the template (fails on|refuses) the messages: .+"):
        text.chat(MESSAGES)


HURTING = {
    "folding": "{{ [1]|slice(999999999)|list|length }}",
    "power": "{{ ((9**64)**64)**64 }}",
    "squares": "{% set ns = namespace(x=9) %}{% for _ in range(40) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "repeat": "{{ 'x' * 99999999999 }}",
    "doubling": "{% set ns = namespace(x='x') %}{% for _ in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "rjust": "{{ 'x'.rjust(9999999999) }}",
    "zfill": "{{ 'x'.zfill(9999999999) }}",
    "center": "{{ 'x'.center(9999999999) }}",
    "width": "{{ '%999999999d' % 1 }}",
    "tabs": "{{ ('\\t' * 1000).expandtabs(99999999) }}",
    "replace": "{{ ('x' * 100000).replace('x', 'y' * 100000) }}",
    "join": "{{ ('y' * 100000).join('x' * 100000) }}",
    "loops": "{% for _ in range(99999) %}{% for _ in range(99999) %}{% endfor %}{% endfor %}",
    "long": "{% for _ in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
}


# Loops of Python end by the limit of processor time that "squares", one multiplication, ends by: two seconds at least.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "loops" else []) for name in HURTING]
)
def test_a_template_that_would_take_all_is_ended_and_the_next_text_is_rendered(tmp_path, name):
    """The process that renders has limits that the system enforces, and is started again."""
    template = "{% if tools %}" + HURTING[name] + "{% endif %}ok"
    text = Tokenizer.load(save(tmp_path, byte_level(), chat_template=template))
    with pytest.raises(
        RequestError, match=r"^chat: the template (fails on|refuses) the messages or the tools: "
    ) as caught:
        text.render({"messages": MESSAGES, "tools": [TOOL]})
    assert len(str(caught.value)) < 200
    if "range" in template:  # constants are computed as the template is compiled, for any chat
        assert text.render(MESSAGES) == "ok"


def test_a_text_is_rendered_behind_one_whose_process_was_killed(tmp_path):
    text = Tokenizer.load(save(tmp_path, byte_level(), chat_template="{{ messages | length }}"))
    text.warm()
    assert text.render(MESSAGES) == "4"
    text._templates._process.kill()
    text._templates._process.wait()
    assert text.render(MESSAGES[:1]) == "1"


def test_a_text_is_rendered_by_a_jinja_outside_of_the_pythons_own_packages(tmp_path, monkeypatch):
    (bare := tmp_path / "python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    text = Tokenizer.load(save(tmp_path, byte_level(), chat_template="{{ messages | length }}"))
    assert text.render(MESSAGES) == "4"


def test_a_text_is_rendered_by_a_program_with_many_files(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("this user may not open so many")
    text = Tokenizer.load(save(tmp_path, byte_level(), chat_template="{{ messages | length }}"))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
        for _ in range(1024):
            stack.enter_context(Path(os.devnull).open())
        assert text.render(MESSAGES) == "4"


def test_the_process_that_renders_ends_with_its_tokenizer(tmp_path):
    text = Tokenizer.load(save(tmp_path, byte_level(), chat_template="x"))
    text.warm()
    process = text._templates._process
    del text
    assert process.poll() is not None


def test_replacements_that_would_fill_the_memory_are_refused(tmp_path):
    tokenizer = byte_level()
    grows = [normalizers.Replace("a", "a" * 100)] * 4
    tokenizer.normalizer = normalizers.Sequence([normalizers.Sequence(grows[:2]), *grows[2:]])
    with pytest.raises(BundleError, match=r"tokenizer.json: its replacements make a text up to 1e\+08 times as long"):
        Tokenizer.load(save(tmp_path, tokenizer))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(" ", "▁"), normalizers.Prepend("▁")])
    assert Tokenizer.load(save(tmp_path, tokenizer)).encode("a b")


def test_a_prompt_that_no_context_holds_is_refused_before_it_is_encoded(texts):
    with pytest.raises(RequestError, match=r"^prompt: 50000000 bytes; expected at most 4194304"):
        texts["byte_level"].encode("a" * 50_000_000)


def test_a_template_of_a_million_characters_is_refused(tmp_path):
    with pytest.raises(BundleError, match=r"chat template of 2000000 characters; expected at most"):
        Tokenizer.load(save(tmp_path, byte_level(), chat_template="x" * 2_000_000))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", None, "No such file"),
        ("tokenizer.json", b"{", "truncated"),
        ("tokenizer.json", b"{}", "(?i)model missing"),
        ("tokenizer.json", b"\xff", "not UTF-8 text at byte 0;"),
        ("tokenizer_config.json", b"[]", "Expected `object`"),
        ("tokenizer_config.json", b'{"chat_template": 3}', "chat_template"),
        ("tokenizer_config.json", b'{"bos_token": {"id": 3}}', "bos_token is {.id.: 3}, expected a text"),
        ("tokenizer_config.json", b'{"chat_template": "{% if %}"}', "line 1"),
        ("chat_template.jinja", b"a\n{{ ", "line 2"),
    ],
    ids=["missing", "json", "model", "utf8", "list", "template", "token", "syntax", "jinja"],
)
def test_a_broken_file_is_named(tmp_path, name, content, said):
    path = save(tmp_path, byte_level(), eos_token="<|end|>") / name
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BundleError, match=said) as caught:
        Tokenizer.load(tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", ["half of a", "half of a ", " half\n\n", "a a a", "<", "s", "assistant"])
@pytest.mark.parametrize("trims", [False, True])
def test_a_prompt_goes_on_with_the_last_message(tmp_path, content, trims):
    """As transformers cuts it."""
    said = "message.content | trim" if trims else "message.content"
    template = "{% for message in messages %}<{{ message.role }}>{{ " + said + " }}</s>{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    oracle = PreTrainedTokenizerFast(tokenizer_object=byte_level(), chat_template=template)
    text = Tokenizer.load(save(tmp_path, byte_level(), chat_template=template))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
    for asked in ({"continue_final_message": True}, {"add_generation_prompt": False}, {"add_generation_prompt": True}):
        expected = oracle.apply_chat_template(messages, tokenize=False, **asked)
        assert text.render({"messages": messages} | asked) == expected
    for wrong in ({"continue_final_message": True, "add_generation_prompt": True}, {"continue_final_message": 1}):
        with pytest.raises(RequestError, match="chat: continue_final_message: "):
            text.render({"messages": messages} | wrong)


def test_a_prompt_goes_on_with_the_last_text_of_a_message_in_parts(tmp_path):
    said = "{% for part in message.content %}{{ part.text }}{% endfor %}"
    template = "{% for message in messages %}" + said + "</s>{% endfor %}"
    oracle = PreTrainedTokenizerFast(tokenizer_object=byte_level(), chat_template=template)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "<"}, {"type": "image"}]
    messages = [{"role": "assistant", "content": parts}]
    expected = oracle.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    text = Tokenizer.load(save(tmp_path, byte_level(), chat_template=template))
    assert text.render({"messages": messages, "continue_final_message": True}) == expected == "a<"


@pytest.mark.parametrize("make", [byte_level, metaspace, llama_2, mixed])
def test_a_tokens_text_has_its_space(tmp_path, make):
    """A decoder that drops the space of a first token makes "a" and " a" one, and log-probabilities name both."""
    text = Tokenizer.load(save(tmp_path, make()))
    ids = text.encode("a b ab b", special=False)
    assert "".join(map(text.text_of, ids)).removeprefix(" ") == text.decode(ids) == "a b ab b"


@pytest.mark.parametrize("make", [byte_level, metaspace, llama_2, mixed])
def test_a_tokens_bytes_are_those_of_the_text(tmp_path, make):
    """Parts of characters, which have no text of their own, too."""
    text = Tokenizer.load(save(tmp_path, make()))
    ids = text.encode("a b naïve 中🌳 \ufffd 😀", special=False)
    assert b"".join(map(text.bytes_of, ids)).decode().removeprefix(" ") == text.decode(ids)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", ["byte_level", "llama_2"])
def test_a_long_text_has_the_tokens_of_a_short_ones_way(tmp_path, name, special):
    """Long ones go another way through the library, on which other threads run meanwhile."""
    text, oracle = Tokenizer.load(save(tmp_path, globals()[name]())), globals()[name]()
    for size in (tokenizer._SHORT_BYTES, tokenizer._SHORT_BYTES + 1, tokenizer._LONG_BYTES + 1):
        said = ("the cat sät on 🌳 mats, 123. " * (size // 30 + 1)).encode()[:size].decode(errors="ignore")
        assert text.encode(said, special=special) == oracle.encode(said, add_special_tokens=special).ids
