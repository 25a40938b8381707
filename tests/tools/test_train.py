"""``draftwood train``: positions, exactness against a step-by-step draft, resuming, several processes, files."""

import argparse
import json
import os
import socket
import subprocess
import sys
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from draftwood.compiler.drafters.common.layers import Waiting
from draftwood.compiler.drafters.common.training import Block, Sizes
from draftwood.compiler.drafters.dspark.network import DSpark
from draftwood.compiler.drafters.eagle3 import network as compiled_eagle3
from draftwood.compiler.drafters.fasteagle import network as compiled_fasteagle
from draftwood.compiler.drafters.fasteagle.training import narrowed
from draftwood.compiler.drafters.medusa.checkpoint import MedusaCheckpoint
from draftwood.compiler.drafters.registry import kind_named, open_drafter
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.training import student
from draftwood.compiler.training.batch import NONE
from draftwood.compiler.training.precision import autocast
from draftwood.compiler.training.student import Student
from draftwood.compiler.training.teacher import FrozenTeacher
from draftwood.errors import CheckpointError, RequestError
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.tools.commands import train as command
from draftwood.tools.training import schedule, trainer
from draftwood.tools.training.draft_vocabulary import coverage, most_frequent
from draftwood.tools.training.shared_noise import BatchNoise
from draftwood.tools.training.states import States
from draftwood.tools.training.students import Start, begin, load
from draftwood.tools.training.texts import INDEX, Distilled
from draftwood.tools.training.trainer import ranks_of, train

VOCABULARY, HIDDEN, LAYERS, PROMPT = 24, 32, 6, 3
KINDS = ("medusa", "eagle3", "fasteagle", "dspark")
# Enough for a text that counts.
LEARN = {"levels": 2, "steps": 60, "batch": 16, "learning_rate": 3e-2}


def save_teacher(folder: Path, counting: bool) -> LlamaForCausalLM:
    """A random teacher, or one that says x + 1 after x, surely, whatever came before."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(std=0.2) if "norm" not in name else parameter.data.uniform_(0.5, 1.5)
    if counting:
        one_hot = torch.eye(VOCABULARY, HIDDEN)
        model.model.embed_tokens.weight.data = one_hot
        model.lm_head.weight.data = 3 * one_hot.roll(1, 0)  # row v reads token v - 1
        model.model.norm.weight.data.fill_(1)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.data.zero_()
            layer.mlp.down_proj.weight.data.zero_()
    model.save_pretrained(folder)
    return model


def transformers_teacher(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder).eval().requires_grad_(False)


def save_texts(folder: Path, teacher: Path, tokens: list[list[int]]) -> Path:
    """Texts as if the teacher had written them, every second one greedily."""
    folder.mkdir()
    index = np.zeros(len(tokens), INDEX)
    index["length"], index["prompt"] = [len(t) for t in tokens], PROMPT
    index["start"] = np.cumsum(index["length"]) - index["length"]
    index["temperature"], index["source"] = np.arange(len(tokens)) % 2 * np.float32(0.8), np.arange(len(tokens))
    np.save(folder / "shard-0000.npy", np.concatenate(tokens).astype(np.uint32))
    np.save(folder / "shard-0000.index.npy", index)
    (folder / "distill.json").write_text(json.dumps({"teacher": Checkpoint.open(teacher).digest(), "ends": [1]}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two teachers, counting and noise; texts of the counting one that count, and texts that are noise."""
    folder, rng = tmp_path_factory.mktemp("train"), np.random.default_rng(0)
    save_teacher(folder / "counting", counting=True)
    save_teacher(folder / "noise", counting=False)
    first = rng.integers(0, VOCABULARY, 400)
    save_texts(folder / "counted", folder / "counting", [[(f + i) % VOCABULARY for i in range(16)] for f in first])
    noise = [rng.integers(2, VOCABULARY, rng.integers(9, 16)).tolist() for _ in range(400)]
    save_texts(folder / "random", folder / "counting", noise)
    save_texts(folder / "unread", folder / "noise", noise[:120])
    return folder


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """All products in float32."""
    monkeypatch.setattr(student, "autocast", lambda device: torch.autocast(device.type, enabled=False))
    for module in (trainer, student):
        monkeypatch.setattr(module, "compute_dtype", lambda device: torch.float32)


def last_nats(out: Path) -> list[float]:
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [record for record in records if "of" in record][-1]["nats"]


@pytest.mark.parametrize("kind", [*KINDS[:3], pytest.param("dspark", marks=pytest.mark.slow)])
def test_every_level_learns_a_text_that_counts(folder: Path, tmp_path: Path, kind: str) -> None:
    """Each level is an exact function of what it may see; ranks are checked against a walk over the texts."""
    final = train(kind, folder / "counting", folder / "counted", tmp_path, **LEARN)
    assert max(last_nats(tmp_path)) < 0.1
    assert final["greedy"]["top1"] == final["sampled"]["top1"] == [1.0] * 2
    model, texts = FrozenTeacher.open(folder / "counting"), Distilled.open(folder / "counted")
    loaded, text_B = load(tmp_path, model, levels=2), np.array([7, 2])
    batch = States(model, texts, loaded.aux).batch(text_B)
    with torch.no_grad(), autocast(batch.ids_BS.device):
        features = loaded.features(batch).to(loaded.output_VH.dtype)
    best = torch.stack([loaded.logits(features[:, i], i).argmax(-1) for i in range(2)], 1)
    roots = [int(texts.tokens_of(text)[t + 1]) for text in text_B for t in range(PROMPT - 1, 14)]
    known = (batch.targets(2) != -100).all(1)
    wanted = torch.tensor([[(root + 1 + i) % VOCABULARY for i in range(2)] for root in roots])
    assert torch.equal(best[known], wanted[known])


