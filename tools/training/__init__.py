"""Trainers of the demo models: a small teacher with its tokenizer, and drafters for a frozen teacher."""

from draftwood.environment import hide_torch_npu

hide_torch_npu()  # before any of these modules imports transformers, which would import it and fail
