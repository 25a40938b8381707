"""The description of the routes, as those who generate clients take it: nothing is answered by a fault, and no answer
contradicts it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from draftwood.tools.serve.schema import openapi

schemathesis = pytest.importorskip("schemathesis")

RIGHT, WRONG = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
# Without a body there is nothing to get wrong.
CASES = [
    (path, method, way)
    for path, methods in openapi(False)["paths"].items()
    for method in methods
    for way in ((RIGHT, WRONG) if method == "post" else (RIGHT,))
]
CHECKS = [
    schemathesis.checks.not_a_server_error,
    schemathesis.checks.status_code_conformance,
    schemathesis.checks.content_type_conformance,
    schemathesis.checks.response_schema_conformance,
]


@pytest.fixture(scope="module")
def described(started: Callable[..., Any], tiny_bundle: Path) -> Any:
    server = started(f"tiny={tiny_bundle}", "--limit", "tokens=4", "--limit", "body=65536", "--threads", 1)
    yield schemathesis.openapi.from_url(server.url + "/openapi.json")
    assert server.ask("/health")[1]["models"]["tiny"]["restarts"] == 0


@pytest.mark.parametrize(("path", "method", "way"), CASES, ids=[f"{path} {way.value}" for path, _, way in CASES])
def test_no_fault_and_no_answer_against_the_schema(described: Any, path: str, method: str, way: Any) -> None:
    examples = 30 if method == "post" else 3

    @settings(max_examples=examples, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=described[path][method].as_strategy(generation_mode=way))
    def hold(case: Any) -> None:
        case.call_and_validate(checks=CHECKS, timeout=300)

    hold()
