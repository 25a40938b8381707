"""What a graph takes and gives: every tensor of every kind is known by name, and where it lives between launches."""

import pytest

from draftwood.compiler.steps.step import signed
from draftwood.contract import GIVES, TAKES, End, ends_of, lives, names_of, pooled_signature, tensors, texts_signature
from draftwood.manifest import StepSignature

SIZES = dict.fromkeys("TRXVWPLNGDUKMQHBE", 3) | {"J": (2, 5)}
PARTS = ("draws", "features", "cached", "noise", "ranked", "drafts")


def step(kind: str, texts: int = 1) -> StepSignature:
    return signed("a", kind, SIZES, {}, rows=3, batch=texts, parts=PARTS)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", TAKES)
def test_every_input_and_output_is_known_by_name(kind: str) -> None:
    one = step(kind, 2 if kind in ("texts", "accept-texts") else 1)
    forms = {"grouped": [texts_signature], "draft": [texts_signature, pooled_signature]}
    every = [form(one, 3) for form in forms.get(kind, ())]
    for signature in (one, *every):
        assert {spec.name for spec in (*signature.inputs, *signature.outputs)} <= ends_of(signature).keys()


def test_branches_live_with_their_sequences_and_results_on_the_device() -> None:
    assert lives(step("verify"), "sequence") == {"branch", "branch.out"}
    assert lives(step("texts", 2), "sequence") == {f"text{n}.branch{end}" for n in (0, 1) for end in ("", ".out")}
    assert lives(step("verify"), "device") == {"logits", "features"}
    assert lives(step("accept-texts", 2), "device") == {"logits", "features"}
    for form in (texts_signature, pooled_signature):
        assert {"text0.noise", "text1.features"} <= lives(form(step("draft"), 2), "either")
    small = lives(step("prefill"), "host") & {spec.name for spec in step("prefill").inputs}
    assert small == {"tokens", "last", "committed", "accepted", "path"}


def test_parts_and_sizes() -> None:
    assert names_of(TAKES["draft"]) == ["features"] and names_of(GIVES["accept"])[-1] == "length"
    assert names_of(TAKES["texts"], texts=2)[-4:] == ["text0.path", "text1.path", "text0.branch", "text1.branch"]
    end = End("x", "", ("T", 4, "J"))
    (known,) = tensors([end], {"J": (7, 8)}, "bfloat16")
    assert (known.name, known.dtype, known.shape) == ("x", "bfloat16", ("T", 4, 7, 8))
