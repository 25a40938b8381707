"""A teacher as transformers runs it: its own modelling code, eager attention, a 4-D mask and explicit positions.

Nothing of Draftwood's decoder is used, so that what it computes is an independent reference.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

from draftwood.environment import cann_available, torch_npu_installed
from draftwood.errors import CheckpointError
from draftwood.tools.reference.branch_cache import BranchCache

# T rows, S = committed + T columns, R rows with logits, V vocabulary, F features

_ABSENT: Any = object()


class TeacherStep(NamedTuple):
    """What a forward pass gives: logits of R rows (all, or the last), features of all T."""

    logits_RV: Tensor
    features_TF: Tensor


class HfTeacher:
    """A causal language model behind a ``BranchCache``.

    ``taps`` chooses the features: empty for the final normed hidden state, else the states that enter these
    layers, side by side; the number of layers stands for the state that enters the final norm.
    """

    def __init__(self, model: PreTrainedModel, taps: Sequence[int] = ()) -> None:
        self.model, self.taps = model, tuple(taps)
        self.layers = int(model.config.num_hidden_layers)
        if any(not 0 <= layer <= self.layers for layer in self.taps):
            raise CheckpointError(f"states entering layers {self.taps}: expected 0 to {self.layers}")
        self._parameters = inspect.signature(model.forward).parameters

    @classmethod
    def open(
        cls, folder: Path, taps: Sequence[int] = (), dtype: torch.dtype = torch.float32, trust_remote_code: bool = False
    ) -> HfTeacher:
        """The teacher of a Hugging Face folder, on the CPU.

        With ``trust_remote_code`` the modelling code that lies in the folder is executed, as openPangu's needs;
        without it openPangu runs as transformers' Llama, whose block with biases is the same function.

        Raises:
            CheckpointError: transformers cannot load the folder.
        """
        try:
            logging.disable_progress_bar()
            with _as_without_npu():
                model = _load(folder, trust_remote_code)
        except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:
            line = " ".join(str(error).split())[:300]
            raise CheckpointError(
                f"{folder}: transformers {transformers.__version__} cannot load it:"
                f" {type(error).__name__}: {line}; {_way_out(trust_remote_code)}"
            ) from error
        code: Any = sys.modules[type(model).__module__]
        loaded: Any = model
        if hasattr(code, "NPU_ATTN_INFR"):  # openPangu's fused branch reads masks with the other meaning
            code.NPU_ATTN_INFR = False
        return cls(loaded.to("cpu", dtype).eval().requires_grad_(False), taps)

    def new_cache(self, slots: int) -> BranchCache:
        """An empty cache with room for ``slots`` tokens."""
        return BranchCache(self.layers, slots)

    @torch.no_grad()
    def step(
        self,
        cache: BranchCache,
        tokens_T: NDArray[np.int64],
        depths_T: NDArray[np.int64],
        visible_TT: NDArray[np.bool_],
        last_only: bool = False,
    ) -> TeacherStep:
        """Runs rows behind the committed text, which every row sees; leaves them as the cache's open branch.

        Args:
            tokens_T, depths_T: ids, and positions counted from the committed length.
            visible_TT: which row (first index) sees which.
            last_only: logits of the last row alone, where the model can leave the others out.
        """
        rows, committed = len(tokens_T), cache.length
        positions_T = torch.tensor(depths_T) + committed
        bias_TS = torch.zeros((rows, committed + rows), dtype=self.model.dtype)
        # Finite, as transformers' own masks are: added to any score it stays a number.
        bias_TS[:, committed:][~torch.tensor(visible_TT)] = torch.finfo(self.model.dtype).min
        options: dict[str, Any] = {}
        if "cache_position" in self._parameters:  # the slots written, not the positions
            options["cache_position"] = torch.arange(committed, committed + rows)
        if last_only and "logits_to_keep" in self._parameters:
            options["logits_to_keep"] = 1
        cache.open(list(tokens_T), positions_T.tolist())
        with self._entering_norm() as entering_norm:
            out = self.model(
                input_ids=torch.tensor(tokens_T)[None],
                attention_mask=bias_TS[None, None],
                position_ids=positions_T[None],
                past_key_values=cache,
                use_cache=True,
                output_hidden_states=True,
                **options,
            )
        # hidden_states[i] enters layer i, but the last entry has passed the final norm.
        states = [
            entering_norm[0][0] if layer == self.layers else out.hidden_states[layer][0] for layer in self.taps or (-1,)
        ]
        return TeacherStep(out.logits[0][-1:] if last_only else out.logits[0], torch.cat(states, dim=-1))

    @contextlib.contextmanager
    def _entering_norm(self) -> Iterator[list[Tensor]]:
        """Collects the state [1, T, H] that enters the final norm, which transformers does not return."""
        found: list[Tensor] = []
        if self.layers not in self.taps:
            yield found
            return
        norm: Any = self.model.base_model.norm
        with norm.register_forward_pre_hook(lambda _, given: found.append(given[0])):
            yield found


def _load(folder: Path, trust_remote_code: bool) -> PreTrainedModel:
    options: dict[str, Any] = {"local_files_only": True, "attn_implementation": "eager"}
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "PanguEmbeddedForCausalLM" in fields.get("architectures", ()) and not trust_remote_code:
        fields["attention_bias"] = fields.get("attention_bias", fields.get("bias", True))
        for name in ("architectures", "auto_map", "model_type", "bias"):
            fields.pop(name, None)
        defaults = {"rope_theta": 1.6e7, "rms_norm_eps": 1e-5}  # of openPangu's own configuration class
        return LlamaForCausalLM.from_pretrained(folder, config=LlamaConfig(**defaults | fields), **options)
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust_remote_code, **options)


def _way_out(trust_remote_code: bool) -> str:
    if trust_remote_code:
        return "take the transformers that its modelling code was written for, or leave --trust-remote-code out"
    return "if it brings modelling code of its own that you trust, add --trust-remote-code"


@contextlib.contextmanager
def _as_without_npu() -> Iterator[None]:
    """Lets modelling code that imports torch_npu without asking be imported where there is none.

    openPangu's does, to ask for the device's name, and is told one that is no NPU's.
    """
    if torch_npu_installed() and cann_available():
        yield
        return
    hidden = {"torch_npu": sys.modules.get("torch_npu", _ABSENT), "torch_npu.contrib": _ABSENT}
    package, contrib = ModuleType("torch_npu"), ModuleType("torch_npu.contrib")
    vars(contrib).update(transfer_to_npu=None)
    sys.modules.update({"torch_npu": package, "torch_npu.contrib": contrib})
    vars(torch).update(npu=SimpleNamespace(get_device_name=lambda *_: "none"))
    try:
        yield
    finally:
        vars(torch).pop("npu")
        for name, module in hidden.items():
            if module is _ABSENT:
                sys.modules.pop(name)
            else:
                sys.modules[name] = module
