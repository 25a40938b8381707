"""The W8A8 modules of a published checkpoint, from either of two forms of description.

Schemes that pack weights and round no rows are in ``packing``, which also refuses all others.

Weights are symmetric int8 with one scale an output. Activations are symmetric int8 with one scale a row, made at run
time. With one scale for a whole tensor a row would depend on the other rows, and so on the draft tree.

* compressed-tensors: an object of config.json (vllm-project/compressed-tensors, quantization/).
* msModelSlim: ``quant_model_description.json``, the type of every tensor by its name (Ascend/msmodelslim, docs/).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from draftwood.compiler.checkpoints.fields import Fields, read_json
from draftwood.compiler.checkpoints.packing import described_in, packing_of
from draftwood.errors import CheckpointError

DESCRIPTION = "quant_model_description.json"
W8A8_DYNAMIC, UNQUANTISED = "W8A8_DYNAMIC", "FLOAT"
# The fields that compressed-tensors writes for this scheme; no other value of them is accepted.
WEIGHTS: Mapping[str, Any] = {
    "num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False, "group_size": None
}  # fmt: skip
ACTIVATIONS: Mapping[str, Any] = {
    "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True, "group_size": None
}  # fmt: skip
TARGET = "Linear"
# Ways in which all patterns of a list may try a name, and the length of a name that is reckoned with.
_MOST_WAYS, _NAME = 1 << 20, 64
_WAY_OUT = "draftwood quantize makes one of the original"

# Says of a module, by its published name, whether it is quantised.
Chosen = Callable[[str], bool]


def quantised_modules(fields: Fields) -> Chosen | None:
    """Which of a teacher's linear modules are W8A8; None if its config.json, and the folder, speak of none.

    Raises:
        CheckpointError: another scheme, or a description that contradicts itself.
    """
    description = fields.path.parent / DESCRIPTION
    if (config := described_in(fields)) is not None:
        if description.is_file():
            raise CheckpointError(f"{fields.path}: describes a quantisation, so does {DESCRIPTION}; expected one")
        return _compressed_tensors(config) if packing_of(fields) is None else None
    return _msmodelslim(description) if description.is_file() else None


def states_rotated(folder: Path) -> bool:
    """Whether msModelSlim has rotated a teacher's states, which its texts do not show (QuaRot, 2404.00456)."""
    path = folder / DESCRIPTION
    return path.is_file() and "quarot" in Fields(path, read_json(path)).nested("optional").values


def _compressed_tensors(config: Fields) -> Chosen:
    if config.get("quantization_status", "compressed") not in ("compressed", "frozen"):
        config.fail("quantization_status", f"'compressed', 'frozen' or null; {_WAY_OUT}")
    if config.nested("sparsity_config").get("format", "dense") != "dense":
        config.fail("sparsity_config", f"a dense checkpoint; {_WAY_OUT}")
    targets, ignored = (
        _names(config, "targets", list(_targets(config))),
        _names(config, "ignore", config.get("ignore", [])),
    )
    return lambda module: not _matches(ignored, module) and (TARGET in targets or _matches(targets, module))


def _targets(config: Fields) -> Iterator[str]:
    """The targets of the groups; every group must be of our scheme."""
    groups = config.nested("config_groups")
    if not groups.values:
        config.fail("config_groups", "at least one group")
    for name in groups.values:
        group = groups.nested(name)
        for part, scheme in (("weights", WEIGHTS), ("input_activations", ACTIVATIONS)):
            got = group.nested(part)
            for field, value in scheme.items():
                if got.get(field) != value:
                    field_path = f"config_groups.{name}.{part}.{field}"
                    raise CheckpointError(
                        f"{config.path}: {field_path} is {got.get(field)!r}; expected {value!r}, of W8A8 with one"
                        f" activation scale a token; {_WAY_OUT}"
                    )
        if group.get("output_activations") is not None:
            group.fail("output_activations", "null")
        targets = group.get("targets", [])
        if not isinstance(targets, list):
            group.fail("targets", "a list of names")
        yield from targets


def _names(config: Fields, field: str, names: Any) -> list[str | re.Pattern[str]]:
    """Module names, and patterns if they begin with ``re:``."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        config.fail(field, "a list of module names")
    patterns = [name.removeprefix("re:") for name in names if name.startswith("re:")]
    if sum(map(_ways, patterns)) > _MOST_WAYS:
        config.fail(field, "regular expressions that repeat no group, and fewer *, +, ? and |")
    try:
        return [re.compile(name.removeprefix("re:")) if name.startswith("re:") else name for name in names]
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{config.path}: {field} holds no regular expression ({error})") from None


def _ways(pattern: str) -> int:
    """A bound of the ways in which ``re``, which goes back to try others, matches a name with a pattern."""
    bare = re.sub(r"\[\^?\]?[^\]]*\]", "a", re.sub(r"\\.", "a", pattern, flags=re.DOTALL))
    if re.search(r"\)[*+{]|\(\?[a-zA-Z-]*x", bare):  # a repeated group has exponentially many; x hides one in spaces
        return _MOST_WAYS + 1
    repeats, optional = len(re.findall(r"[*+{]", bare)), len(re.findall(r"(?<!\()\?", bare))
    groups, repeats = bare.count("(") + 1, min(repeats, 9)
    branches = math.ceil((bare.count("|") + groups) / groups) ** groups
    return branches * (_NAME**repeats // math.factorial(repeats)) << min(optional, 40)


def _matches(names: list[str | re.Pattern[str]], module: str) -> bool:
    return any(module == name if isinstance(name, str) else name.match(module) for name in names)


def _msmodelslim(path: Path) -> Chosen:
    kinds = read_json(path)
    tensors = {name: kind for name, kind in kinds.items() if name.endswith((".weight", ".bias", ".weight_scale"))}
    for name, kind in tensors.items():
        if kind not in (W8A8_DYNAMIC, UNQUANTISED):
            raise CheckpointError(
                f"{path}: {name} is {kind!r}; expected {W8A8_DYNAMIC} or {UNQUANTISED} for every tensor,"
                f" since an activation scale must be of one row and made at run time; {_WAY_OUT}"
            )
    return lambda module: tensors.get(f"{module}.weight") == W8A8_DYNAMIC
