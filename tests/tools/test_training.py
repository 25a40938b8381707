"""Inputs of a drafter's training: texts, states and losses."""

import errno
import gzip
import json
import resource
import shutil
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from draftwood.compiler.checkpoints.safetensors_file import write_tensors
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.training.losses import SHARPNESS, Distribution, HeadLoss, WrittenToken, drawn
from draftwood.compiler.training.teacher import FrozenTeacher, training_device
from draftwood.errors import RequestError
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.tests.bpe import save_tokenizer, train_tokenizer
from draftwood.tools import cli
from draftwood.tools.measure.calibrate import path_of
from draftwood.tools.prompts import user_turns
from draftwood.tools.tokenizers import tokenizer_of
from draftwood.tools.training.distill import (
    SETTINGS,
    TEMPERATURES,
    Prompts,
    WritingProgress,
    distill,
    save_array,
    texts_at_once,
)
from draftwood.tools.training.generate import batch_draws, engine_draws, generate
from draftwood.tools.training.own_prompts import OwnPrompts, own_rows
from draftwood.tools.training.rows import Row, WrittenMessage, read_data, read_rows
from draftwood.tools.training.schedule import stable_decay
from draftwood.tools.training.states import FOLDER, States, path_of_states, states_file, usual_aux
from draftwood.tools.training.team import Team
from draftwood.tools.training.texts import Distilled, shuffled
from draftwood.tools.training.trainer import _shares, write_state

TEXT = "the old sailor counted 12 ships and 305 gulls near the quiet harbour before the storm came in"
WORDS = TEXT.split()
ROWS: list[Row] = [
    {"id": f"chat/{i}", "messages": [
        {"role": "user", "content": " ".join(WORDS[i % 7 : i % 7 + 5])},
        {"role": "assistant", "content": WORDS[i % 11]},
        {"role": "user", "content": f"And {i}?"},
    ]} if i % 3 else {"id": f"text/{i}", "text": " ".join(WORDS[i % 5 :])}
    for i in range(40)
]  # fmt: skip
HEATS = set(np.array(TEMPERATURES, np.float32))
DISTILL = {"rows": 80, "shard_rows": 40, "new_tokens": 12, "batch": 16, "seed": 3}


def save_teacher(folder: Path, **fields: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    tokenizer = train_tokenizer(ROWS, 300)
    sizes = {
        "vocab_size": tokenizer.get_vocab_size(), "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 256,
    }  # fmt: skip
    config = LlamaConfig(**{**sizes, **fields}, bos_token_id=0, eos_token_id=1, pad_token_id=1)
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.normal_(std=0.2)
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return model


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training") / "teacher"
    save_teacher(folder, tie_word_embeddings=True)
    return folder


@pytest.fixture(scope="module")
def distilled(teacher: Path) -> Path:
    distill(teacher, ROWS, teacher.parent / "distilled", **DISTILL)
    return teacher.parent / "distilled"


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"id": 1, "text": ""}',
        '{"id": "a"}',
        "[]",
        '{"id": "a", "text": null}',
        '{"id": "a", "messages": []}',
        '{"id": "a", "messages": ["hi"]}',
        '{"id": "a", "messages": 5}',
        '{"id": "a", "messages": [{"role": "user", "content": "x"}], "text": "x"}',
        '{"id": "\\ud800", "text": "x"}',
        "[" * 99999,
    ],
    ids=lambda line: line[:30],
)
def test_malformed_rows_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "a", "text": "b"}\n' + line + "\n")
    with pytest.raises(RequestError, match="line 2"):
        list(read_rows(path))


def test_missing_data_is_named(tmp_path: Path) -> None:
    for name in (tmp_path, tmp_path / "books.jsonl"):
        with pytest.raises(RequestError, match=f"--data {name}: no such file"):
            read_data([str(name)])


