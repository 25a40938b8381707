"""Training of a drafter for a frozen teacher: the texts that the teacher writes, its states, and the loop."""

from draftwood.environment import hide_torch_npu

hide_torch_npu()  # before any of these modules imports transformers, which would import it and fail