def test_eagle3_levels_see_the_true_tokens_and_not_the_next(folder: Path, tmp_path: Path) -> None:
    """On noise the teacher's guess follows from one token, which only the right slot of each level has."""
    settings = {**LEARN, "steps": 120}
    train("eagle3", folder / "counting", folder / "random", tmp_path, **settings)
    assert max(last_nats(tmp_path)) < 0.1


def test_fasteagle_layers_see_no_future(folder: Path, tmp_path: Path) -> None:
    """On noise the first layer can know the root's successor; the second can know nothing of its token."""
    train("fasteagle", folder / "counting", folder / "random", tmp_path, **LEARN)
    model, texts = FrozenTeacher.open(folder / "counting"), Distilled.open(folder / "random")
    loaded = load(tmp_path, model)
    batch = States(model, texts, loaded.aux).batch(texts.held_out().nonzero()[0])
    count = (batch.targets(2) != -100).sum(0)
    nats = (loaded.loss(batch, count)[1]["nats"] / count).tolist()
    assert nats[0] < 0.1 and nats[1] > 0.95 * np.log(VOCABULARY)


@pytest.mark.parametrize("kind", ["eagle3", "fasteagle", "medusa"])
def test_shared_noise_changes_what_sampled_text_teaches(folder: Path, kind: str) -> None:
    model, texts = FrozenTeacher.open(folder / "noise"), Distilled.open(folder / "unread")
    heat = texts.index_W["temperature"]
    found = {}
    for shared in (False, True):
        torch.manual_seed(3)
        drafter = begin(kind, kind_named(kind).complete({"levels": 2, "shared_noise": shared}), model, None)
        states = States(model, texts, drafter.aux)
        for name, chosen in (("greedy", heat == 0), ("sampled", heat > 0)):
            batch = states.batch(chosen.nonzero()[0][:8])
            found[name, shared] = drafter.loss(batch, (batch.targets(2) != -100).sum(0))[1]["nats"]
    # Medusa's heads learn the token that was written, and with shared noise the distribution that it is the best of.
    assert kind == "medusa" or torch.equal(found["greedy", False], found["greedy", True])
    assert not torch.allclose(found["sampled", False], found["sampled", True], rtol=0.01)