def test_data_is_weighed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": "a", "text": "x"}\n')
    (tmp_path / "b.jsonl").write_text('{"id": "b", "text": "y"}\n')
    weighed = [f"{tmp_path}/a.jsonl:3", f"{tmp_path}/b.jsonl"]
    assert [row["id"] for row in read_data(weighed)] == ["a", "a", "a", "b"]
    assert [row["id"] for row in read_data([f"{tmp_path}:2"])] == ["a", "b", "a", "b"]
    for times in ("0", "", "-1", "two"):
        with pytest.raises(RequestError, match="PATH:TIMES"):
            read_data([f"{tmp_path}/a.jsonl:{times}"])


def test_a_field_that_is_null_is_as_one_that_is_not_there(tmp_path: Path) -> None:
    """A table's columns are those of all its rows."""
    chat = [{"role": "user", "content": "x"}]
    lines = [{"id": "a", "text": None, "messages": chat}, {"id": None, "text": None, "prompt": "x"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert read_data([str(tmp_path)]) == [{"id": "a", "messages": chat}, {"id": "2", "messages": chat}]


def test_marks_and_empty_lines_of_editors_are_read_over(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"id": "a", "text": "x"}\r\n\r\n{"id": "b", "text": "y"}\r\n \n')
    assert [row["id"] for row in read_data([str(tmp_path)])] == ["a", "b"]


def test_a_prompt_files_lines_are_rows_of_their_first_message(tmp_path: Path) -> None:
    lines = [{"prompt": "p"}, {"question_id": 81, "turns": ["q", "later"]}, {"question": "r", "answer": "#### 5"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    rows = read_data([str(tmp_path)])
    assert [row["id"] for row in rows] == ["1", "81", "3"]
    assert [row["messages"] for row in rows] == [[{"role": "user", "content": text}] for text in "pqr"]
    assert [user_turns(line)[0] for line in lines] == list("pqr")


_ZIPPED = gzip.compress(bytes(range(256)) * 20, mtime=0)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"no gzip", id="no gzip"),
        pytest.param(_ZIPPED[:-9], id="cut"),
        pytest.param(_ZIPPED[:20] + b"\xff" * 9 + _ZIPPED[29:], id="damaged"),
        pytest.param(gzip.compress(b"\xff\xfe{", mtime=0), id="UTF-16"),
    ],
)
def test_data_that_is_no_text_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    with pytest.raises(RequestError, match=r"cannot be read .*; expected lines of JSON in UTF-8"):
        read_data([str(tmp_path)])


def test_a_row_that_the_template_refuses_is_named(teacher: Path, tmp_path: Path) -> None:
    rows: list[Row] = [{"id": "odd", "messages": [{"role": "user", "content": 5}]}]  # type: ignore[typeddict-item]
    with pytest.raises(RequestError, match="--data, row 'odd': chat: message 0: content: expected a string"):
        distill(teacher, rows, tmp_path, **DISTILL)


def test_prompts_that_are_not_taken_are_said(teacher: Path, tmp_path: Path, capsys) -> None:
    rows: list[Row] = [{"id": f"{n}", "messages": [{"role": "user", "content": "a b " * n}]} for n in (1, 200)]
    asked = {"rows": 4, "shard_rows": 4, "new_tokens": 2}
    distill(teacher, rows, tmp_path / "some", **asked)
    assert "the shard is written without 2 texts: no user's turn of 1 to 254 tokens" in capsys.readouterr().err
    with pytest.raises(RequestError, match="prompts 1 to 4: none has a user's turn of 1 to 254 tokens"):
        distill(teacher, rows[1:], tmp_path / "none", **asked)
    with pytest.raises(RequestError, match="--max-new-tokens 256: the teacher has 256 positions"):
        distill(teacher, rows, tmp_path / "long", **asked | {"new_tokens": 256})


def test_a_text_begins_as_run_begins_it(teacher: Path) -> None:
    """With a begin token if the tokenizer adds one, whatever config.json names."""
    tokenizer = tokenizer_of(teacher)
    assert Prompts([{"id": "a", "text": "the old"}], tokenizer, 0, 99)(0) == tokenizer.encode("the old")


def test_rows_that_are_read_twice_are_held_out_together(teacher: Path) -> None:
    renamed: list[Row] = [{**row, "id": f"copy/{row['id']}"} for row in ROWS]
    prompts = Prompts([*ROWS, *ROWS[:9], *renamed], tokenizer_of(teacher), 0, 99)
    sources = {number: prompts.source(number) for number in range(89)}
    contents = [{**row, "id": ""} for row in prompts.rows]
    assert set(sources.values()) == {contents.index(content) for content in contents}
    assert all(contents[prompts.order[number]] == contents[source] for number, source in sources.items())


def test_a_row_is_held_out_however_few_they_are(distilled: Path) -> None:
    texts = Distilled.open(distilled)
    for rows in (40, 10, 2):
        source_W = texts.index_W["source"] % rows
        index_W = texts.index_W.copy()
        index_W["source"] = source_W
        held_W = replace(texts, index_W=index_W).held_out()
        assert held_W.any() and not held_W.all() and not {*source_W[held_W]} & {*source_W[~held_W]}
    index_W["source"] = 0
    with pytest.raises(RequestError, match=r"0 texts to train on .* from 1 data rows; .* more --data"):
        _shares(replace(texts, index_W=index_W), distilled, Team())


def test_batched_generation_equals_single_rows(teacher: Path) -> None:
    model = FrozenTeacher.open(teacher)
    prompts = [list(range(5, 5 + size)) for size in (9, 2, 9, 1, 6)]
    heat, ends = [0.0, 0.8, 0.8, 0.0, 0.8], [1, *range(200, 260)]
    samplings = [Sampling(temperature=heat[row], seed=row) for row in range(5)]
    together = generate(model, prompts, engine_draws(samplings), 14, ends)
    for row in range(5):
        assert generate(model, [prompts[row]], engine_draws([samplings[row]]), 14, ends) == [together[row]]
    plain = LlamaForCausalLM.from_pretrained(teacher).generate(
        torch.tensor([prompts[0]]), max_new_tokens=14, do_sample=False, eos_token_id=ends, pad_token_id=1
    )
    assert plain[0, 9:].tolist() == together[0]


def test_batches_are_drawn_as_the_temperature_says() -> None:
    """20,000 draws a temperature: a share's standard error is below 0.0036; five standard errors are allowed."""
    logits_V = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    for temperature in (0.5, 1.0):
        draws = batch_draws([temperature] * 20_000 + [0.0], 3, torch.device("cpu"))
        tokens_B = draws(logits_V.expand(20_001, 5), range(20_001), torch.zeros(20_001))
        shares_V = torch.bincount(tokens_B[:-1], minlength=5) / 20_000
        assert (shares_V - (logits_V / temperature).softmax(-1)).abs().max() < 5 * 0.0036
        assert tokens_B[-1] == 2, "a greedy row among sampled ones"
        again = batch_draws([temperature] * 20_000 + [0.0], 3, torch.device("cpu"))
        assert torch.equal(again(logits_V.expand(20_001, 5), range(20_001), torch.zeros(20_001)), tokens_B)


def test_a_teacher_writes_its_own_prompts(tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    save_teacher(teacher, tie_word_embeddings=True, max_position_embeddings=1024)
    model, text = FrozenTeacher.open(teacher), tokenizer_of(teacher)
    writer = OwnPrompts(model, text, seed=0, batch=16, told=lambda _: None)
    chat = [WrittenMessage(role="user", content="a"), WrittenMessage(role="assistant", content="b")]
    for before in ([], chat):
        opening = writer._opening(before)
        for content in ("Write", "3 times"):
            whole = text.chat([*before, WrittenMessage(role="user", content=content)])
            assert whole[: len(opening)] == opening and len(whole) > len(opening)
    rows = own_rows(tmp_path / "prompts.jsonl", 48, lambda: writer)
    assert {len(row["messages"]) for row in rows} == {1, 3}
    assert all(row["messages"][-1]["role"] == "user" and row["messages"][-1]["content"] for row in rows)
    assert rows == own_rows(tmp_path / "prompts.jsonl", 48, lambda: pytest.fail("written twice"))


def test_a_folder_without_texts_takes_other_settings(teacher: Path, tmp_path: Path) -> None:
    asked = {**DISTILL, "rows": 8, "shard_rows": 8, "new_tokens": 2}
    with pytest.raises(RequestError, match="none has a user's turn of 1 to 254 tokens; expected shorter ones"):
        distill(teacher, [{"id": "a", "messages": [{"role": "user", "content": TEXT * 40}]}], tmp_path, **asked)
    distill(teacher, ROWS, tmp_path, **asked)
    assert len(Distilled.open(tmp_path).index_W) == 8


def test_texts_without_data_follow_own_prompts(teacher: Path, tmp_path: Path) -> None:
    for rows in (8, 16):  # goes on with the same prompts
        distill(teacher, [], tmp_path, **{**DISTILL, "rows": rows, "shard_rows": 8}, own=24)
    prompts, index_W = list(read_rows(tmp_path / "prompts.jsonl")), Distilled.open(tmp_path).index_W
    assert 8 < len(index_W) <= 16 and index_W["source"].max() < len(prompts)  # some are too long for the teacher
    with pytest.raises(RequestError, match="own"):
        distill(teacher, [], tmp_path, **{**DISTILL, "rows": 8, "shard_rows": 8}, own=25)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts[1:]))
    with pytest.raises(RequestError, match=r"prompts.jsonl: has changed since texts were made of it"):
        distill(teacher, [], tmp_path, **{**DISTILL, "rows": 24, "shard_rows": 8}, own=24)


