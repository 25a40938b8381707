"""Ways to accept a chain, by hand and against what engines draft, and the section on tiny bundles."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from draftwood.runtime.bundle import Bundle
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.tools.lab import bundles, opened, rejecting
from draftwood.tools.lab.attended import features_of
from draftwood.tools.lab.report.contents import contents
from draftwood.tools.lab.run import evaluate
from draftwood.tools.lab.section import Table
from draftwood.tools.lab.suite import Ask, Suite
from draftwood.tools.reference.eager import EagerEngine

TEXT = [5, 9, 11, 7, 40, 5, 9, 13, 60, 61, 8, 12, 30]
AT = 10


def test_chances_are_those_of_the_whole_path() -> None:
    teacher_DV = np.array([[0.5, 0.25, 0.25], [0.1, 0.6, 0.3]])
    assert rejecting.reached(teacher_DV, [1, 2], None) == [0.25, 0.25 * 0.3]
    assert rejecting.reached(teacher_DV, [1, 2], [0.5, 0.2]) == [0.5, 0.5]  # 0.3 over 0.2 is certain
    own = [float(row[token]) for row, token in zip(teacher_DV, (2, 0), strict=True)]
    assert rejecting.reached(teacher_DV, [2, 0], own) == [1, 1]  # a drafter that is the teacher


@pytest.mark.parametrize("kind", ["eagle3", "fasteagle"])
def test_a_chain_with_the_noise_is_what_an_engine_drafts(
    tiny_draft_bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    engine, sampling = EagerEngine(Bundle.open(tiny_draft_bundles[kind])), Sampling(temperature=1.0, seed=3)
    state = engine.begin(128, sampling)
    engine.prefill(state, np.array(TEXT[: AT - 1], np.int64))
    state.root = TEXT[AT - 1]
    gear = next(one for one in engine.bundle.manifest.gears if (one.tree, one.slots) == ("backbone", 128))
    (draft,) = engine.draft([state], [gear])
    best = [row for row in range(1, draft.tree.rows) if not draft.tree.ranks[draft.tree.paths[row]].any()]
    drafted = draft.tokens_T[best].tolist()
    features, chain, found = features_of(engine, TEXT), rejecting.chain, list[list[int]]()

    def listening(*given: object) -> rejecting.Chain:
        made = chain(*given)  # type: ignore[arg-type]
        found.append(made.tokens)
        return made

    monkeypatch.setattr(rejecting, "chain", listening)
    told = partial(rejecting.accepted, engine, features_nF=features, at=AT, levels=3)
    by_way = told(state=engine.begin(128, sampling), text=TEXT)
    assert found[0] == drafted and len(drafted) == 3
    assert told(state=engine.begin(128, sampling), text=[*TEXT[:AT], *drafted])[rejecting.SHARED] == [1, 1, 1]
    for way in (rejecting.ALONE, rejecting.REJECTION):
        assert 1 >= by_way[way][0] >= by_way[way][1] >= by_way[way][2] > 0


def test_the_section_measures_and_shows(
    tiny_draft_bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "planned_bundle", lambda size, drafter, *_: tiny_draft_bundles[drafter[5:]])
    monkeypatch.setattr(opened, "TUNE_SECONDS", 0.01)
    asked = Ask(temperatures=(0.0, 1.0), limit=1, max_new_tokens=12)
    rows = evaluate(Suite(name="r", tries=1, sections={"rejection": asked}), tmp_path / "run", tmp_path / "work").rows
    assert [(row["at"]["drafter"], row["at"]["temperature"]) for row in rows] == [
        ("demo-eagle3", 1.0),
        ("demo-fasteagle", 1.0),
    ]
    for row in rows:
        assert tuple(row["found"]["tokens"]) == rejecting.WAYS
        assert all(1 <= one[0] <= one[-1] <= 1 + len(one) for one in row["found"]["tokens"].values())
    ((table,),) = ([b for b in c.blocks if isinstance(b, Table)] for c in contents(tmp_path / "run").chapters)
    assert len(table.lines) == 6 and all(len(line) == len(table.columns) for line in table.lines)


def test_a_tree_of_chains_has_the_laws_of_the_texts_it_holds(tiny_draft_bundles: dict[str, Path]) -> None:
    engine, chains = EagerEngine(Bundle.open(tiny_draft_bundles["eagle3"])), ([3, 4, 5], [3, 9, 5])
    state = engine.begin(128, Sampling(temperature=0.7))
    engine.prefill(state, np.array(TEXT[:4], np.int64))
    for found, tokens in zip(rejecting.laws(engine, state, TEXT[:AT], chains), chains, strict=True):
        for level in range(3):
            fresh = engine.begin(128)
            logits_V = engine.prefill(fresh, np.array([*TEXT[:AT], *tokens[:level]], np.int64)).logits_RV[-1]
            wanted = rejecting.softened(logits_V.astype(np.float64), 0.7)
            assert np.allclose(found[level], wanted, rtol=0, atol=1e-5)  # fp32 in another order
    assert state.length == AT - 1
