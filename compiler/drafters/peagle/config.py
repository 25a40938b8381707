"""What a P-EAGLE drafter is: an EAGLE-3 network, the token that stands for the unknown ones, and how many it drafts."""

from __future__ import annotations

from dataclasses import dataclass

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.drafters.eagle3.config import Eagle3Config

# How many levels its trainers train, and so draft, unless they are told otherwise (speculators and Automodel).
_USUAL_LEVELS = 8
_MOST_LEVELS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class PEagleConfig(Eagle3Config):
    """EAGLE-3's network, run once."""

    # The token whose embedding stands for a token that is not known yet.
    mask_token: int
    # Tokens drafted in one pass.
    levels: int


def read_levels(fields: Fields) -> int:
    """How many tokens a pass drafts: ``num_depths``, or what speculators proposes, or what is usual."""
    proposed = fields.get("speculators_config", {})
    methods = proposed.get("proposal_methods") if isinstance(proposed, dict) else None
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
    usual = Fields(fields.path, first).whole("speculative_tokens", _USUAL_LEVELS)
    levels = fields.whole("num_depths", usual)
    if not 1 <= levels <= _MOST_LEVELS:
        fields.fail("num_depths", f"1 to {_MOST_LEVELS} tokens a pass; found {levels}")
    return levels