def test_the_learning_rate_warms_up_stays_and_decays() -> None:
    assert [stable_decay(step, step / 1000) for step in (0, 24, 49, 300, 499)] == [0.02, 0.5, 1, 1, 1]
    assert stable_decay(0, 0) < stable_decay(2, 2 / 40) < stable_decay(4, 4 / 40) == 1
    assert [stable_decay(9, share) for share in (0.5, 0.75, 0.999)] == [1, 0.5, 0.02]


def test_generation_tells_every_token_once(teacher: Path) -> None:
    steps: list[int] = []
    texts = generate(
        FrozenTeacher.open(teacher), [[5, 6], [7], [8]], engine_draws([Sampling()] * 3), 6, [1], steps.append
    )
    assert sum(steps) == sum(map(len, texts)) and steps[0] == 3


def test_progress_is_said_before_a_shard_is_whole(tmp_path: Path, capsys) -> None:
    progress = WritingProgress(tmp_path / "log.jsonl", 3)
    progress.told(5)
    assert not capsys.readouterr().err
    progress.said -= 3600
    progress.told(2)
    progress.told(1)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("prompts: 7 tokens so far, ") and not progress.log.exists()
    progress.shard = 1
    progress.whole()
    assert capsys.readouterr().err.startswith("shard 2 of 3: 8 tokens so far, ")
    record = json.loads(progress.log.read_text())
    assert (record["shard"], record["new_tokens"]) == (1, 8)


