"""Drafts that follow a grammar: the allowed tokens at every level, and nothing of it reaches the draws."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import draftwood
from draftwood.errors import RequestError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.opened import OpenedBundle
from draftwood.runtime.policy import PLAIN
from draftwood.runtime.speculation import drafting
from draftwood.runtime.speculation.guide import LIKELY, MANY, Guide
from draftwood.tests.decoded import drafting_gears
from draftwood.trees import Topology, tensorize, tree_tokens

pytest.importorskip("llguidance")

PROMPT = "the cat sat on the mat"


class Numbers:
    """A language of numbers: after token n comes n + 1 or n + 2, after 9 only 10, and after 20 nothing."""

    def __init__(self, root: int, position: int) -> None:
        self.first, self.taken = position, [root]

    def allows(self, position: int, token: int) -> bool:
        return bool(self.allowed(position)[token])

    def allowed(self, position: int) -> np.ndarray:
        del self.taken[position - self.first + 1 :]
        last, allowed_V = self.taken[-1], np.zeros(64, np.bool_)
        if last == 20:
            raise RequestError("grammar: no token can go on")
        allowed_V[[10] if last == 9 else [last + 1, last + 2]] = True
        return allowed_V

    def forced(self, position: int) -> int | None:
        found = np.flatnonzero(self.allowed(position)).tolist()
        return found[0] if len(found) == 1 else None

    def take(self, position: int, token: int) -> None:
        assert self.allowed(position)[token]
        self.taken.append(token)


def guide_at(last: int) -> Guide:
    """After a prompt of three tokens, a token below ``last``, and ``last`` as the root."""
    guide = Guide(Numbers(last - 2, 3), 3)
    assert guide.follow([0, 0, 0, last - 1], last)
    return guide


def test_levels_are_known_while_one_token_may_come() -> None:
    assert [np.flatnonzero(one).tolist() for one in guide_at(9).first_levels(4)] == [[10], [11, 12]]
    assert [np.flatnonzero(one).tolist() for one in guide_at(5).first_levels(4)] == [[6, 7]]


def test_ranked_levels_give_every_row_what_is_allowed_behind_it() -> None:
    tree = tensorize(Topology.full((2, 2, 1)))
    candidates_IK = np.array([[30, 8, 7, 31], [9, 10, 8, 40], [10, 12, 9, 11]])
    tokens_T = guide_at(6).filled(tree, tree_tokens(tree, 6, candidates_IK), candidates_IK)
    rows = {tuple(tokens_T[tree.paths[row, 1 : tree.depths[row] + 1]].tolist()) for row in range(1, tree.rows)}
    # After 8 the candidates 9 and 10, after 7 only 9 and 8 in their order; after 9 comes 10 alone.
    assert rows >= {(8,), (7,), (8, 9), (8, 10), (7, 9), (7, 8), (8, 9, 10), (7, 9, 10), (8, 10, 12), (7, 8, 10)}


def test_elsewhere_what_is_forced_takes_the_place_of_what_is_forbidden() -> None:
    named = {(0,): 8, (1,): 50, (0, 0): 9, (1, 0): 9, (0, 0, 0): 40, (0, 0, 1): 41}
    topology = Topology.from_paths(list(named))
    tokens_T = np.array([7, *(named[path] for path in topology.paths)])
    filled_T = guide_at(7).filled(tensorize(topology), tokens_T)
    assert filled_T.tolist() == [7, *((named | {(0, 0, 0): 10})[path] for path in topology.paths)]


def test_levels_hold_what_may_stand_behind_the_best_path() -> None:
    """After 7 come 8 and 9; 8 is proposed and 50 is not looked at."""
    tree, scores_M = tensorize(Topology.full((2, 2))), np.zeros(6, np.float32)
    for tokens, known in (
        ([7, 8, 50, 60, 9, 9, 10], [[8, 9], [9, 10]]),  # the best child of 8 is forbidden
        ([7, 50, 9, 60, 61, 40, 41], [[8, 9], [10]]),  # 50 is, and 9 goes on
        ([7, 8, 50, 10, 60, 61, 62], []),
    ):
        levels = guide_at(7).levels(tree, np.array(tokens), scores_M)
        assert [np.flatnonzero(one).tolist() for one in levels] == known


def test_what_is_forbidden_below_an_unlikely_node_is_left() -> None:
    tree, tokens_T = tensorize(Topology.chain(2)), np.array([7, 8, 60])
    for score, known in ((LIKELY + 0.1, 2), (LIKELY - 0.1, 0)):
        assert len(guide_at(7).levels(tree, tokens_T, np.array([score, score - 1], np.float32))) == known


def test_a_lookup_asks_behind_a_path() -> None:
    guide = guide_at(5)
    assert guide.allowed([], [6, 9, 7]) == {6, 7} and guide.allowed([7, 9], [10, 11]) == {10}
    assert guide.allowed([7, 9], range(MANY + 1)) == {10} and guide.allowed([9], [10]) == set()


def test_a_grammar_that_cannot_go_on_leaves_drafts_as_they_are() -> None:
    tree, tokens_T = tensorize(Topology.chain(3)), np.array([18, 20, 40, 41])
    guide = guide_at(18)
    assert guide.filled(tree, tokens_T).tolist() == tokens_T.tolist()
    assert guide.allowed([], [19]) == set() and not guide.follow([0, 0, 0, 17, 18], 19)


@pytest.fixture(scope="module", params=["medusa", "eagle3", "fasteagle"])
def model(request: pytest.FixtureRequest, tiny_bundles: dict[str, Path]) -> Iterator[OpenedBundle]:
    """Drafts that rank levels, that follow nodes, and that choose their tree."""
    with draftwood.open(tiny_bundles[request.param], threads=1, prefixes=False) as opened:
        yield opened


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_forced_is_accepted_whole(model: OpenedBundle, temperature: float) -> None:
    """A text without any choice takes as few steps as the tree is deep."""
    asked: dict[str, Any] = {"grammar": 'start: "and the hat and the cat and the mat"', "max_new_tokens": 99}
    plain = model.generate(PROMPT, policy=PLAIN, temperature=temperature, **asked)
    assert plain.finish_reason == "stop" and len(plain.token_ids) > 8
    for gear in map(model.bundle.gear, drafting_gears(model.manifest)):
        depth = next(tree.depth for tree in model.manifest.trees if tree.name == gear.tree)
        found = model.generate(PROMPT, policy=gear.name, temperature=temperature, **asked)
        assert found.token_ids == plain.token_ids
        assert found.steps == -(-(len(plain.token_ids) - 1) // (depth + 1)), gear.name


def test_a_grammar_that_cannot_go_on_fails_where_the_text_gets_there(model: OpenedBundle) -> None:
    """Drafts reach further than a text that its length or a stop string ends."""

    def outcome(policy: str, **asked: Any) -> Any:
        try:
            return model.generate(PROMPT, policy=policy, grammar='start: "xxxx" /[^\\x00-\\U0010ffff]/', **asked).text
        except RequestError as error:
            return str(error)

    for length in range(1, 7):
        for asked in ({"max_new_tokens": length}, {"max_new_tokens": 9, "stop": "x" * length}):
            plain = outcome(PLAIN, **asked)
            assert ("no token" in plain) == (length > 4) and plain.isprintable()
            assert {outcome(gear, **asked) for gear in drafting_gears(model.manifest)} == {plain}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_is_made_again_is_accepted_further(
    tiny_draft_bundles: dict[str, Path], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every level has a choice of letters that no token joins, so that a first draft knows the first level alone."""
    grammar = "start: /[xqw]{24}/"
    with draftwood.open(tiny_draft_bundles["eagle3"], threads=1, prefixes=False) as model:

        def texts(policy: str) -> list[Any]:
            asked: dict[str, Any] = {"grammar": grammar, "max_new_tokens": 40, "temperature": temperature}
            seeds = range(4 if temperature else 1)
            return [model.generate(PROMPT, policy=policy, seed=seed, **asked) for seed in seeds]

        plain = [text.token_ids for text in texts(PLAIN)]
        for gear in drafting_gears(model.manifest):
            steps = {}
            for most in (0, drafting.MOST_AGAIN):
                monkeypatch.setattr(drafting, "MOST_AGAIN", most)
                found = texts(gear)
                assert [text.token_ids for text in found] == plain
                steps[most > 0] = sum(text.steps for text in found)
            assert steps[True] < steps[False], gear


def test_guidance_that_ends_changes_no_text(model: OpenedBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"type": "array", "items": {"enum": ["cat", "hat"]}, "minItems": 3, "maxItems": 3}
    gear = model.manifest.gears[-1].name
    expected = model.generate(PROMPT, policy=PLAIN, grammar=schema, max_new_tokens=80)

    def refuse(guide: Guide, *given: object) -> None:
        guide._lost = True

    monkeypatch.setattr(Guide, "follow", refuse)
    assert model.generate(PROMPT, policy=gear, grammar=schema, max_new_tokens=80).token_ids == expected.token_ids


def test_the_policy_counts_such_texts_apart(bundle: Bundle, tiny_bundle: Path) -> None:
    with draftwood.open(tiny_bundle, threads=1) as model:
        stream = model.stream(PROMPT, grammar={"type": "boolean"}, max_new_tokens=20)
        free = model.stream(PROMPT, max_new_tokens=20)
        learned, gear = free.policy.learned, model.manifest.gears[-1]  # type: ignore[attr-defined]
        before = learned.gains[True, False].levels(gear.tree, 0).chances
        stream.run()
        assert learned.gains[True, False].levels(gear.tree, 0).chances == before
        free.run()
