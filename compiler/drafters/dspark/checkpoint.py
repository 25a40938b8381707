"""DSpark drafters as people publish them, checked against a teacher; ``config`` lists who writes them and how."""

from __future__ import annotations

from pathlib import Path

from draftwood.compiler.checkpoints.fields import Fields, read_json
from draftwood.compiler.checkpoints.tensors import open_stored
from draftwood.compiler.drafters.common.checkpoint import CachedCheckpoint, Parts, fitting_checkpoint
from draftwood.compiler.drafters.common.vocabulary import Vocabulary
from draftwood.compiler.drafters.dflash.checkpoint import dflash_parts
from draftwood.compiler.drafters.dspark.config import DSparkConfig, read_dspark_config
from draftwood.compiler.teachers.checkpoint import Checkpoint

# What stands before the keys of the heads; ModelOpt leaves the first out.
_BEFORE = ("markov_head.", "confidence_head.proj")


def open_dspark(path: Path, teacher: Checkpoint) -> CachedCheckpoint[DSparkConfig]:
    """Opens a folder with config.json and model.safetensors, shards or pytorch_model.bin, or such a file in it.

    Raises:
        CheckpointError: a file is missing, damaged or holds more than tensors; or a field, a key, a shape, a
            dtype or the vocabulary map does not fit the teacher, or leaves open what network it describes.
    """
    stored = open_stored(path, "DSpark")
    fields = Fields(stored.folder / "config.json", read_json(stored.folder / "config.json"))
    config, vocabulary = read_dspark_config(fields, teacher.config, stored.entries)
    bare = "markov_w1.weight" in stored.entries
    parts = dspark_parts(config, vocabulary, *(("", "confidence_proj") if bare else _BEFORE))
    return fitting_checkpoint(fields.path, config, teacher, parts, stored, vocabulary)


def dspark_parts(
    config: DSparkConfig, vocabulary: Vocabulary, markov: str = _BEFORE[0], confidence: str = _BEFORE[1]
) -> Parts:
    """The weights of the network; ``markov`` and ``confidence`` stand before the keys of the two heads."""
    H, R = config.block.hidden, config.markov_rank
    shapes: dict[str, tuple[int, ...]] = {
        "markov_w1.weight": (vocabulary.stored, R),
        "markov_w2.weight": (vocabulary.head, R),
    }
    if config.markov_head == "gated":
        shapes |= {"gate_proj.weight": (R, H + R), "gate_proj.bias": (R,)}
    if config.markov_head == "rnn":
        shapes |= {"joint_proj.weight": (3 * R, H + 2 * R), "joint_proj.bias": (3 * R,)}
    parts = dflash_parts(config, vocabulary)
    parts |= {f"markov_head.{name}": ((f"{markov}{name}", shape),) for name, shape in shapes.items()}
    if config.confidence != "none":
        width = H + (R if config.confidence == "markov" else 0)
        parts["confidence_proj.weight"] = ((f"{confidence}.weight", (1, width)),)
        parts["confidence_proj.bias"] = ((f"{confidence}.bias", (1,)),)
    return parts