def test_rows_that_are_no_whole_shards_are_told_in_shards(teacher: Path, tmp_path: Path, capsys) -> None:
    distill(teacher, ROWS, tmp_path, **{**DISTILL, "rows": 41})
    first, *_ = capsys.readouterr().err.splitlines()
    assert first == "80 texts, in shards of 40"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gpu_is_taken_if_there_is_one(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    assert training_device() == torch.device(device)


def test_distillation_resumes_shard_by_shard(teacher: Path, distilled: Path, tmp_path: Path) -> None:
    distill(teacher, ROWS, tmp_path / "again", **{**DISTILL, "rows": 40})
    distill(teacher, ROWS, tmp_path / "again", **DISTILL)
    for path in distilled.glob("shard-*"):
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
    texts = Distilled.open(distilled)
    assert len(texts.index_W) == 80 and set(texts.index_W["temperature"]) == {
        np.float32(0),
        np.float32(0.8),
        np.float32(1),
    }
    new = texts.index_W["length"] - texts.index_W["prompt"]
    assert ((new == 12) | texts.ended()).all() and texts.index_W["length"].sum() == len(texts.tokens_N)
    with pytest.raises(RequestError, match="seed"):
        distill(teacher, ROWS, tmp_path / "again", **{**DISTILL, "seed": 4})
    with pytest.raises(RequestError, match="temperatures"):
        distill(teacher, ROWS, tmp_path / "again", **DISTILL, temperatures=(1.0,))


class Waitless(Team):
    def wait(self) -> None:
        """Its others are run one after another."""


def test_processes_share_the_shards(teacher: Path, distilled: Path, tmp_path: Path) -> None:
    for rank in (1, 0):
        distill(teacher, ROWS, tmp_path, **DISTILL, team=Waitless(rank, 2))
        assert len(list(tmp_path.glob("shard-*.index.npy"))) == 2 - rank
    for path in distilled.glob("shard-*"):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_processes_wait_for_the_first_for_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own limit they would for 10 minutes on GPUs, for 30 elsewhere."""
    asked: dict[str, timedelta] = {}
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(distributed, "init_process_group", lambda backend, **options: asked.update(options))
    for name, given in {"get_rank": 1, "get_world_size": 2, "destroy_process_group": None}.items():
        monkeypatch.setattr(distributed, name, lambda given=given: given)
    with Team.join(torch.device("cpu")) as team:
        assert team == Team(1, 2)
    assert asked["timeout"] >= timedelta(hours=12)


def test_texts_take_the_temperatures_in_turn(teacher: Path, tmp_path: Path) -> None:
    asked = {**DISTILL, "rows": 120, "shard_rows": 120, "new_tokens": 2}
    distill(teacher, ROWS[:39], tmp_path, **asked, temperatures=(0.0, 0.5, 1.0))
    index = Distilled.open(tmp_path).index_W
    assert index["temperature"][:39].tolist() == [0.0, 0.5, 1.0] * 13
    for source in set(index["source"]):  # all of them for every row: a greedy text comes once
        assert len({*index["temperature"][index["source"] == source]}) == 3


def test_shards_of_other_rows_or_another_version_are_not_gone_on_from(
    teacher: Path, distilled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(distilled, tmp_path / "texts")
    with pytest.raises(RequestError, match=r"other settings \(corpus\)"):
        distill(teacher, [*ROWS[1:], ROWS[0]], tmp_path / "texts", **DISTILL)
    shutil.copytree(teacher, tmp_path / "teacher")
    (tmp_path / "teacher" / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    with pytest.raises(RequestError, match=r"other settings \(tokenizer\)"):
        distill(tmp_path / "teacher", ROWS, tmp_path / "texts", **DISTILL)
    monkeypatch.setattr("draftwood.tools.training.distill.__version__", "0")
    with pytest.raises(RequestError, match=r"other settings \(version\)"):
        distill(teacher, ROWS, tmp_path / "texts", **DISTILL)


def test_a_full_disk_is_an_error_and_leaves_no_part(
    teacher: Path, distilled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files may not grow past some bytes, as on a disk that is full; a mapped one would end the process by a signal."""
    tensor, asked = torch.zeros(40_000), (distilled / SETTINGS).read_bytes()

    def states() -> None:
        with states_file(tmp_path / "states-1.npy", (40, 1000)):
            raise AssertionError("there is room")

    for write in (
        states,
        lambda: write_state(tmp_path / "checkpoint.pt", {"a": tensor}),
        lambda: write_tensors(tmp_path / "model.safetensors", {"a": tensor}),
        lambda: save_array(tmp_path / "shard.npy", tensor.numpy()),
    ):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        try:
            with pytest.raises(OSError) as caught:
                write()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert caught.value.errno == errno.EFBIG and caught.value.filename
        assert list(tmp_path.iterdir()) == []
    with monkeypatch.context() as full:
        full.setattr("draftwood.tools.training.distill.write_whole", None)  # nothing is written again
        distill(teacher, ROWS, distilled, **DISTILL)
    assert (distilled / SETTINGS).read_bytes() == asked


def test_states_that_a_killed_process_was_writing_are_removed(tmp_path: Path) -> None:
    killed = tmp_path / "states-1.1.part"
    killed.write_bytes(b"x")
    with states_file(tmp_path / "states-2.npy", (1, 1)):
        assert not killed.exists()
        with states_file(tmp_path / "states-3.npy", (1, 1)):
            assert len(list(tmp_path.iterdir())) == 2  # what somebody writes stays
    assert sorted(path.name for path in tmp_path.iterdir()) == ["states-2.npy", "states-3.npy"]


@pytest.mark.parametrize("text", ["5", "[]", '{"teacher": ', '{"teacher": 5, "ends": 7}'])
def test_damaged_settings_are_one_line(teacher: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "distill.json").write_text(text)
    (tmp_path / "shard-0000.index.npy").touch()
    with pytest.raises(RequestError, match=r"not a whole folder of distilled texts"):
        Distilled.open(tmp_path)
    with pytest.raises(RequestError, match=r"distill.json: damaged|other settings"):
        distill(teacher, ROWS, tmp_path, **DISTILL)


def test_a_damaged_shard_or_its_states_are_one_line(teacher: Path, distilled: Path, tmp_path: Path) -> None:
    for content in (b"", (distilled / "shard-0001.npy").read_bytes()):
        shutil.copytree(distilled, tmp_path, dirs_exist_ok=True)
        (tmp_path / "shard-0000.npy").write_bytes(content)
        with pytest.raises(RequestError, match=r"shard-0000.index.npy: damaged shard \(.*; remove it, and run distill"):
            Distilled.open(tmp_path)
    states = States(FrozenTeacher.open(teacher), Distilled.open(distilled), (0, 1, 2), tmp_path, 10**9)
    states.fill()
    states.paths[0].write_bytes(states.paths[0].read_bytes()[:999])
    with pytest.raises(RequestError, match=r"states-.*.npy: damaged \(.*; remove it"):
        states.batch(np.arange(2))


def test_texts_of_another_teacher_are_refused(distilled: Path) -> None:
    with pytest.raises(RequestError, match="another teacher"):
        Distilled.open(distilled, "0" * 64)


def test_targets_equal_a_walk_over_the_texts(teacher: Path, distilled: Path) -> None:
    texts, text_B = Distilled.open(distilled), np.array([7, 5, 30])
    batch = States(FrozenTeacher.open(teacher), texts, (1,)).batch(text_B)
    expected, places = [], []
    for row, text in enumerate(text_B):
        _, prompt, length, _, _ = texts.index_W[text]
        ids = texts.tokens_of(text).tolist() + [-100] * 3
        contexts = range(prompt - 1, length - 2)
        expected += [ids[t + 2 : t + 5] for t in contexts]
        places += [[(row, min(t + 1 + i, batch.ids_BS.shape[1] - 1)) for i in range(3)] for t in contexts]
    assert batch.targets(3).tolist() == expected
    wanted = torch.stack([torch.stack([batch.last_BSH[at] for at in line]) for line in places])
    assert torch.equal(batch.last_BSH.flatten(0, 1)[batch.places(3)], wanted)


def test_states_are_those_of_transformers(teacher: Path, distilled: Path, tmp_path: Path) -> None:
    """Computed, cached, kept while they were written, and where only some texts fit: those of transformers."""
    model, texts = FrozenTeacher.open(teacher), Distilled.open(distilled)
    theirs, text_B = LlamaForCausalLM.from_pretrained(teacher).eval().requires_grad_(False), np.array([50, 3, 79])
    size = len(texts.tokens_N) * (1 + len(usual_aux(model))) * 32 * 2
    whole = States(model, texts, (0, 1), tmp_path, size)
    assert whole.fill() == 2 and whole.fill() == 0
    small = States(model, texts, (0, 1), tmp_path / "small", size - 1)
    assert small.fill() == 1
    kept = States(model, texts, (0, 1), distilled / FOLDER, size)
    assert kept.fill() == 0
    for states in (whole, small, kept):
        batch = states.batch(text_B)
        for row, text in enumerate(text_B):
            ids = torch.from_numpy(texts.tokens_of(text).astype(np.int64))[None]
            out = theirs.model(ids, output_hidden_states=True)
            size = ids.shape[1]
            assert torch.equal(batch.ids_BS[row, :size], ids[0])
            size -= states is kept  # a text's last token was not fed when it was written
            entering = torch.cat([out.hidden_states[0], out.hidden_states[1]], -1)[0]
            for got, wanted in ((batch.last_BSH, out.last_hidden_state[0]), (batch.aux_BSF, entering)):
                # bfloat16 products and storage; states of another slot or layer are off by 100 %.
                assert (got[row, :size].float() - wanted[:size]).norm() < 0.02 * wanted[:size].norm()
    with pytest.raises(RequestError, match="aux layers"):
        States(model, texts, (1, 3))


def test_another_text_meets_no_file_of_the_cache(teacher: Path, distilled: Path, tmp_path: Path) -> None:
    model, texts = FrozenTeacher.open(teacher), Distilled.open(distilled)
    States(model, texts, (), tmp_path, 10**9).fill()
    tokens_N = texts.tokens_N.copy()
    tokens_N[0] += 1
    for other, shards in ((replace(texts, tokens_N=tokens_N), 1), (replace(texts, teacher="0" * 64), 2)):
        assert States(model, other, (), tmp_path, 10**9).fill() == shards
    assert States(model, texts, usual_aux(model), tmp_path, 10**9).fill() == 0
    names = {path_of_states(tmp_path, texts.teacher, aux, [3], texts.tokens_N[:3]) for aux in ((0, 1), (1,), (0, 1))}
    assert len(names) == 2


def test_epochs_hold_every_text_once_and_resume_in_place() -> None:
    lengths = np.random.default_rng(0).integers(1, 90, 400)
    texts = np.arange(0, 400, 2)
    feed = shuffled(lengths, texts, 8, 3, 0)
    first, second = ([next(feed) for _ in range(25)] for _ in range(2))
    for epoch in (first, second):
        assert sorted(np.concatenate(epoch).tolist()) == texts.tolist()
    assert [b.tolist() for b in first] != [b.tolist() for b in second]
    later = shuffled(lengths, texts, 8, 3, 30)
    assert [next(later).tolist() for _ in range(5)] == [b.tolist() for b in second[5:10]]


@pytest.mark.parametrize("kind", ["written", "distribution", "subset"])
def test_head_loss_equals_autograd(kind: str) -> None:
    """Losses and gradients, of the features and of the matrix, against plain autograd in float64."""
    torch.manual_seed(0)
    rows, ids = 300, torch.randperm(50)[:20].sort().values
    features, weight = torch.randn(rows, 8), torch.rand(rows)
    teacher, last, place = torch.randn(50, 8), torch.randn(90, 8), torch.randint(0, 90, (rows,))
    output = torch.randn(20 if kind == "subset" else 50, 8)
    token = torch.randint(0, 50, (rows,))
    if kind == "written":
        target, wanted = WrittenToken(token), F.one_hot(token, 50).double()
    else:
        target = Distribution(last, teacher[ids] if kind == "subset" else teacher, place)
        logits = (last.double() @ teacher.double().T)[place]
        wanted = logits.softmax(-1)
        if kind == "subset":
            wanted = logits[:, ids].softmax(-1)
    leaves = [features.clone().requires_grad_(True), output.clone().requires_grad_(True)]
    loss, each = HeadLoss.apply(*leaves, weight, target, place.argsort())
    loss.backward()
    exact = [leaf.detach().double().requires_grad_(True) for leaf in leaves]
    plain = -(wanted * (exact[0] @ exact[1].T).log_softmax(-1)).sum(-1)
    (plain * weight).sum().backward()
    torch.testing.assert_close(each, plain.detach().float(), rtol=1e-4, atol=1e-5)
    for got, expected in zip(leaves, exact, strict=True):
        torch.testing.assert_close(got.grad, expected.grad.float(), rtol=1e-4, atol=1e-4)


def test_a_draw_is_learnt_under_the_noise_it_was_drawn_with() -> None:
    """Rows of sampled text: s times the cross-entropy of softmax((q + T G) / s) with argmax(p + T G)."""
    torch.manual_seed(1)
    rows, vocabulary = 60, 50
    features, output, weight = torch.randn(rows, 8, requires_grad=True), torch.randn(vocabulary, 8), torch.rand(rows)
    last, place = torch.randn(rows, 8), torch.arange(rows)
    temperature = torch.tensor([0.0, 0.8, 1.0]).repeat(rows // 3)
    target = drawn(Distribution(last, output, place), temperature, vocabulary, seed=5)
    before = target.generator.get_state()
    noise = torch.zeros(rows, vocabulary)
    noise[temperature > 0] = target._gumbel(int((temperature > 0).sum()), vocabulary)
    target.generator.set_state(before)
    loss, each = HeadLoss.apply(features, output, weight, target, place)
    loss.backward()
    exact = features.detach().clone().requires_grad_(True)
    noise *= temperature[:, None]
    height = (exact @ output.T + noise) / SHARPNESS
    sampled = SHARPNESS * F.cross_entropy(height, (last @ output.T + noise).argmax(-1), reduction="none")
    alone = -((last @ output.T).softmax(-1) * (exact @ output.T).log_softmax(-1)).sum(-1)
    plain = torch.where(temperature > 0, sampled, alone)
    (plain * weight).sum().backward()
    torch.testing.assert_close(each, plain.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(features.grad, exact.grad, rtol=1e-4, atol=1e-5)


def test_training_noise_is_standard_gumbel() -> None:
    """Mean and variance of 640 000 numbers, within six standard deviations of the two estimates."""
    torch.manual_seed(0)
    target = drawn(Distribution(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1)), torch.ones(1), 10_000, seed=2)
    count = len(target.gumbel_L)
    assert count == 640_000 and abs(float(target.gumbel_L.mean()) - 0.57722) < 6 * 1.2825 / count**0.5
    assert abs(float(target.gumbel_L.var()) - np.pi**2 / 6) < 6 * np.pi**2 / 6 * (4.4 / count) ** 0.5


def test_paths_equal_a_naive_count() -> None:
    ranks = np.random.default_rng(0).choice([0, 0, 1, 2, 15, 16], size=(500, 4))
    naive: Counter[tuple[int, ...]] = Counter()
    for row in ranks.tolist():
        naive[tuple(row[: row.index(16)] if 16 in row else row)] += 1
    assert Counter(path_of(row, 16) for row in ranks.tolist()) == naive


def test_the_command_writes_texts_that_training_reads(teacher: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = ["distill", teacher, "--out", tmp_path / "out", "--rows", 4, "--max-new-tokens", 2]
    assert cli.main([str(word) for word in [*words, "--data", tmp_path / "rows.jsonl"]]) == 0
    assert "draftwood train" in capsys.readouterr().out
    contents = [{**row, "id": ""} for row in ROWS]
    assert {*Distilled.open(tmp_path / "out").index_W["source"]} == {contents.index(content) for content in contents}
    assert set(Distilled.open(tmp_path / "out").index_W["temperature"]) == {
        np.float32(0),
        np.float32(0.8),
        np.float32(1),
    }
    assert cli.main([str(word) for word in [*words, "--data", tmp_path / "none"]]) == 2
    assert cli.main([str(word) for word in [*words[:-1], 0, "--data", tmp_path / "rows.jsonl"]]) == 2
    assert cli.main([str(word) for word in [*words[:3], tmp_path / "no", "--own-prompts", 0]]) == 2
    assert not (tmp_path / "no").exists()


def test_texts_are_written_side_by_side_as_their_caches_have_room(teacher: Path) -> None:
    """A teacher of openPangu-7B's sizes would else take 150 GB of a GPU."""
    small = Checkpoint.open(teacher).config
    large = replace(small, layers=34, heads=32, kv_heads=8, head_dim=128)
    assert [texts_at_once(small, device, 160) for device in ("cpu", "cuda")] == [128, 2048]
    assert [texts_at_once(large, device, 160) for device in ("cpu", "cuda")] == [128, 256]
    assert texts_at_once(large, "cuda", 30_000) == 4
