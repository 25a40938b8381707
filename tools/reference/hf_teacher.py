"""A teacher as transformers runs it: its own modelling code, eager attention, a 4-D mask and explicit positions.

Nothing of Draftwood's decoder is used, so that its results are an independent reference.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

from draftwood.compiler.teachers.gguf import gguf_files
from draftwood.errors import CheckpointError
from draftwood.tools.reference.branch_cache import BranchCache

# T rows, S = committed + T columns, R rows with logits, V vocabulary, F features


class ForwardPass(NamedTuple):
    """Results of a forward pass: logits of R rows (all, or the last), features of all T."""

    logits_RV: Tensor
    features_TF: Tensor


class HfTeacher:
    """A causal language model over a ``BranchCache``.

    ``taps`` chooses the features. Empty means the final normed hidden state; otherwise the states that enter these
    layers, side by side. The number of layers stands for the state that enters the final norm.
    """

    def __init__(self, model: PreTrainedModel, taps: Sequence[int] = ()) -> None:
        self.model, self.taps = model, tuple(taps)
        self.layers = int(model.config.num_hidden_layers)
        if any(not 0 <= layer <= self.layers for layer in self.taps):
            raise CheckpointError(f"states entering layers {self.taps}: expected 0 to {self.layers}")
        self._keeps_last = "logits_to_keep" in inspect.signature(model.forward).parameters

    @classmethod
    def open(cls, folder: Path, taps: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> HfTeacher:
        """The teacher of a Hugging Face folder or a GGUF file, on the CPU.

        Modelling code that lies in the folder is never run: openPangu is transformers' Llama, whose block with biases
        is the same function.

        Raises:
            CheckpointError: transformers cannot load it.
        """
        try:
            logging.disable_progress_bar()
            model = _load(folder)
        except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:
            line = " ".join(str(error).split())[:300]
            raise CheckpointError(
                f"{folder}: transformers {transformers.__version__} cannot load it: {type(error).__name__}: {line}"
            ) from error
        loaded: Any = model
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
    ) -> ForwardPass:
        """Runs rows after the committed text, which every row sees; leaves them as the cache's open branch.

        Args:
            tokens_T, depths_T: ids, and positions counted from the committed length.
            visible_TT: which row (first index) sees which.
            last_only: logits of the last row alone, if the model can leave the others out.
        """
        rows, committed = len(tokens_T), cache.length
        positions_T = torch.tensor(depths_T) + committed
        bias_TS = torch.zeros((rows, committed + rows), dtype=self.model.dtype)
        # Finite, as transformers' own masks are: added to any score it stays a number.
        bias_TS[:, committed:][~torch.tensor(visible_TT)] = torch.finfo(self.model.dtype).min
        options = {"logits_to_keep": 1} if last_only and self._keeps_last else {}
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
        return ForwardPass(out.logits[0][-1:] if last_only else out.logits[0], torch.cat(states, dim=-1))

    @contextlib.contextmanager
    def _entering_norm(self) -> Iterator[list[Tensor]]:
        """Collects the state [1, T, H] that enters the final norm, which transformers does not return."""
        states: list[Tensor] = []
        if self.layers not in self.taps:
            yield states
            return
        norm: Any = self.model.base_model.norm
        with norm.register_forward_pre_hook(lambda _, given: states.append(given[0])):
            yield states


def _load(folder: Path) -> PreTrainedModel:
    options: dict[str, Any] = {"local_files_only": True, "attn_implementation": "eager"}
    if files := gguf_files(folder):
        # Dequantised by transformers' own reader.
        where = {"gguf_file": files[0].name, "dtype": torch.float32}
        return AutoModelForCausalLM.from_pretrained(files[0].parent, **where, **options)
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "PanguEmbeddedForCausalLM" in fields.get("architectures", ()):
        fields["attention_bias"] = fields.get("attention_bias", fields.get("bias", True))
        for name in ("architectures", "auto_map", "model_type", "bias"):
            fields.pop(name, None)
        defaults = {"rope_theta": 1.6e7, "rms_norm_eps": 1e-5}  # of openPangu's own configuration class
        return LlamaForCausalLM.from_pretrained(folder, config=LlamaConfig(**defaults | fields), **options)
    return AutoModelForCausalLM.from_pretrained(folder, **options)
