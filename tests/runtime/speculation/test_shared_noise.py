"""A draft graph's part of the noise: the rows of its positions, by the ids that it can propose."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from draftwood.errors import BundleError
from draftwood.manifest import TensorSignature
from draftwood.noise import gumbel_row, key_of
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.bundle.weights import read_header, read_ids
from draftwood.runtime.decoding import Decoding
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.options import Options
from draftwood.runtime.policy import FixedTree
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.runtime.speculation.shared_noise import SharedNoise

SPEC = TensorSignature(name="noise", dtype="float32", shape=(3, 4))
IDS = np.array([5, 70, 71, 299])


def noise_of(ids: Any, vocabulary: int = 300) -> SharedNoise:
    manifest = SimpleNamespace(dims=SimpleNamespace(vocabulary=vocabulary))
    return SharedNoise(SimpleNamespace(folder="bundle", manifest=manifest, draft_ids=ids))


def test_a_level_has_the_noise_of_its_position_by_the_teachers_ids() -> None:
    found = noise_of(IDS).rows(SPEC, Sampling(temperature=0.5, seed=7), 20)
    for level in range(3):
        wanted = 0.5 * gumbel_row(300, key_of(7, 20 + level))[IDS]
        np.testing.assert_allclose(found[level], wanted, rtol=1e-6)  # a few roundings of fp32


@pytest.mark.parametrize("ids", [None, IDS[:3]])
def test_noise_of_another_width_is_refused(ids: Any) -> None:
    with pytest.raises(BundleError, match="takes noise of 4 tokens; expected"):
        noise_of(ids).shape(SPEC)


def test_ids_are_read_from_the_weights(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"other": np.zeros(3, np.float32), "teacher_ids": IDS}, path)
    tensors = read_header(path)
    assert read_ids(path, tensors["teacher_ids"]).tolist() == IDS.tolist()
    with pytest.raises(BundleError, match="expected 12 of token ids"):
        read_ids(path, tensors["other"])


@pytest.mark.parametrize("kind", ["fasteagle", "eagle3"])
def test_shared_noise_takes_fewer_steps(tiny_draft_bundles: dict[str, Path], prompt: list[int], kind: str) -> None:
    """Texts of one bundle are equal, its draft graphs given the noise or zeros."""
    steps = {}
    for shared in (True, False):
        engine = CpuEngine(Bundle.open(tiny_draft_bundles[kind]))
        if not shared:
            rows = engine.drafting.noise.rows
            engine.drafting.noise.rows = lambda spec, sampling, at, *given, rows=rows: rows(spec, Sampling(), at)
        policy = FixedTree(engine.bundle, "planned-kv128")
        texts = []
        for seed in range(8):
            options = Options(max_new_tokens=40, ignore_eos=True, sampling=Sampling(temperature=1.0, seed=seed))
            texts.append(Decoding(engine, prompt, options, policy).run())
        steps[shared] = sum(text.steps for text in texts), [text.token_ids for text in texts]
    assert steps[True][1] == steps[False][1] and steps[True][0] < steps[False][0]
