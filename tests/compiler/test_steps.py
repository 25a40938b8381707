"""Steps: their modules keep the promises of their signatures, before and after tracing."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftwood.compiler.drafters.medusa.network import MedusaHeads, medusa_step
from draftwood.compiler.steps.any_size import cpu_step
from draftwood.compiler.steps.prefill import prefill_step
from draftwood.compiler.steps.step import Step, StepSizes
from draftwood.compiler.steps.tracing import trace
from draftwood.compiler.steps.verify import verify_step
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.trees import Topology, tensorize

# The same fp32 operators on the same values; a matmul of one row may add in another order than one of eight.
# Measured: 7e-7, and 0 for the trace.
TRACED = 1e-5
SIZES = StepSizes(branch_rows=7, path_rows=4)
TREE = tensorize(Topology.from_paths([(0,), (1,), (0, 0), (1, 0)]))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory, save_llama: Callable, load_decoder: Callable) -> Decoder:
    folder = tmp_path_factory.mktemp("teacher")
    save_llama(folder, tie_word_embeddings=True)
    return load_decoder(folder, 128)


@pytest.fixture(scope="module")
def steps(decoder: Decoder) -> dict[str, Step]:
    heads = MedusaHeads(64, 101, 3, 1, tied=True).requires_grad_(False)
    made = (
        verify_step(decoder, SIZES, 5, 128),
        verify_step(decoder, SIZES, 7, 128),
        verify_step(decoder, SIZES, 1, 128),
        prefill_step(decoder, SIZES, 8, 128),
        cpu_step(decoder),
        medusa_step(heads, decoder, 6),
    )
    return {step.signature.name: step for step in made}


NAMES = ("verify-t5-kv128", "verify-t7-kv128", "decode-kv128", "prefill-t8-kv128", "step", "draft")


def warm(step: Step) -> list[Tensor]:
    """Inputs of a warm step of the ragged tree: 20 committed slots, the last two of them still to be moved."""
    torch.manual_seed(3)
    given = {
        "depths": torch.tensor(TREE.depths),
        "visible": torch.tensor(TREE.mask),
        "committed": torch.tensor([20]),
        "accepted": torch.tensor([2]),
        "path": torch.tensor([1, 4, 0, 0]),
        "last": torch.tensor([6]),
    }
    made = zip(step.signature.inputs, step.examples(), strict=True)
    inputs = {s.name: torch.randn(t.shape) if t.is_floating_point() else t for s, t in made}
    inputs["tokens"] = torch.randint(0, 101, inputs["tokens"].shape)
    return [given.get(name, value) for name, value in inputs.items()]


def test_names_of_the_steps(steps: dict[str, Step]) -> None:
    assert tuple(steps) == NAMES
    assert [step.signature.kind for step in steps.values()] == [
        "verify", "verify", "decode", "prefill", "step", "draft",
    ]  # fmt: skip
    assert [(step.signature.rows, step.signature.slots) for step in steps.values()] == [
        (5, 128), (7, 128), (1, 128), (8, 128), (0, 0), (1, 0),
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_as_declared(steps: dict[str, Step], name: str) -> None:
    step = steps[name]
    outputs = step.module(*step.examples())
    assert len(outputs) == len(step.signature.outputs)
    for output, spec in zip(outputs, step.signature.outputs, strict=True):
        sizes = [step.dynamic[size] if isinstance(size, str) else size for size in spec.shape]
        assert list(output.shape) == sizes and str(output.dtype) == f"torch.{spec.dtype}", spec.name


@pytest.mark.parametrize("name", NAMES[:5])
def test_every_cache_is_an_aliased_pair(steps: dict[str, Step], name: str) -> None:
    signature = steps[name].signature
    caches = ["key_cache.0", "value_cache.0", "key_cache.1", "value_cache.1"]
    assert [spec.name for spec in signature.inputs][-4:] == caches
    assert [spec.name for spec in signature.outputs][-4:] == [f"{cache}.out" for cache in caches]
    assert signature.aliases == {f"{cache}.out": cache for cache in caches}
    shapes = {spec.name: spec.shape for spec in (*signature.inputs, *signature.outputs)}
    assert all(shapes[output] == shapes[given] for output, given in signature.aliases.items())


def test_run_time_sizes_are_distinct_and_never_one(steps: dict[str, Step]) -> None:
    sizes = steps["step"].dynamic
    named = {s for spec in steps["step"].signature.inputs for s in spec.shape if isinstance(s, str)}
    assert named == sizes.keys() and len(set(sizes.values())) == len(sizes)
    assert min(sizes.values()) > 1
    assert not any(steps[name].dynamic for name in NAMES if name != "step")


@pytest.mark.parametrize("name", NAMES)
def test_every_weight_has_its_name_in_the_bundle(steps: dict[str, Step], decoder: Decoder, name: str) -> None:
    step = steps[name]
    stored = decoder.state_dict() | step.module.state_dict()
    for parameter, tensor in step.module.state_dict().items():
        ours = step.weight_name(parameter)
        assert ours is not None and (ours in decoder.state_dict() or ours.startswith("heads."))
        if ours in decoder.state_dict():
            assert stored[ours].data_ptr() == tensor.data_ptr()
    assert step.weight_name("lifted_tensor_0") is None


def test_a_small_tree_leaves_a_full_branch(steps: dict[str, Step]) -> None:
    # All graphs of a bundle take each other's branch, so each gives the widest one's rows.
    step = steps["verify-t5-kv128"]
    inputs = warm(step)
    branch = step.module(*inputs)[3]
    assert branch.shape == (2, 2, 7, 2, 16)
    assert branch[:, :, :5].abs().sum((0, 1, 3, 4)).all() and not branch[:, :, 5:].any()


def test_prefill_is_causal_verification(steps: dict[str, Step], decoder: Decoder) -> None:
    step = steps["prefill-t8-kv128"]
    inputs = dict(zip((spec.name for spec in step.signature.inputs), warm(step), strict=True))
    caches = [inputs[name] for name in steps["step"].signature.caches]
    given = [inputs[name] for name in ("committed", "accepted", "path", "branch")]
    wanted = decoder.step(inputs["tokens"], torch.arange(8), torch.ones(8, 8, dtype=torch.bool).tril(), *given, caches)
    logits, choice, features, *written = step.module(*inputs.values())
    torch.testing.assert_close(logits[0], wanted.logits_RV[6], rtol=0, atol=TRACED)
    torch.testing.assert_close(features[0], wanted.features_RF[6], rtol=0, atol=TRACED)
    assert choice[0] == wanted.choice_R[6]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(written, wanted.caches, strict=True))


@pytest.mark.parametrize("name", ["verify-t5-kv128", "prefill-t8-kv128"])
def test_the_trace_runs_like_the_module(steps: dict[str, Step], name: str) -> None:
    step = steps[name]
    inputs = warm(step)
    traced = trace(step).module()(*inputs)
    for ours, theirs, spec in zip(traced, step.module(*inputs), step.signature.outputs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TRACED, msg=spec.name)


def test_the_trace_reads_a_cache_through_its_one_write(steps: dict[str, Step]) -> None:
    program = trace(steps["verify-t5-kv128"])
    scatter = torch.ops.npu.npu_scatter_nd_update.default
    caches = [node for node in program.graph.nodes if node.op == "placeholder" and math.prod(node.meta["val"].shape)]
    caches = [node for node in caches if tuple(node.meta["val"].shape) == (256, 16)]
    assert len(caches) == 4
    for cache in caches:
        (write,) = cache.users
        assert write.target is scatter and write.args[0] is cache
    assert sum(node.target is scatter for node in program.graph.nodes) == 4
