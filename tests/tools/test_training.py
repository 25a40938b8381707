"""The trainers of the demo drafter, on teachers of a few thousand parameters."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from draftwood.compiler.config import read_config
from draftwood.compiler.medusa_checkpoint import MedusaCheckpoint
from draftwood.errors import RequestError
from draftwood.runtime.text import Text
from draftwood.tools.training import medusa, quality, rank_paths
from draftwood.tools.training.contexts import Distilled, contexts_of, targets_of
from draftwood.tools.training.corpus import Row, read_folder, read_rows
from draftwood.tools.training.distill import distill
from draftwood.tools.training.generate import generate, load_teacher
from draftwood.tools.training.medusa_heads import TiedCrossEntropy, accuracy, load_heads
from draftwood.tools.training.ngram import NGrams
from draftwood.tools.training.tokenizer import encode_row, save_tokenizer, train_tokenizer
from draftwood.trees import RankPaths

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
DISTILL = {"rows": 80, "shard_rows": 40, "new_tokens": 12, "batch": 16, "seed": 3}


def save_teacher(folder: Path, **fields: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    tokenizer = train_tokenizer(ROWS, 300)
    sizes = {
        "vocab_size": tokenizer.get_vocab_size(), "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    config = LlamaConfig(
        **{**sizes, **fields}, max_position_embeddings=256, bos_token_id=0, eos_token_id=1, pad_token_id=1
    )
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


@pytest.mark.parametrize("line", ["{", '{"id": 1, "text": ""}', '{"id": "a"}', "[]"])
def test_malformed_rows_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "a", "text": "b"}\n' + line + "\n")
    with pytest.raises(RequestError, match="line 2"):
        list(read_rows(path))


def test_missing_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no books\.jsonl"):
        read_folder(tmp_path, ("books",))


def test_chat_template_frames_like_the_corpus(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(ROWS, 300)
    save_tokenizer(tokenizer, tmp_path)
    text = Text.load(tmp_path)
    sentence = "305 gulls, ünïcode & a\n\ttab"
    assert text.decode(text.encode(sentence)) == sentence
    for row in (row for row in ROWS if "messages" in row):
        assistant = tokenizer.token_to_id("<|assistant|>")
        assert text.chat([dict(m) for m in row["messages"]]) == [*encode_row(tokenizer, row), assistant]


def test_batched_generation_equals_single_rows(teacher: Path) -> None:
    model = load_teacher(teacher)
    prompts = [list(range(5, 5 + size)) for size in (9, 2, 9, 1, 6)]
    heat, ends = [0.0, 0.8, 0.8, 0.0, 0.8], [1, *range(200, 260)]
    uniforms = np.random.default_rng(0).random((5, 14), dtype=np.float32)
    together = generate(model, prompts, heat, uniforms, ends)
    for row in range(5):
        assert generate(model, [prompts[row]], [heat[row]], uniforms[[row]], ends) == [together[row]]
    plain = model.generate(
        torch.tensor([prompts[0]]), max_new_tokens=14, do_sample=False, eos_token_id=ends, pad_token_id=1
    )
    assert plain[0, 9:].tolist() == together[0]


def test_distillation_resumes_shard_by_shard(teacher: Path, distilled: Path, tmp_path: Path) -> None:
    distill(teacher, ROWS, tmp_path / "again", **{**DISTILL, "rows": 40})
    distill(teacher, ROWS, tmp_path / "again", **DISTILL)
    for path in distilled.glob("shard-*"):
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
    texts = Distilled.open(distilled)
    assert len(texts.index_W) == 80 and set(texts.index_W["temperature"]) == {np.float32(0), np.float32(0.8)}
    new = texts.index_W["length"] - texts.index_W["prompt"]
    assert ((new == 12) | texts.ended()).all() and texts.index_W["length"].sum() == len(texts.tokens_N)
    with pytest.raises(RequestError, match="seed"):
        distill(teacher, ROWS, tmp_path / "again", **{**DISTILL, "seed": 4})


def test_texts_of_another_teacher_are_refused(distilled: Path) -> None:
    with pytest.raises(RequestError, match="another teacher"):
        Distilled.open(distilled, "0" * 64)


def test_targets_equal_a_walk_over_the_texts(teacher: Path, distilled: Path) -> None:
    texts = Distilled.open(distilled)
    targets, text = targets_of(texts, np.ones(len(texts.index_W), bool), 3)
    expected = []
    for which, (start, prompt, length, _, _) in enumerate(texts.index_W):
        ids = texts.tokens_N[start : start + length].tolist() + [-100] * 3
        expected += [(which, ids[t + 2 : t + 5]) for t in range(prompt - 1, length - 2)]
    assert [(w, t) for w, t in zip(text.tolist(), targets.tolist(), strict=True)] == expected
    model, chosen = load_teacher(teacher), np.arange(len(texts.index_W)) == 5
    hidden = contexts_of(model, texts, chosen, 3).hidden_NH
    start, prompt, length, _, _ = texts.index_W[5]
    ids = torch.from_numpy(texts.tokens_N[start : start + length].astype(np.int64))[None]
    full = model.model(ids).last_hidden_state[0, prompt - 1 : length - 2]
    torch.testing.assert_close(hidden.float(), full, rtol=0.05, atol=0.05)  # bfloat16


def test_tied_loss_equals_autograd() -> None:
    torch.manual_seed(0)
    features, output, target = torch.randn(300, 8), torch.randn(50, 8), torch.randint(0, 50, (300,))
    weight = torch.rand(300)
    gradients = []
    for fused in (True, False):
        leaf = features.clone().requires_grad_(True)
        plain = F.cross_entropy(leaf @ output.T, target, reduction="none")
        loss = TiedCrossEntropy.apply(leaf, output, target, weight)[0] if fused else (plain * weight).sum()
        loss.backward()
        gradients.append((loss.detach(), leaf.grad))
    for got, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("own_output", [False, True], ids=["tied", "own output"])
def test_heads_learn_and_open(teacher: Path, distilled: Path, tmp_path: Path, own_output: bool) -> None:
    settings = {"heads": 2, "batch": 64, "learning_rate": 1e-2, "log_every": 5, "own_output": own_output}
    medusa.train(teacher, distilled, tmp_path, steps=5, **settings)
    medusa.train(teacher, distilled, tmp_path, steps=40, **settings)
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    steps = [record for record in log if "nats" in record]
    assert [record["step"] for record in steps] == list(range(5, 45, 5))
    assert sum(steps[-1]["nats"]) < sum(steps[0]["nats"]) - 0.3
    opened = MedusaCheckpoint.open(tmp_path, read_config(teacher))
    assert (opened.heads, opened.blocks, opened.tied, opened.dtype) == (2, 1, not own_output, torch.bfloat16)
    with pytest.raises(RequestError, match="other settings"):
        medusa.train(teacher, distilled, tmp_path, steps=41, **{**settings, "batch": 32})


def test_training_is_deterministic(teacher: Path, distilled: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        medusa.train(teacher, distilled, tmp_path / name, heads=2, steps=6, batch=64, seed=1)
    first, second = ((tmp_path / name / "medusa_lm_head.safetensors").read_bytes() for name in "ab")
    assert first == second


def test_position_convention(tmp_path: Path) -> None:
    """A teacher that counts upwards, and heads that are exact by construction: every rank is 0."""
    model = save_teacher(tmp_path / "teacher", hidden_size=320, tie_word_embeddings=False)
    size = model.config.vocab_size
    one_hot = torch.eye(size, 320)
    model.model.embed_tokens.weight.data = one_hot
    model.lm_head.weight.data = one_hot.roll(1, 0)  # row v reads token v - 1
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    model.save_pretrained(tmp_path / "teacher")
    (tmp_path / "heads").mkdir()
    exact = {f"{i}.0.weight": one_hot.roll(2 + i, 0).contiguous() for i in range(3)}
    save_file(exact, tmp_path / "heads" / "medusa_lm_head.safetensors")
    distill(tmp_path / "teacher", ROWS, tmp_path / "texts", **DISTILL)
    # Greedy only: a sampled text does not count upwards.
    paths = rank_paths.count_paths(tmp_path / "teacher", tmp_path / "heads", tmp_path / "texts", temperature=0)
    assert paths.contexts > 0 and paths.visits((0,)) == paths.contexts
    assert {max(path, default=0) for path, _ in json.loads(paths.to_json())["paths"]} == {0}
    texts, teacher = Distilled.open(tmp_path / "texts"), load_teacher(tmp_path / "teacher")
    greedy = texts.index_W["temperature"] == 0
    output = teacher.lm_head.weight.bfloat16()
    heads = load_heads(MedusaCheckpoint.open(tmp_path / "heads", read_config(tmp_path / "teacher")), output)
    found = contexts_of(teacher, texts, greedy, 3)
    assert accuracy(heads, found, greedy[found.text_N], output)["greedy"]["top1"] == [1.0, 1.0, 1.0]


def test_paths_equal_a_naive_count() -> None:
    ranks = np.random.default_rng(0).choice([0, 0, 1, 2, 15, 16], size=(500, 4))
    naive: Counter[tuple[int, ...]] = Counter()
    for row in ranks.tolist():
        naive[tuple(row[: row.index(16)] if 16 in row else row)] += 1
    counted = RankPaths()
    for path, count in naive.items():
        counted.add(path, count)
    paths = rank_paths.paths_of(ranks)
    assert paths == counted and rank_paths.compact(paths) == paths.to_json()
    small = RankPaths.from_json(rank_paths.compact(paths, largest=600))
    assert small.contexts == paths.contexts and len(small.to_json()) < len(paths.to_json())
    assert small.visits((0,)) <= paths.visits((0,))


def test_ngram_shares_add_up_and_memorise() -> None:
    tokens = np.random.default_rng(0).integers(0, 20, 3000).astype(np.uint16)
    grams = NGrams(tokens, 20)
    grams.tune(tokens[-500:] % 7)
    for context in (tokens[:3], np.array([19, 19, 19], np.uint16), np.array([0, 1, 2], np.uint16)):
        endings = [np.append(context, token).astype(np.uint16) for token in range(20)]
        assert sum(np.exp(-grams.nats(ending)) for ending in endings) == pytest.approx(1.0)
    loop = np.tile(np.arange(20, dtype=np.uint16), 100)
    assert NGrams(loop, 20).nats(loop) < 0.05


def test_quality_reports(teacher: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    lines = [json.dumps({"id": f"{i}/{row['id']}", **{k: v for k, v in row.items() if k != "id"}})
             for i in range(12) for row in ROWS]  # fmt: skip
    (tmp_path / "mine.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the old"}\n{"prompt": "ships"}\n')
    monkeypatch.setattr(quality, "stdlib_rows", lambda: iter(()))
    wanted = ["--teacher", str(teacher), "--data", str(tmp_path), "--sources", "mine", "--new-tokens", "9"]
    assert quality.main([*wanted, "--prompts", str(tmp_path / "prompts.jsonl"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert 0 < result["4gram_bits_per_byte"] < result["teacher_bits_per_byte"]  # the teacher was never trained
    assert 0 < result["greedy"]["distinct_4grams"] <= 1 and len(result["sampled"]["samples"]) == 2
    (tmp_path / "bad.jsonl").write_text('{"text": "no prompt"}\n')
    assert quality.main([*wanted, "--prompts", str(tmp_path / "bad.jsonl")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_missing_distilled_texts_exit_with_2(teacher: Path, tmp_path: Path, capsys) -> None:
    folders = ["--teacher", str(teacher), "--distilled", str(tmp_path)]
    assert medusa.main([*folders, "--out", str(tmp_path / "out")]) == 2
    assert "run distill" in capsys.readouterr().err