def test_a_batch_that_comes_again_has_other_noise(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds, drawn = [], student.drawn
    monkeypatch.setattr(student, "drawn", lambda *given: seeds.append(given[-1]) or drawn(*given))
    asked = {"levels": 2, "steps": 3, "batch": 120, "shared_noise": True}
    train("medusa", folder / "noise", folder / "unread", tmp_path, **asked)  # every step has all texts
    assert len(set(seeds)) == 3


def test_sampled_texts_alone_have_noise(folder: Path) -> None:
    model, texts = FrozenTeacher.open(folder / "noise"), Distilled.open(folder / "unread")
    batch = States(model, texts, (1,)).batch(np.array([0, 1]))
    samplings = [Sampling(), Sampling(temperature=0.8, seed=3)]
    noise = BatchNoise(batch, samplings, None, VOCABULARY)(1, slice(20))
    assert noise[-1].abs().min() > 0 and not noise[0].any()


def moved_student(folder: Path, kind: str, options: dict) -> tuple[FrozenTeacher, Student]:
    """A student and the noisy teacher, moved from where it begins."""
    model = FrozenTeacher.open(folder / "noise")
    torch.manual_seed(3)
    drafter = begin(kind, kind_named(kind).complete(options), model, None)
    for parameter in drafter.parameters():
        parameter.data = (parameter.data + 0.2 * torch.randn_like(parameter)).bfloat16().float()
    return model, drafter


def noisy_dspark(folder: Path) -> tuple[FrozenTeacher, Student]:
    """A DSpark student of three levels and two layers and the noisy teacher, moved from where it begins."""
    return moved_student(folder, "dspark", {"levels": 3, "layers": 2})


def test_the_compiler_runs_the_dspark_that_was_trained(folder: Path, tmp_path: Path, exact: None) -> None:
    """Along the true text, context by context: every level's candidates, and the confidence in the best of them."""
    model, drafter = noisy_dspark(folder)
    drafter.save(tmp_path)
    opened = open_drafter(tmp_path, Checkpoint.open(folder / "noise")).checkpoint
    module = DSpark(opened.config, 64)
    module.load_state_dict({**{name: opened.weight(name).float() for name in opened.names()}, **opened.buffers(64)})
    shared = SimpleNamespace(embedded=model.decoder.embedded, scores=model.decoder.head)
    batch = States(model, Distilled.open(folder / "unread"), drafter.aux).batch(np.array([5]))
    ids, noise = batch.ids_BS[0], torch.randn(3, VOCABULARY)
    with torch.no_grad():
        features = drafter.features(batch)
        for context in range(len(features) - 2):
            t = PROMPT - 1 + context
            place, source = torch.tensor([t + 1]), torch.zeros(1, dtype=torch.int64)
            waiting = Waiting(ids[1 : t + 2], batch.aux_BSF[0, : t + 1].float(), place, place)
            nodes = module.root(module.extend(waiting, [torch.zeros(128, 8) for _ in range(4)], shared), shared, noise)
            for level in range(3):
                logits = drafter.logits(features[context, level][None], level, noise[level])
                assert nodes.best(4)[0].tolist() == drafter.best(logits, 4).tolist()
                sure = features[context, level, -1].sigmoid().log()
                torch.testing.assert_close(nodes.best(1)[1][0, 0], sure, rtol=0, atol=1e-4)  # other order of sums
                nodes = nodes.below(ids[t + 2 + level][None], source, source) if level < 2 else nodes


def test_dsparks_head_sees_its_parents_token_and_not_the_next(folder: Path, tmp_path: Path) -> None:
    """On noise only the parent's token says what comes next, and the confidence knows that it does."""
    train("dspark", folder / "counting", folder / "random", tmp_path, **LEARN)
    assert max(last_nats(tmp_path)) < 0.1
    model, texts = FrozenTeacher.open(folder / "counting"), Distilled.open(folder / "random")
    loaded = load(tmp_path, model)
    batch = States(model, texts, loaded.aux).batch(texts.held_out().nonzero()[0])
    assert loaded.frozen(batch)[:, 0, -1].float().sigmoid().mean() > 0.9
    loaded.markov_head.markov_w2.weight.data.zero_()
    count = (batch.targets(2) != -100).sum(0)
    assert (loaded.loss(batch, count)[1]["nats"] / count)[1:].min() > 0.9 * np.log(VOCABULARY)


def test_dsparks_confidence_is_learnt_from_what_the_teacher_would_accept(folder: Path) -> None:
    """One less the total variation, of whole distributions, for every fourth node."""
    model, drafter = noisy_dspark(folder)
    batch = States(model, Distilled.open(folder / "unread"), drafter.aux).batch(np.array([5, 8]))
    features, there = drafter.frozen(batch), batch.targets(3) != -100
    own = torch.stack([drafter.logits(features[:, level], level).softmax(-1) for level in range(3)], 1)
    last = batch.last_BSH.flatten(0, 1)[batch.places(3)]
    wanted = 1 - (own - F.linear(last.float(), model.output_VH).softmax(-1)).abs().sum(-1) / 2
    found = drafter._accepted(batch, features[..., :-1][there], there)
    torch.testing.assert_close(found, wanted[there], rtol=0, atol=0.02)  # bfloat16 logits


def test_a_training_goes_on_from_a_drafter(folder: Path, tmp_path: Path, exact: None) -> None:
    """A cascade that gets another level begins as it was; another kind's folder is refused."""
    settings, folders = {"steps": 2, "batch": 16}, [folder / "counting", folder / "counted"]
    train("fasteagle", *folders, tmp_path / "two", **settings, levels=2)
    model = FrozenTeacher.open(folders[0])
    before = load(tmp_path / "two", model)
    after = begin("fasteagle", kind_named("fasteagle").complete({"levels": 3}), model, None)
    Start.read(tmp_path / "two", "fasteagle", model).give(after)
    batch = States(model, Distilled.open(folders[1]), before.aux).batch(np.arange(4))
    with torch.no_grad():
        wanted, found = before.features(batch), after.features(batch)
    torch.testing.assert_close(found[:, :2, :HIDDEN], wanted, rtol=0, atol=1e-5)  # the scale of proj goes in and out
    train("fasteagle", *folders, tmp_path / "on", **settings, levels=3, start=tmp_path / "two")
    assert json.loads((tmp_path / "on" / "config.json").read_text())["num_hidden_layers"] == 3
    with pytest.raises(RequestError, match="holds a FastEagle drafter; expected Medusa heads"):
        train("medusa", *folders, tmp_path / "no", start=tmp_path / "two")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("fasteagle", {"levels": 2, "layer_sizes": [1, 1, 20]}),
        ("medusa", {"levels": 2, "layers": 2}),
        ("dspark", {"levels": 3, "layers": 2}),
        ("eagle3", {"levels": 2}),
    ],
)
def test_a_training_that_goes_on_keeps_the_sizes(
    folder: Path, tmp_path: Path, kind: str, options: dict[str, Any], exact: None
) -> None:
    """With a step of nothing it is the same drafter; another size or a foreign tensor is refused and not left out."""
    folders, settings = [folder / "counting", folder / "counted"], {"steps": 1, "batch": 16}
    train(kind, *folders, tmp_path / "one", **settings, **options)
    train(kind, *folders, tmp_path / "on", **settings, start=tmp_path / "one", learning_rate=1e-12)
    file = "medusa_lm_head.safetensors" if kind == "medusa" else "model.safetensors"
    first, second = (load_file(tmp_path / name / file) for name in ("one", "on"))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name].float(), tensor.float(), rtol=2**-7, atol=1e-6)  # bfloat16, twice
    if kind == "fasteagle":
        with pytest.raises(RequestError, match=r"intermediate_size is 20; expected 30, .*leave out"):
            train(kind, *folders, tmp_path / "no", **settings, start=tmp_path / "one", layer_sizes=[1, 1, 30])
    if kind == "eagle3":
        save_file({**first, "lm_head.weight": torch.zeros(VOCABULARY, HIDDEN)}, tmp_path / "one" / file)
        with pytest.raises(CheckpointError, match="a drafter with an output matrix of its own; expected"):
            train(kind, *folders, tmp_path / "no", **settings, start=tmp_path / "one")
        save_file(first, tmp_path / "one" / file)
        config = json.loads((tmp_path / "one" / "config.json").read_text()) | {"aux_layer_ids": [0, 1, 2]}
        (tmp_path / "one" / "config.json").write_text(json.dumps(config))
        with pytest.raises(RequestError, match=r"aux_layer_ids is \(0, 1, 2\); expected \("):
            train(kind, *folders, tmp_path / "no", **settings, start=tmp_path / "one")


