"""Reference mode: a teacher as transformers runs it, under the same decoding as the compiled graphs."""

from draftwood.environment import hide_torch_npu

hide_torch_npu()  # before any of these modules imports transformers, which would import it and fail
