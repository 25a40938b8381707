"""The OpenAPI description of the routes, drawn from the types that read and write their bodies."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from draftwood.tools.serve import answers, bodies
from draftwood.tools.serve.errors import ErrorAnswer
from draftwood.version import __version__

_POSTS: dict[str, tuple[type, tuple[type, ...]]] = {
    "/v1/chat/completions": (bodies.ChatBody, (answers.ChatAnswer, answers.ChatChunk)),
    "/v1/completions": (bodies.CompletionBody, (answers.TextAnswer, answers.TextAnswer)),
    "/tokenize": (bodies.TokenizeBody, (answers.Tokenized,)),
}
_GETS: dict[str, type | None] = {
    "/health": answers.Health,
    "/ping": None,
    "/version": answers.Version,
    "/v1/models": answers.ModelList,
    "/v1/models/{name}": answers.ModelCard,
}
_REASONS = {
    400: "cannot be served as it is",
    401: "no key, or a wrong one",
    403: "another host",
    404: "no such model",
    408: "the body came too slowly",
    413: "the body is too large",
    415: "the body is not JSON, or compressed",
    429: "too many of this key at the same time",
    500: "the engine failed",
    503: "not ready, full, or ending",
}


@cache
def openapi(keys: bool) -> dict[str, Any]:
    """The description; ``keys`` says whether requests need one."""
    types = [kind for body, answers in _POSTS.values() for kind in (body, *answers)]
    types += [kind for kind in _GETS.values() if kind is not None] + [ErrorAnswer]
    _, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {path: {"get": _get(path, kind)} for path, kind in _GETS.items()}
    paths |= {path: {"post": _post(body, answers)} for path, (body, answers) in _POSTS.items()}
    metrics = {"description": "Prometheus' metrics", "content": {"text/plain": {"schema": {"type": "string"}}}}
    paths["/metrics"] = {"get": {"responses": {"200": metrics} | _errors(401, 403)}}
    _, asked = msgspec.json.schema_components([body for body, _ in _POSTS.values()])
    for name in asked:  # unknown names are refused
        components[name]["additionalProperties"] = False
    for body, _ in _POSTS.values():
        components[body.__name__]["properties"] |= {name: {} for name in sorted(bodies.PASS)}
    schemas: dict[str, Any] = {"schemas": components}
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Draftwood", "version": __version__},
        "paths": paths,
        "components": schemas,
    }
    if keys:
        schemas["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{"key": []}]
        paths["/health"]["get"]["security"] = []
    return described


def _get(path: str, kind: type | None) -> dict[str, Any]:
    described: dict[str, Any] = {"responses": {"200": _answer(kind)} | _errors(401, 403)}
    if path == "/health":
        described["responses"]["503"] = _answer(kind)
    if path == "/ping":
        described["responses"]["503"] = {"description": "not ready"}
    if "{name}" in path:
        described["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
        described["responses"] |= _errors(404)
    return described


def _post(body: type, answers: tuple[type, ...]) -> dict[str, Any]:
    answer = _answer(answers[0])
    if len(answers) > 1:
        # Before OpenAPI 3.2 it describes each event.
        event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
        answer["content"]["text/event-stream"] = {"schema": event}
    content = {"application/json": {"schema": _reference(body)}}
    return {"requestBody": {"required": True, "content": content}, "responses": {"200": answer} | _errors(*_REASONS)}


def _answer(kind: type | None) -> dict[str, Any]:
    if kind is None:
        return {"description": "ready"}
    return {"description": kind.__name__, "content": {"application/json": {"schema": _reference(kind)}}}


def _errors(*statuses: int) -> dict[str, Any]:
    return {str(status): _answer(ErrorAnswer) | {"description": _REASONS[status]} for status in statuses}


def _reference(kind: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