def test_a_training_that_goes_on_keeps_its_draft_vocabulary(folder: Path, tmp_path: Path) -> None:
    """Fewer texts would count other tokens; another number of them is counted anew."""
    settings, folders = {"steps": 1, "batch": 16, "levels": 1}, [folder / "counting", folder / "counted"]
    train("eagle3", *folders, tmp_path / "one", **settings, draft_vocab=9)
    path = tmp_path / "one" / "model.safetensors"
    tensors = load_file(path)
    assert tensors["d2t"].any()
    tensors["d2t"], tensors["t2d"] = torch.zeros(9, dtype=torch.int64), torch.arange(VOCABULARY) < 9  # the first ids
    save_file(tensors, path)
    for name, asked in (("same", {}), ("named", {"draft_vocab": 9}), ("more", {"draft_vocab": 10})):
        train("eagle3", *folders, tmp_path / name, **settings, **asked, start=tmp_path / "one")
        d2t = load_file(tmp_path / name / "model.safetensors")["d2t"]
        assert len(d2t) == asked.get("draft_vocab", 9)
        assert (name == "more") != torch.equal(d2t, tensors["d2t"])


def test_without_fast_bfloat16_matrices_are_orthogonalised_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Muon's five steps of Newton and Schulz; in bfloat16 they are off by a hundredth."""
    monkeypatch.setattr(schedule, "compute_dtype", lambda device: torch.float32)
    matrix = torch.nn.Linear(8, 6, bias=False, dtype=torch.float32)
    before, slope = matrix.weight.detach().clone(), torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    matrix.weight.grad = slope.clone()
    schedule.HybridOptimizer(matrix, 0.5).step(1.0)
    update = slope.double() / slope.double().norm()
    for _ in range(5):
        gram = update @ update.T
        update = 3.4445 * update + (-4.775 * gram + 2.0315 * gram @ gram) @ update
    scale = 0.5 * 0.2 * 8**0.5  # the rate, and AdamW's root mean square
    torch.testing.assert_close(before - matrix.weight, scale * update.float(), rtol=0, atol=1e-5)


