"""Every family as a GE graph, interpreted in fp32: a prompt and two trees after it, against transformers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftwood.compiler.ge.graph import Graph
from draftwood.compiler.ge.interpreter import Interpreter
from draftwood.compiler.ge.lowering import lower_to_ge
from draftwood.compiler.ge.torchair_bridge import ge_ir
from draftwood.compiler.ge.weights import plan_weights
from draftwood.compiler.steps.step import StepSizes
from draftwood.compiler.steps.tracing import trace
from draftwood.compiler.steps.verify import verify_step
from draftwood.trees import Topology, TreeBuffers, tensorize

# Two fp32 computations of logits of magnitude 5 in another order; measured 8e-6.
FP32 = 1e-4
SLOTS, PATH_ROWS = 128, 4
CHAIN = tensorize(Topology.chain(6))
TREE = tensorize(Topology.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)]))
FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 32},
    "Qwen3Moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "Mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "Mistral": {"sliding_window": None},
    "Glm4": {"head_dim": 32, "pad_token_id": 0},
    "PanguEmbedded": {},
}


class Interpreted:
    """Verify steps of seven rows, computed by the NPU's graph one after another."""

    def __init__(self, decoder: torch.nn.Module) -> None:
        step = verify_step(decoder, StepSizes(branch_rows=7, path_rows=PATH_ROWS, dtype="float32"), 7, SLOTS)
        weights = dict(decoder.state_dict())
        index = plan_weights({n: tuple(w.shape) for n, w in weights.items()}, torch.float32, "w", {}, {})
        lowered = ge_ir().ModelDef.FromString(lower_to_ge(step, trace(step), index))
        self.names = [spec.name for spec in step.signature.inputs]
        self.graph = Interpreter(Graph.of(lowered.graph[0]), weights)
        shapes = [spec.shape for spec in step.signature.inputs]
        *_, self.branch = (torch.zeros(s) for n, s in zip(self.names, shapes, strict=True) if n == "branch")
        self.caches = [torch.zeros(s) for n, s in zip(self.names, shapes, strict=True) if "cache" in n]

    def run(self, tokens: list[int], tree: TreeBuffers, committed: int, accepted: tuple[int, ...]) -> Tensor:
        """Logits [7, V]; ``accepted`` rows of the step before are put in place first."""
        path = torch.tensor((*accepted, *[0] * PATH_ROWS)[:PATH_ROWS])
        depths, visible = torch.tensor(tree.depths), torch.tensor(tree.mask)
        numbers = torch.tensor([committed]), torch.tensor([len(accepted)])
        values = [torch.tensor(tokens), depths, visible, *numbers, path, self.branch, *self.caches]
        logits, *_, self.branch = self.graph.run(dict(zip(self.names, values, strict=True)))
        return logits


# Mixtures, a block of other norms, and biases. The CPU's graphs of the other families are compared in every run.
QUICK = ("Qwen3Moe", "Mixtral", "Glm4", "PanguEmbedded")


@pytest.mark.parametrize(
    "family", [*QUICK, *(pytest.param(one, marks=pytest.mark.slow) for one in FAMILIES if one not in QUICK)]
)
def test_rows_of_trees_are_those_of_transformers(
    family: str, tmp_path: Path, save_llama: Callable, save_pangu: Callable, load_decoder: Callable
) -> None:
    fields = FAMILIES[family]
    model = save_pangu(tmp_path) if family == "PanguEmbedded" else save_llama(tmp_path, family=family, **fields)
    graph = Interpreted(load_decoder(tmp_path, SLOTS))
    text, accepted, compared = [], (), 0
    for tree, path in ((CHAIN, tuple(range(7))), (TREE, (0, 2, 5)), (TREE, (0, 1, 4))):
        tokens = torch.randint(0, 101, (7,), generator=torch.Generator().manual_seed(compared)).tolist()
        logits_TV = graph.run(tokens, tree, len(text), accepted)
        for row, ancestors in enumerate(tree.paths):
            seen = [*text, *(tokens[at] for at in ancestors[: tree.depths[row] + 1])]
            with torch.no_grad():
                expected = model(torch.tensor([seen])).logits[0, -1]
            torch.testing.assert_close(logits_TV[row], expected, rtol=0, atol=FP32)
            compared += 1
        text += [tokens[row] for row in path]
        accepted = () if tree is CHAIN else path
    assert compared == 21
