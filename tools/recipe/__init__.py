"""How the demo's own teacher was made: its tokenizer, its text and its training. For development alone.

No command needs it, since users bring teachers of their own. The demo's drafters were made with ``draftwood distill``
and ``draftwood train``; tools/demo/MODEL_CARD.md has all steps in order.
"""

from draftwood.environment import hide_torch_npu

hide_torch_npu()  # before any of these modules imports transformers, which would import it and fail
