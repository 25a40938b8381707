"""A kind of drafter that exists in this file alone: registered, trained, built, opened and decoded with.

It turns the teacher's last hidden state by one matrix a level, and ranks with the teacher's output matrix.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from draftwood import manifest as m
from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.checkpoints.safetensors_file import sha256_of
from draftwood.compiler.checkpoints.tensors import open_tensors
from draftwood.compiler.device.operators import Op, matmul, ranking
from draftwood.compiler.device.table import DraftCost
from draftwood.compiler.drafters import registry
from draftwood.compiler.drafters.common.ranked import candidates, check_levels
from draftwood.compiler.drafters.kind import Kind, TrainingOption
from draftwood.compiler.drafters.model import DraftModel, OpenedDrafter
from draftwood.compiler.steps.step import Step, signed
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.decoder import Decoder, TeacherEnds
from draftwood.compiler.training.batch import Batch
from draftwood.compiler.training.student import Student, write_folder
from draftwood.compiler.training.teacher import FrozenTeacher
from draftwood.errors import BundleError, RequestError, TreeError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding, Result
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.options import Options
from draftwood.runtime.policy import FixedTree
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.tools.cli import main
from draftwood.tools.commands.profile import parse_drafter
from draftwood.tools.training.distill import distill
from draftwood.tools.training.students import load
from draftwood.trees import Topology
from draftwood.trees.spec import Budget

# N contexts, I levels, K candidates, H hidden size

TREES = (("plain", Topology.plain()), ("full", Topology.full((3, 2))))


def turns(levels: int, hidden: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(levels))


class LinearNetwork(nn.Module):
    def __init__(self, levels: int, hidden: int) -> None:
        super().__init__()
        self.turns = turns(levels, hidden)


class LinearStep(nn.Module):
    def __init__(self, network: LinearNetwork, decoder: Decoder, ranked: int) -> None:
        super().__init__()
        self.drafter, self.teacher, self.ranked = network, TeacherEnds(decoder, scores=True), ranked

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        logits_IV = self.teacher.scores(torch.cat([turn(features) for turn in self.drafter.turns]))
        top_IK, tokens_IK = logits_IV.topk(self.ranked, -1)
        return tokens_IK, top_IK - logits_IV.logsumexp(-1, keepdim=True)


@dataclass(frozen=True)
class LinearConfig:
    levels: int


@dataclass(frozen=True)
class LinearCost(DraftCost):
    kind: ClassVar[str] = "linear"
    levels: int

    @classmethod
    def of_sizes(cls, sizes, teacher):
        return cls(int(sizes[0])) if len(sizes) == 1 and sizes[0].isdecimal() else None

    @classmethod
    def of_config(cls, config):
        return cls(config.levels)

    def drafts(self, config: TeacherConfig, slots: int) -> Iterator[tuple[int, int, list[Op]]]:
        turned = matmul("turn", 1, config.hidden, config.hidden, count=self.levels)
        yield self.levels, 16, [turned, *ranking(self.levels, config.vocabulary)]


class LinearCheckpoint:
    def __init__(self, folder: Path) -> None:
        self.file = folder / "model.safetensors"
        self.entries, self.stored = open_tensors(self.file)
        self.weight, self.dtype = self.stored, torch.bfloat16

    def names(self):
        return sorted(self.entries)

    def keys(self, name):
        return (name,)

    def buffers(self, positions):
        return {}

    maps = dict

    def digest(self):
        return sha256_of([self.file])


class LinearStudent(Student):
    def __init__(self, teacher, levels: int) -> None:
        super().__init__(teacher, levels, (), None)
        self.turns = turns(levels, self.output_VH.shape[1])

    def start_from(self, teacher) -> None:
        for turn in self.turns:
            nn.init.eye_(turn.weight)

    def features(self, batch: Batch) -> Tensor:
        hidden_NH = batch.pick(batch.last_BSH).float()
        return torch.stack([turn(hidden_NH) for turn in self.turns], 1)

    def losses(self, batch: Batch, features_NIH: Tensor, weight_NI: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss, nats_I = self.token_loss(batch, features_NIH, weight_NI)
        return loss, {"nats": nats_I}

    def save(self, folder: Path) -> None:
        write_folder(folder, self.state_dict(), {"architectures": ["Linear"]})


@dataclass(frozen=True)
class LinearModel(DraftModel):
    kind: ClassVar[str] = "linear"
    config: LinearConfig

    @classmethod
    def recognises(cls, path, fields):
        return fields.get("architectures") == ["Linear"]

    @classmethod
    def open(cls, path, teacher):
        checkpoint = LinearCheckpoint(path)
        return OpenedDrafter(cls(LinearConfig(len(checkpoint.names()))), checkpoint)

    @classmethod
    def student(cls, teacher, options, ids_V):
        return LinearStudent(teacher, options["levels"])

    @classmethod
    def trained(cls, folder, teacher, levels):
        checkpoint = LinearCheckpoint(folder)
        values = {name: checkpoint.weight(name) for name in checkpoint.names()}
        return LinearStudent(teacher, len(values)), values

    def module(self, teacher, positions):
        return LinearNetwork(self.config.levels, teacher.hidden)

    def check_tree(self, name, tree, teacher):
        check_levels(name, tree, self.config.levels, "matrices", teacher.vocabulary)

    def draft_name(self, tree):
        return "draft"

    def steps(self, modules, trees, sizes, lengths):
        decoder, network = modules
        ranked, dtype = candidates(trees, decoder.config.vocabulary), sizes.dtype
        numbers = {"N": 1, "W": decoder.feature_width, "D": self.config.levels, "K": ranked}
        signature = signed("draft", "draft", numbers, {}, rows=1, dtype=dtype, parts={"heads"})
        return [Step(LinearStep(network, decoder, ranked), signature)]

    def manifest(self, digest, teacher, trees):
        return m.Drafter(
            kind=self.kind, digest=digest, levels=self.config.levels, candidates=candidates(trees, teacher.vocabulary),
            features=teacher.hidden, buffers=(), config=asdict(self.config),
        )  # fmt: skip


LINEAR = Kind(
    name="linear",
    title="a linear drafter",
    layout="one with the config.json of a linear drafter",
    source=f"{__name__}:LinearModel",
    options={
        "levels": TrainingOption(help="matrices (2)", default=2, least=1),
        "zeal": TrainingOption(help="does nothing", default=1.0, read=float, least=0),
    },
    cost_source=f"{__name__}:LinearCost",
    cost_sizes=":LEVELS",
)


@pytest.fixture(scope="module")
def linear() -> Iterator[None]:
    """The kind, registered for the tests of this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_kinds", dict(registry._kinds))
        registry.register(LINEAR)
        yield


