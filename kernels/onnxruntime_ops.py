"""Schemas of the onnxruntime operators that the CPU forms use.

The onnx package does not know them; registered, they can be built by name and checked like any other.
Source: onnxruntime docs, ContribOperators.md.
"""

from __future__ import annotations

import onnx.defs
from onnx.defs import OpSchema
from onnxscript.values import Opset

DOMAIN, VERSION = "com.microsoft", 1
# Of marks, which no graph keeps.
MARKS = "draftwood.marks"
_Option = OpSchema.FormalParameterOption
_Attribute = OpSchema.Attribute
_Kind = OpSchema.AttrType
_TYPES = [
    ("T", ["tensor(float)", "tensor(float16)"], ""),
    ("I", ["tensor(int64)"], ""),
    ("M", ["tensor(int32)"], ""),
    ("U", ["tensor(uint8)"], ""),
    ("W", ["tensor(int8)", "tensor(uint8)"], ""),
]


def _inputs(*names: str) -> list[OpSchema.FormalParameter]:
    # "name:type", with "?" at the end if the input may be left out.
    parameters = []
    for text in names:
        name, _, kind = text.rstrip("?").partition(":")
        option = _Option.Optional if text.endswith("?") else _Option.Single
        parameters.append(OpSchema.FormalParameter(name, kind, param_option=option))
    return parameters


def _schema(
    name: str,
    inputs: list[OpSchema.FormalParameter],
    outputs: list[OpSchema.FormalParameter],
    attributes: dict[str, _Kind],
    domain: str = DOMAIN,
) -> OpSchema:
    used = {p.type_str for p in (*inputs, *outputs)}
    return OpSchema(
        name,
        domain,
        VERSION,
        inputs=inputs,
        outputs=outputs,
        type_constraints=[t for t in _TYPES if t[0] in used],
        attributes=[_Attribute(key, kind, required=False) for key, kind in attributes.items()],
    )


_SCHEMAS = (
    _schema(
        "RotaryEmbedding",
        _inputs("input:T", "position_ids:I", "cos_cache:T", "sin_cache:T"),
        _inputs("output:T"),
        {"interleaved": _Kind.INT, "num_heads": _Kind.INT, "rotary_embedding_dim": _Kind.INT},
    ),
    _schema(
        "GroupQueryAttention",
        _inputs(
            "query:T",
            "key:T?",
            "value:T?",
            "past_key:T?",
            "past_value:T?",
            "seqlens_k:M",
            "total_sequence_length:M",
            "cos_cache:T?",
            "sin_cache:T?",
            "position_ids:I?",
            "attention_bias:T?",
        ),
        _inputs("output:T", "present_key:T", "present_value:T"),
        {"num_heads": _Kind.INT, "kv_num_heads": _Kind.INT, "scale": _Kind.FLOAT, "do_rotary": _Kind.INT},
    ),
    _schema(
        "MatMulNBits",
        _inputs("A:T", "B:U", "scales:T", "zero_points:U?", "g_idx:M?", "bias:T?"),
        _inputs("Y:T"),
        dict.fromkeys(("K", "N", "bits", "block_size", "accuracy_level"), _Kind.INT),
    ),
    _schema(
        "SkipSimplifiedLayerNormalization",
        _inputs("input:T", "skip:T", "gamma:T", "bias:T?"),
        _inputs("output:T", "mean:T?", "inv_std_var:T?", "input_skip_bias_sum:T?"),
        {"epsilon": _Kind.FLOAT},
    ),
    # In the standard domain, though onnx has no operator of this name.
    _schema(
        "SimplifiedLayerNormalization",
        _inputs("X:T", "scale:T"),
        _inputs("Y:T", "inv_std_var:T?"),
        {"axis": _Kind.INT, "epsilon": _Kind.FLOAT, "stash_type": _Kind.INT},
        domain="",
    ),
    _schema(
        "MatMulIntegerToFloat",
        _inputs("A:U", "B:W", "a_scale:T", "b_scale:T", "a_zero_point:U?", "b_zero_point:W?", "bias:T?"),
        _inputs("Y:T"),
        {},
    ),
    _schema("QuickGelu", _inputs("X:T"), _inputs("Y:T"), {"alpha": _Kind.FLOAT}),
    _schema("Border", _inputs("input:T"), _inputs("output:T"), {"number": _Kind.INT, "side": _Kind.INT}, domain=MARKS),
    _schema(
        "FusedMatMul",
        _inputs("A:T", "B:T"),
        _inputs("Y:T"),
        {"transA": _Kind.INT, "transB": _Kind.INT, "alpha": _Kind.FLOAT},
    ),
)

for _one in _SCHEMAS:
    if not onnx.defs.has(_one.name, _one.domain):
        onnx.defs.register_schema(_one)

opset, standard, marks = Opset(DOMAIN, VERSION), Opset("", VERSION), Opset(MARKS, VERSION)
"""Build onnxruntime's operators in a translation, as ``opset18`` builds the standard ones: those of its own domain, and
those that it adds to the standard one."""
