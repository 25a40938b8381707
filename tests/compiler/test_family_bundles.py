"""Every family of teachers as a bundle: twelve greedy texts are transformers' own, with a tree and without."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.options import Options
from draftwood.runtime.policy import FixedTree, widest_gear
from draftwood.runtime.sharing import advance
from draftwood.trees import Topology

TREES = (("plain", Topology.plain()), ("ragged", Topology.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)])))
TEXTS, LENGTH, NEW = 12, 9, 24
# Above the rounding of two fp32 implementations of logits of magnitude 10; measured 1e-5.
MARGIN = 1e-4

MIXTURE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
SLOW = pytest.mark.slow
FAMILIES = [
    pytest.param(("Llama", {"head_dim": 24}), marks=SLOW, id="llama"),
    pytest.param(("Qwen2", {}), marks=SLOW, id="qwen2"),
    pytest.param(("Qwen3", {"head_dim": 24}), marks=SLOW, id="qwen3"),
    pytest.param(("Qwen3Moe", {**MIXTURE, "norm_topk_prob": True, "mlp_only_layers": [0]}), id="qwen3-moe"),
    pytest.param(("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}), marks=SLOW, id="mixtral"),
    pytest.param(("Mistral", {"sliding_window": 128}), marks=SLOW, id="mistral"),
    pytest.param(("Glm4", {"head_dim": 24, "pad_token_id": 0}), marks=SLOW, id="glm4"),
    pytest.param(("PanguEmbedded", {}), marks=SLOW, id="pangu"),
]


@pytest.fixture(scope="module")
def family(
    request: Any,
    tmp_path_factory: pytest.TempPathFactory,
    save_llama: Callable,
    save_pangu: Callable,
    save_medusa: Callable,
) -> tuple[Bundle, Any]:
    """A bundle with Medusa heads, and transformers' model of the same weights.

    Its output matrix is nearly its embedding, so that its text repeats and random heads hit.
    """
    name, fields = request.param
    source = tmp_path_factory.mktemp(name)
    model = save_pangu(source) if name == "PanguEmbedded" else save_llama(source, family=name, **fields)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        model.lm_head.weight.copy_(embedding + 0.1 * torch.randn(embedding.shape))
    if name == "PanguEmbedded":
        save_file({n: tensor.contiguous() for n, tensor in model.state_dict().items()}, source / "model.safetensors")
    else:
        model.save_pretrained(source)
    (source / "heads").mkdir()
    save_medusa(source / "heads", heads=2, tied=True)
    asked = BuildRequest(model=source, drafter=source / "heads", trees=TREES, slots=(128,), prefill_rows=(), texts=2)
    build(asked, source / "bundle")
    return Bundle.open(source / "bundle"), model


def greedy(model: Any, prompts: torch.Tensor) -> tuple[list[tuple[int, ...]], float]:
    """transformers' texts, and the smallest distance between a best and a second-best logit."""
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(prompts, max_new_tokens=NEW, output_logits=True, return_dict_in_generate=True, **settings)
    best = torch.stack(out.logits).topk(2).values
    return [tuple(text) for text in out.sequences[:, LENGTH:].tolist()], float((best[..., 0] - best[..., 1]).min())


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_texts_are_those_of_transformers(family: tuple[Bundle, Any]) -> None:
    bundle, model = family
    prompts = torch.randint(0, 101, (TEXTS, LENGTH), generator=torch.Generator().manual_seed(0))
    expected, margin = greedy(model, prompts)
    assert margin > MARGIN and len(set(expected)) == TEXTS
    engine, options = CpuEngine(bundle), Options(max_new_tokens=NEW, ignore_eos=True)
    steps = {}
    for policy in (FixedTree(bundle), FixedTree(bundle, widest_gear(bundle))):
        results = [Decoding(engine, prompt, options, policy).run() for prompt in prompts.tolist()]
        assert [result.token_ids for result in results] == expected
        steps[policy] = sum(result.steps for result in results)
        pair = [Decoding(engine, prompt, options, policy) for prompt in prompts[:2].tolist()]
        for text in pair:
            text.start()
        while not all(text.finished for text in pair):
            advance(engine, [text for text in pair if not text.finished])
        assert [tuple(text.tokens) for text in pair] == expected[:2]
    plain, tree = steps.values()
    assert plain == TEXTS * (NEW - 1) and tree < 0.9 * plain  # or equality would prove little