def naive_eagle3(folder: Path, teacher: LlamaForCausalLM, ids: list[int], slot: int, levels: int) -> list[torch.Tensor]:
    """Hidden states of a draft, one token a step, through a growing list of keys and values; float32.

    The prompt pass takes the teacher's features up to ``slot``; each step is fed the text's next token and the
    state before. Written from the published network, without the trainer's code.
    """
    w = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    seen = torch.tensor([ids[: slot + 1]])
    aux = json.loads((folder / "config.json").read_text())["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    entering = teacher.model(seen, output_hidden_states=True).hidden_states
    features = torch.cat([entering[layer][0] for layer in aux], -1)
    heads, kv, size, eps = 4, 2, 8, teacher.config.rms_norm_eps

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean() + eps).sqrt() * w[name]

    def rotate(x: torch.Tensor, position: int) -> torch.Tensor:
        angle = position * teacher.config.rope_parameters["rope_theta"] ** -(torch.arange(0, size, 2) / size)
        a, b = x[:, : size // 2], x[:, size // 2 :]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    keys, values = [], []

    def layer(token: int, hidden: torch.Tensor, position: int) -> torch.Tensor:
        e = norm(teacher.model.embed_tokens.weight[token], "midlayer.input_layernorm.weight")
        x = torch.cat((e, norm(hidden, "midlayer.hidden_norm.weight")))
        q, k, v = (
            (w[f"midlayer.self_attn.{p}_proj.weight"] @ x).view(n, size)
            for p, n in (("q", heads), ("k", kv), ("v", kv))
        )
        keys.append(rotate(k, position))
        values.append(v)
        q, mixed = rotate(q, position), []
        for head in range(heads):
            group = head // (heads // kv)
            shares = torch.stack([q[head] @ k[group] for k in keys]).div(size**0.5).softmax(0)
            mixed.append(sum(share * v[group] for share, v in zip(shares, values, strict=True)))
        hidden = hidden + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(mixed)
        x = norm(hidden, "midlayer.post_attention_layernorm.weight")
        gate, up = (w[f"midlayer.mlp.{p}_proj.weight"] @ x for p in ("gate", "up"))
        return hidden + w["midlayer.mlp.down_proj.weight"] @ (F.silu(gate) * up)

    for j in range(slot + 1):
        hidden = layer(ids[j + 1], w["fc.weight"] @ features[j], j)
    found = [hidden]
    for level in range(1, levels):
        found.append(layer(ids[slot + 1 + level], found[-1], slot + level))
    return found


def test_the_training_time_test_is_a_cached_draft(folder: Path, tmp_path: Path, exact: None) -> None:
    model, texts = FrozenTeacher.open(folder / "noise"), Distilled.open(folder / "unread")
    torch.manual_seed(1)
    drafter = begin("eagle3", kind_named("eagle3").complete({"levels": 3}), model, None)
    for parameter in drafter.parameters():
        parameter.data = (parameter.data + 0.2 * torch.randn_like(parameter)).bfloat16().float()  # as it is stored
    drafter.save(tmp_path)
    text_B = np.array([4, 11, 6])
    batch = States(model, texts, drafter.aux).batch(text_B)
    # The states are handed over in bfloat16; the oracle takes its own from the teacher.
    theirs = transformers_teacher(folder / "noise")
    exact_states = theirs.model(batch.ids_BS, output_hidden_states=True).hidden_states
    object.__setattr__(batch, "aux_BSF", torch.cat([exact_states[layer] for layer in drafter.aux], -1))
    with torch.no_grad():
        got = torch.stack(drafter.hiddens(batch), 1)
    at, contexts = 0, batch.there_BC.sum(1).tolist()
    for text, count in zip(text_B, contexts, strict=True):
        ids = texts.tokens_of(text).tolist()
        for t in range(PROMPT - 1, PROMPT - 1 + count):
            levels = min(3, len(ids) - t - 1)  # the last levels of a text have no token to be fed
            wanted = torch.stack(naive_eagle3(tmp_path, theirs, ids, t, levels))
            torch.testing.assert_close(got[at, :levels], wanted, rtol=1e-4, atol=1e-4)  # float32, other order of sums
            at += 1
    assert at == len(got)


def test_fasteagle_is_a_stack_of_llama_layers(folder: Path, tmp_path: Path, exact: None) -> None:
    """Against transformers' own decoder: the same weights in a Llama that is given the fused inputs."""
    model, texts = FrozenTeacher.open(folder / "noise"), Distilled.open(folder / "unread")
    torch.manual_seed(2)
    drafter = begin("fasteagle", kind_named("fasteagle").complete({"levels": 3}), model, None)
    drafter.scale = 2.0  # exact in bfloat16
    for parameter in drafter.parameters():
        parameter.data = (parameter.data + 0.2 * torch.randn_like(parameter)).bfloat16().float()  # as it is stored
    drafter.save(tmp_path)
    weights = {name: tensor.float() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    ids = torch.from_numpy(texts.tokens_of(5).astype(np.int64))[None]
    batch = States(model, texts, drafter.aux).batch(np.array([5]))
    theirs = transformers_teacher(folder / "noise")
    oracle = LlamaForCausalLM(LlamaConfig(**{**theirs.config.to_dict(), "num_hidden_layers": 3})).eval()
    oracle.model.load_state_dict(
        {**{k: v for k, v in weights.items() if k.startswith(("layers", "norm"))},
         "embed_tokens.weight": model.embedding_VH}
    )  # fmt: skip
    fused = batch.aux_BSF[0].float() @ weights["fc.weight"].T
    inputs = torch.cat((fused[:-1], model.embedding_VH[ids[0, 1:]]), -1) @ weights["proj.weight"].T
    states_of = oracle.model(inputs_embeds=inputs[None], output_hidden_states=True)
    # transformers norms the last state only; the others enter the next layer as they are.
    levels = [oracle.model.norm(h) for h in states_of.hidden_states[1:-1]] + [states_of.last_hidden_state]
    wanted = torch.stack([level[0, PROMPT - 1 : ids.shape[1] - 2] for level in levels], 1)
    with torch.no_grad():
        torch.testing.assert_close(drafter.features(batch), wanted, rtol=1e-4, atol=1e-4)  # other order of sums


NARROW = {"layer_sizes": [1, 1, 20]}


@pytest.mark.parametrize(
    ("kind", "options"),
    [("eagle3", {}), ("fasteagle", {}), pytest.param("fasteagle", NARROW, id="narrow")],
)
def test_the_compiler_drafts_what_was_trained(
    folder: Path, tmp_path: Path, exact: None, kind: str, options: dict[str, int]
) -> None:
    """The file that is written, opened and run over a cache by the compiler's own modules, slot by slot."""
    model, texts = FrozenTeacher.open(folder / "noise"), Distilled.open(folder / "unread")
    torch.manual_seed(3)
    drafter = begin(kind, kind_named(kind).complete({"levels": 3, **options}), model, None)
    for parameter in drafter.parameters():
        parameter.data = (parameter.data + 0.2 * torch.randn_like(parameter)).bfloat16().float()
    drafter.scale = 2.0  # of FastEagle; exact in bfloat16
    drafter.save(tmp_path)
    opened = open_drafter(tmp_path, Checkpoint.open(folder / "noise")).checkpoint
    module = (compiled_eagle3.Eagle3 if kind == "eagle3" else compiled_fasteagle.FastEagle)(opened.config, 64)
    weights = {name: opened.weight(name).float() for name in opened.names()}
    module.load_state_dict({**weights, **opened.buffers(64)})
    shared = SimpleNamespace(embedded=model.decoder.embedded, scores=model.decoder.head)
    batch = States(model, texts, drafter.aux).batch(np.array([5]))
    ids, count = batch.ids_BS[0], int(batch.there_BC.sum())
    with torch.no_grad():
        wanted = drafter.features(batch)
        for context in range(count):
            t = PROMPT - 1 + context
            place = torch.tensor([t + 1])  # all slots so far, in one extending pass
            block = module.config.block
            caches = [torch.zeros(block.kv_heads * 64, 8) for _ in range(2 * block.layers)]
            features = batch.aux_BSF[0, : t + 1].float()
            waiting = Waiting(ids[1 : t + 2], features, place, place)
            written = module.extend(waiting, caches, shared, "eager")
            if kind == "fasteagle":
                got = written.normed_IH
            else:
                found, branch = [written.root], None
                for level in range(1, min(3, len(ids) - t - 1)):
                    seen = torch.zeros(1, level, dtype=torch.bool)
                    token, before = ids[t + 1 + level][None], found[-1].fed_back_RH
                    hidden, branch = module.level(token, before, level, branch, seen, written, shared)
                    found.append(hidden)
                got = torch.cat([hidden.normed_RH for hidden in found])
            torch.testing.assert_close(got, wanted[context, : len(got)], rtol=1e-4, atol=1e-4)  # other order of sums


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_deterministic_and_can_be_lengthened(folder: Path, tmp_path: Path, kind: str) -> None:
    file = "medusa_lm_head.safetensors" if kind == "medusa" else "model.safetensors"
    settings = {"batch": 16, "levels": 2, "seed": 4}
    folders = [folder / "counting", folder / "counted"]
    for name in ("a", "b"):
        train(kind, *folders, tmp_path / name, steps=4, **settings)
    assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    train(kind, *folders, tmp_path / "b", steps=5, **settings)
    state = torch.load(tmp_path / "b" / "checkpoint.pt", weights_only=True)
    assert state["step"] == 5 and state["seconds"] > 0
    with pytest.raises(RequestError, match=r"other settings \(batch"):
        train(kind, *folders, tmp_path / "b", steps=6, **{**settings, "batch": 8})
    (tmp_path / "b" / "checkpoint.pt").write_bytes(b"5")
    with pytest.raises(RequestError, match=r"checkpoint\.pt: damaged"):
        train(kind, *folders, tmp_path / "b", steps=6, **settings)


def test_a_training_that_began_with_a_drafter_goes_on_with_it(folder: Path, tmp_path: Path) -> None:
    """Without it the draft vocabulary would be counted anew, under the rows of another."""
    settings, folders = {"batch": 16, "levels": 1, "draft_vocab": 9}, [folder / "counting", folder / "counted"]
    train("eagle3", *folders, tmp_path / "one", steps=1, **settings)
    train("eagle3", *folders, tmp_path / "on", steps=1, **settings, start=tmp_path / "one")
    with pytest.raises(RequestError, match=r"other settings \(start\)"):
        train("eagle3", *folders, tmp_path / "on", steps=2, **settings)


@pytest.mark.parametrize("flag", ["--minutes", "--learning-rate"])
@pytest.mark.parametrize("number", ["0", "-1", "nan", "inf"])
def test_times_and_rates_are_above_0(flag: str, number: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["medusa", "demo", "texts", "--out", "out", f"{flag}={number}"])
    assert f"{flag}: invalid number above 0 value: '{number}'" in capsys.readouterr().err


def test_a_training_that_diverges_ends(folder: Path, tmp_path: Path) -> None:
    """It would write a drafter of no numbers."""
    asked = {"steps": 9, "batch": 16, "levels": 2, "learning_rate": 1e30}
    with pytest.raises(RequestError, match=r"step \d: the gradient is not finite; .* lower --learning-rate .*1e\+30"):
        train("eagle3", folder / "counting", folder / "counted", tmp_path, **asked)
    assert [path.name for path in tmp_path.glob("*.*")] == ["log.jsonl"]


def test_a_resumed_step_equals_an_uninterrupted_one(folder: Path, tmp_path: Path) -> None:
    # Saved when it is logged: at the first record after so many steps.
    settings = {"batch": 16, "levels": 2, "save_every": 3, "log_every": 4}
    folders = [folder / "counting", folder / "counted"]

    class Stopped(Exception):
        pass

    def stop(*args: object) -> None:
        raise Stopped

    train("eagle3", *folders, tmp_path / "whole", steps=8, **settings)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr("draftwood.tools.training.trainer.accuracy", stop)  # called right after the first checkpoint
        train("eagle3", *folders, tmp_path / "cut", steps=8, **settings)
    assert torch.load(tmp_path / "cut" / "checkpoint.pt", weights_only=True)["step"] == 4
    train("eagle3", *folders, tmp_path / "cut", steps=8, **settings)
    whole, cut = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    records = [json.loads(line) for line in (tmp_path / "cut" / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "of" in record] == [1, 4, 5, 8]  # the first of each start, too


def test_slow_steps_are_saved_by_the_clock(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(Exception):
        pass

    def stop(*args: object) -> None:
        raise Stopped

    monkeypatch.setattr("draftwood.tools.training.trainer._UNSAVED_S", 0)
    monkeypatch.setattr("draftwood.tools.training.trainer.accuracy", stop)
    with pytest.raises(Stopped):
        train("medusa", folder / "counting", folder / "counted", tmp_path, steps=9, batch=16, levels=2)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 1


def test_a_time_ends_a_training_and_a_longer_one_goes_on(folder: Path, tmp_path: Path) -> None:
    folders = [folder / "counting", folder / "counted", tmp_path / "out"]
    steps = []
    for minutes in (0.002, 0.004):
        train("medusa", *folders, minutes=minutes, log_every=1000, levels=2, batch=16)
        records = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
        last = [record for record in records if "minutes" in record][-1]
        assert last["seconds"] >= 60 * minutes - 0.1 and last["minutes"] == minutes
        steps.append(last["step"])
    assert 0 < steps[0] < steps[1]
    with pytest.raises(RequestError, match="positive"):
        train("medusa", *folders, minutes=-1.0)


WORKER = """
import sys
from pathlib import Path
import torch
from draftwood.compiler.training import precision
precision.compute_dtype = lambda device: torch.float32
from draftwood.tools.training.team import Team
from draftwood.tools.training.trainer import ranks_of, train

with Team.join(torch.device("cpu")) as team:
    assert team.size == 2
    train("eagle3", Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), steps=4, batch=16, log_every=4,
          levels=2, team=team)
"""


def test_two_processes_train_what_one_does(folder: Path, tmp_path: Path, exact: None) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    folders = [folder / "noise", folder / "unread"]
    # As torchrun sets them.
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, *map(str, (*folders, tmp_path / "two"))], cwd=tmp_path,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    errors = [worker.communicate(timeout=300)[1].decode() for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], errors
    train("eagle3", *folders, tmp_path / "one", steps=4, batch=16, log_every=4, levels=2)
    torch.manual_seed(0)
    options = kind_named("eagle3").complete({"levels": 2})
    begun = begin("eagle3", options, FrozenTeacher.open(folders[0]), None).state_dict()
    one, two = (torch.load(tmp_path / n / "checkpoint.pt", weights_only=True)["drafter"] for n in ("one", "two"))
    for name, start in begun.items():
        # Muon orthogonalises in bfloat16; half of the texts would change the way by far more.
        assert (two[name] - one[name]).norm() <= 0.05 * (one[name] - start).norm(), name
    logs = [json.loads((tmp_path / n / "log.jsonl").read_text().splitlines()[2]) for n in ("one", "two")]
    assert logs[0]["nats"] == pytest.approx(logs[1]["nats"], abs=0.01)


def test_draft_vocabulary_is_counted_on_the_teachers_words(folder: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    tokens = [[20, 21, 22, *rng.integers(2, 9, 10).tolist(), *([9] if i % 10 == 0 else [])] for i in range(400)]
    texts = Distilled.open(save_texts(tmp_path / "texts", folder / "counting", tokens))
    everything = np.arange(400)
    assert most_frequent(texts, everything, 7, VOCABULARY).tolist() == list(range(2, 9))  # no prompt token
    assert most_frequent(texts, everything, 8, VOCABULARY).tolist() == list(range(2, 10))
    assert coverage(texts, everything, np.arange(2, 9)) == pytest.approx(4000 / 4040)
    with pytest.raises(RequestError, match="24"):
        most_frequent(texts, everything, 25, VOCABULARY)


@pytest.mark.parametrize("kind", ["eagle3", "fasteagle"])
def test_a_subset_is_written_in_the_published_layout(folder: Path, tmp_path: Path, kind: str) -> None:
    settings = {"levels": 2, "steps": 3, "batch": 16, "draft_vocab": 9}
    train(kind, folder / "counting", folder / "random", tmp_path, **settings)
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    known = tensors["t2d"].nonzero()[:, 0]
    assert config["draft_vocab_size"] == 9 and config["vocab_size"] == VOCABULARY
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert (torch.arange(9) + tensors["d2t"]).tolist() == known.tolist()
    model, texts = FrozenTeacher.open(folder / "counting"), Distilled.open(folder / "random")
    assert known.tolist() == most_frequent(texts, (~texts.held_out()).nonzero()[0], 9, VOCABULARY).tolist()
    opened = open_drafter(tmp_path, Checkpoint.open(folder / "counting")).checkpoint
    assert torch.equal(opened.ids, known) and opened.config.tied_head
    loaded = load(tmp_path, model, levels=2)
    batch = States(model, texts, loaded.aux).batch(np.arange(8))
    ranks, targets = loaded.ranks(batch, 16, loaded.frozen(batch)), batch.targets(2)
    # Nine candidates at most, and a token outside of them is never found.
    there = torch.isin(targets, known)
    assert ranks[there].max() < 9 and (ranks[~there] == 16).all()
    # Such a token teaches nothing.
    features, weight = loaded.frozen(batch).requires_grad_(), torch.ones_like(targets, dtype=torch.float32)
    (gradient,) = torch.autograd.grad(loaded.distribution_loss(batch, features, weight)[0], features)
    assert torch.equal(gradient.abs().sum(-1) > 0, there)


def layer_shapes(at: str, width: int) -> dict[str, tuple[int, ...]]:
    norms = ("input_layernorm", "post_attention_layernorm") + (("hidden_norm",) if width > HIDDEN else ())
    shapes = {f"{at}.{name}.weight": (HIDDEN,) for name in norms}
    shapes |= {f"{at}.self_attn.{p}_proj.weight": (n, width) for p, n in (("q", 32), ("k", 16), ("v", 16))}
    shapes |= {f"{at}.mlp.{p}_proj.weight": (48, HIDDEN) for p in ("gate", "up")}
    return {**shapes, f"{at}.self_attn.o_proj.weight": (HIDDEN, 32), f"{at}.mlp.down_proj.weight": (HIDDEN, 48)}


def test_files_are_the_published_ones(folder: Path, tmp_path: Path) -> None:
    settings = {"steps": 2, "batch": 16, "levels": 2}
    folders = [folder / "counting", folder / "counted"]
    for kind in KINDS:
        train(kind, *folders, tmp_path / kind, **settings)
    teacher = Checkpoint.open(folders[0])
    opened = MedusaCheckpoint.open(tmp_path / "medusa", teacher.config)
    assert (*astuple(opened.config)[:3], opened.dtype) == (2, 1, True, torch.bfloat16)
    eagle = load_file(tmp_path / "eagle3" / "model.safetensors")
    both = {"fc.weight": (HIDDEN, 3 * HIDDEN), "norm.weight": (HIDDEN,)}
    assert {n: tuple(t.shape) for n, t in eagle.items()} == both | layer_shapes("midlayer", 2 * HIDDEN)
    fast = load_file(tmp_path / "fasteagle" / "model.safetensors")
    layers = layer_shapes("layers.0", HIDDEN) | layer_shapes("layers.1", HIDDEN)
    assert {n: tuple(t.shape) for n, t in fast.items()} == both | layers | {"proj.weight": (HIDDEN, 2 * HIDDEN)}
    for opened in (
        open_drafter(tmp_path / "eagle3", teacher).checkpoint,
        open_drafter(tmp_path / "fasteagle", teacher).checkpoint,
    ):
        assert (opened.config.aux_layers, opened.dtype, opened.config.mapped) == ((1, 3, 4), torch.bfloat16, False)


def test_position_convention(folder: Path, tmp_path: Path) -> None:
    """Medusa heads that are exact by construction: every rank is 0."""
    one_hot = torch.eye(VOCABULARY, HIDDEN)
    heads = {f"{i}.0.weight": one_hot.roll(2 + i, 0).bfloat16().contiguous() for i in range(3)}
    save_file(heads, tmp_path / "medusa_lm_head.safetensors")
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 3, "medusa_num_layers": 0}')
    model, texts = FrozenTeacher.open(folder / "counting"), Distilled.open(folder / "counted")
    drafter = load(tmp_path, model)
    text_W = np.flatnonzero(texts.held_out() & (texts.index_W["temperature"] == 0))
    found = [
        (batch.targets(3), ranks_NI) for _, batch, ranks_NI in ranks_of(drafter, States(model, texts, ()), text_W, 16)
    ]
    known = torch.cat([targets_NI != NONE for targets_NI, _ in found])
    ranks = torch.cat([torch.as_tensor(ranks_NI) for _, ranks_NI in found])
    assert known.any() and (ranks[known] == 0).all()


def test_a_narrow_layer_begins_as_part_of_the_teachers_last() -> None:
    """The parts cut away have no effect here: a query head, a key head, and units that write nothing."""
    torch.manual_seed(4)
    wide = Sizes(16, 12, 4, 2, 8, 1e-5, 1e4)
    narrow = replace(wide, intermediate_size=5, num_attention_heads=1, num_key_value_heads=1)
    whole, part = Block(wide), Block(narrow)
    whole.self_attn.o_proj.weight.data[:, 8:] = 0  # all query heads but the first
    kept = torch.tensor([1, 3, 4, 8, 11])
    silent = torch.ones(12).index_fill(0, kept, 0).bool()
    whole.mlp.down_proj.weight.data[:, silent] = 0
    part.load_state_dict(narrowed(whole.state_dict(), wide, narrow))
    x_BSH = torch.randn(2, 7, 16)
    torch.testing.assert_close(part(x_BSH), whole(x_BSH))  # the same sums without their zeros


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_sizes": [6, 2, 48]}, "query heads is 6; expected 1 to 4"),
        ({"layer_sizes": [4, 3, 48]}, "key/value heads is 3; expected 1 to 2"),
        ({"layer_sizes": [3, 2, 48]}, "3 query heads; expected a multiple of the 2 key/value heads"),
        ({"layer_sizes": [4, 2, 0]}, "MLP width is 0; expected 1 to 48"),
    ],
)
def test_sizes_of_a_layer_that_cannot_be_begun_are_refused(folder: Path, options: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        begin(
            "fasteagle",
            kind_named("fasteagle").complete(options),
            FrozenTeacher.open(folder / "noise"),
            None,
        )


def run(*words: object) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    command.add_arguments(parser)
    return command.main(parser.parse_args([str(word) for word in words]))


def test_command(folder: Path, tmp_path: Path, capsys) -> None:
    common = [folder / "counting", folder / "counted", "--out", tmp_path / "out"]
    assert run("medusa", *common, "--steps", 2, "--levels", 2, "--layers", 2) == 0
    assert "held-out" in capsys.readouterr().out
    assert (tmp_path / "out" / "medusa_lm_head.safetensors").is_file()
    with pytest.raises(RequestError, match="not an option of medusa"):
        run("medusa", *common, "--draft-vocab", 9)
    with pytest.raises(RequestError, match="layers is 0; expected 1 or more"):
        run("medusa", *common, "--layers", 0)
    with pytest.raises(RequestError, match="no such folder"):
        run("medusa", *common[:1], tmp_path / "nothing", "--out", tmp_path / "out")
    with pytest.raises(RequestError, match="positive"):
        run("medusa", *common, "--steps", 0)
    with pytest.raises(RequestError, match="run distill"):
        run("eagle3", *common[:1], tmp_path, "--out", tmp_path / "other")
    with pytest.raises(RequestError, match="another teacher"):
        run("eagle3", folder / "noise", *common[1:2], "--out", tmp_path / "other")


def test_what_is_no_drafter_is_refused(folder: Path, tmp_path: Path) -> None:
    model = FrozenTeacher.open(folder / "counting")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(tmp_path, model)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    save_file({"fc.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="vocab_size is None; expected a whole number"):
        load(tmp_path, model)
    (tmp_path / "config.json").write_text('{"architectures": ["FastEagleDrafter"]}')
    with pytest.raises(CheckpointError, match="model_type is None; expected 'fasteagle', a FastEagle drafter"):
        load(tmp_path, model)