@pytest.fixture(scope="module")
def texts(tiny_teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    corpus = [{"id": str(i), "text": f"the {word} sat on the mat"} for i in range(20) for word in ("cat", "hat", "mat")]
    distill(tiny_teacher, corpus, folder, rows=80, new_tokens=24, batch=80, shard_rows=80)
    return folder


@pytest.fixture(scope="module")
def trained(linear: None, tiny_teacher: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ordinary command, with flags that the kind brought along."""
    folder = tmp_path_factory.mktemp("linear")
    words = ["train", "linear", tiny_teacher, texts, "--out", folder, "--steps", 40]
    assert main([str(word) for word in [*words, "--levels", 3, "--zeal", 0.5]]) == 0
    return folder


@pytest.fixture(scope="module")
def bundle(trained: Path, tiny_teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "linear"
    build(BuildRequest(model=tiny_teacher, drafter=trained, trees=TREES, slots=(256,), prefill_rows=()), folder)
    return folder


def decoded(engine: CpuEngine, tree: str, sampling: Sampling) -> Result:
    options = Options(max_new_tokens=80, ignore_eos=True, sampling=sampling)
    return Decoding(engine, [5, 9, 200], options, FixedTree(engine.bundle, f"{tree}-kv256")).run()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=3)], ids=["greedy", "sampled"])
def test_its_bundle_decodes_what_plain_decoding_does(bundle: Path, sampling: Sampling) -> None:
    engine = CpuEngine(Bundle.open(bundle))
    plain, tree = decoded(engine, "plain", sampling), decoded(engine, "full", sampling)
    assert tree.token_ids == plain.token_ids
    assert tree.steps < plain.steps  # drafts hit, else the equality above shows little


def test_the_ordinary_loop_trains_it(trained: Path) -> None:
    records = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    first, *_, last = (record["nats"] for record in records if "of" in record)
    assert len(first) == 3 and sum(last) < sum(first)


def test_the_manifest_gives_back_the_model(bundle: Path, trained: Path, tiny_teacher: Path) -> None:
    entry = m.read_manifest(bundle).drafter
    opened = registry.open_drafter(trained, Checkpoint.open(tiny_teacher))
    assert entry is not None and entry.kind == "linear" and entry.digest == opened.digest()
    assert registry.drafter_of(entry) == opened.model == LinearModel(LinearConfig(3))


def test_the_runtime_needs_no_registry(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = m.read_manifest(bundle).drafter
    monkeypatch.delitem(registry._kinds, "linear")
    with pytest.raises(BundleError, match="kind 'linear'; expected medusa, peagle, eagle3, fasteagle, dspark, dflash"):
        registry.drafter_of(entry)
    assert decoded(CpuEngine(Bundle.open(bundle)), "full", Sampling()).accept_length_mean > 1


def test_it_is_counted_and_modelled(trained: Path, tiny_teacher: Path) -> None:
    assert load(trained, FrozenTeacher.open(tiny_teacher)).levels == 3
    for spec in ("linear:3", str(trained)):
        assert parse_drafter(spec, tiny_teacher)[0].facts == {"kind": "linear", "levels": 3}


def test_what_it_cannot_do_is_refused(trained: Path, tiny_teacher: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, model = Checkpoint.open(tiny_teacher).config, LinearModel(LinearConfig(3))
    with pytest.raises(TreeError, match="4 levels deep, but the drafter has 3 matrices"):
        registry.check_tree(model, "deep", Topology.chain(4), config)
    with pytest.raises(TreeError, match="it needs an EAGLE-3 drafter"):
        registry.check_tree(model, "budget", Budget(4, 2, 2), config)
    with pytest.raises(RequestError, match="blocks: not an option of linear; expected levels, zeal"):
        registry.kind_named("linear").complete({"blocks": 2})
    with pytest.raises(RequestError, match=r"zeal is -1\.0; expected 0 or more"):
        registry.kind_named("linear").complete({"zeal": -1.0})
    assert main(["train", "cubic"]) == 2 and "linear" in capsys.readouterr().err


def test_a_name_and_a_flag_mean_one_thing(linear: None) -> None:
    with pytest.raises(ValueError, match="linear: there is a kind of that name"):
        registry.register(LINEAR)

    other = replace(LINEAR, name="other", options={"levels": TrainingOption(help="in words", read=str)})
    with pytest.raises(ValueError, match="--levels does not read what --levels of medusa reads"):
        registry.register(other)
    assert registry.names() == ("medusa", "peagle", "eagle3", "fasteagle", "dspark", "dflash", "linear")
