"""A SentencePiece model as its file has it: pieces, how texts are normalised, which algorithm cuts them.

The file is a message of protocol buffers (sentencepiece_model.proto of google/sentencepiece). The few fields that are
needed are declared here: the module that the sentencepiece package generates takes one release of protobuf alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from draftwood.errors import CheckpointError

FILE = "tokenizer.model"
# Kinds of pieces and of models, as the file numbers them.
NORMAL, CONTROL, DEFINED, UNUSED = 1, 3, 4, 5
UNIGRAM, BPE = 1, 2
# No published one is larger; the largest known, of 262144 pieces, has 4.7 MB.
_MOST_BYTES = 64 << 20
_WAY_OUT = "put its tokenizer.json there: transformers writes one by AutoTokenizer.from_pretrained(...).save_pretrained"
_MESSAGE = "draftwood.sentencepiece.Model"
_KINDS = {
    "text": descriptor_pb2.FieldDescriptorProto.TYPE_STRING, "bytes": descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
    "flag": descriptor_pb2.FieldDescriptorProto.TYPE_BOOL, "whole": descriptor_pb2.FieldDescriptorProto.TYPE_INT32,
    "float": descriptor_pb2.FieldDescriptorProto.TYPE_FLOAT,
}  # fmt: skip
# By message: name, number, kind and default of each field; a kind with a capital is a message.
_FIELDS: dict[str, tuple[tuple[str, int, str, str], ...]] = {
    "Piece": (("piece", 1, "text", ""), ("score", 2, "float", "0"), ("type", 3, "whole", str(NORMAL))),
    "Trainer": (
        ("model_type", 3, "whole", str(UNIGRAM)), ("treat_whitespace_as_suffix", 24, "flag", "false"),
        ("byte_fallback", 35, "flag", "false"), ("unk_id", 40, "whole", "0"), ("bos_id", 41, "whole", "1"),
        ("eos_id", 42, "whole", "2"), ("pad_id", 43, "whole", "-1"),
    ),
    "Normalizer": (
        ("precompiled_charsmap", 2, "bytes", ""), ("add_dummy_prefix", 3, "flag", "true"),
        ("remove_extra_whitespaces", 4, "flag", "true"), ("escape_whitespaces", 5, "flag", "true"),
    ),
    "Model": (
        ("pieces", 1, "Piece", ""), ("trainer", 2, "Trainer", ""), ("normalizer", 3, "Normalizer", ""),
        ("denormalizer", 5, "Normalizer", ""),
    ),
}  # fmt: skip


def read_model(path: Path) -> Any:
    """The message with fields ``pieces``, ``trainer``, ``normalizer`` and ``denormalizer``.

    Raises:
        CheckpointError: no SentencePiece model, or one with fields that no conversion exists for.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            refuse(path, f"{path.stat().st_size} bytes, expected at most {_MOST_BYTES}")
        model = message_class().FromString(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except message.DecodeError:
        model = None
    if model is None or not model.pieces:  # other bytes may be a message by chance
        refuse(path, "is no SentencePiece model")
    texts = [piece.piece for piece in model.pieces]
    # protobuf hands out bytes that are no UTF-8 as they are.
    if damaged := [id_ for id_, text in enumerate(texts) if not isinstance(text, str)]:
        refuse(path, f"piece {damaged[0]} is {texts[damaged[0]]!r}, expected UTF-8")
    if "" in texts or len(set(texts)) != len(texts):
        refuse(path, f"has {len(texts)} pieces, expected each once and none empty")
    if not 0 <= model.trainer.unk_id < len(texts):
        refuse(path, f"unk_id is {model.trainer.unk_id}, expected one of {len(texts)} pieces")
    if model.trainer.model_type not in (UNIGRAM, BPE):
        refuse(
            path, f"cuts texts by model type {model.trainer.model_type}, expected {UNIGRAM} (unigram) or {BPE} (BPE)"
        )
    if model.trainer.treat_whitespace_as_suffix or not model.normalizer.escape_whitespaces:
        refuse(path, "spells spaces at a word's end or as spaces, expected ▁ before it")
    if unused := [piece.piece for piece in model.pieces if piece.type == UNUSED]:
        refuse(path, f"has {len(unused)} pieces that it makes and never gives out, {unused[0]!r} first")
    if model.denormalizer.precompiled_charsmap:
        refuse(path, "rewrites the texts that it decodes")
    return model


def refuse(path: Path, why: str) -> Any:
    """Raises the CheckpointError of a tokenizer that has no form here."""
    raise CheckpointError(f"{path}: {why}; {_WAY_OUT}")


def message_class() -> Any:
    """The class of a model, of its fields that are declared here."""
    pool = descriptor_pool.Default()
    try:
        descriptor = pool.FindMessageTypeByName(_MESSAGE)
    except KeyError:
        pool.AddSerializedFile(_described().SerializeToString())
        descriptor = pool.FindMessageTypeByName(_MESSAGE)
    if hasattr(message_factory, "GetMessageClass"):
        return message_factory.GetMessageClass(descriptor)
    return message_factory.MessageFactory(pool).GetPrototype(descriptor)  # protobuf 3.20, which CANN brings


def _described() -> descriptor_pb2.FileDescriptorProto:
    package, _, _ = _MESSAGE.rpartition(".")
    described = descriptor_pb2.FileDescriptorProto(
        name="draftwood/sentencepiece.proto", package=package, syntax="proto2"
    )
    for name, fields in _FIELDS.items():
        of_message = described.message_type.add(name=name)
        for field, number, kind, default in fields:
            added = of_message.field.add(name=field, number=number, label=1)
            if kind in _KINDS:
                added.type, added.default_value = _KINDS[kind], default
            else:
                added.label = 3 if field == "pieces" else 1
                added.type, added.type_name = 11, f".{package}.{kind}"
    return described
