"""The ASGI application: routes, keys, and the headers of every answer."""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftwood.tools.serve import metrics as prometheus
from draftwood.tools.serve.answers import Health, ModelCard, ModelHealth, ModelList, Tokenized, Version
from draftwood.tools.serve.asks import chat_of, tools
from draftwood.tools.serve.bodies import OF_CHATS, ChatBody, CompletionBody, TokenizeBody, parse
from draftwood.tools.serve.completions import Completion
from draftwood.tools.serve.errors import RequestRefused, failed, unavailable
from draftwood.tools.serve.http import Gone, read_body, send_events, while_connected
from draftwood.tools.serve.messages import Encode, Encoded, Refused
from draftwood.tools.serve.model import Full, ServedModel
from draftwood.tools.serve.schema import openapi
from draftwood.version import __version__

log = logging.getLogger("draftwood.serve")

SESSION = b"x-session-id"
# The form of a client's own name for its request.
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
PAGE = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of an operator."""

    # Without keys, requests need none.
    keys: tuple[str, ...] = ()
    most_body: int = 4 << 20
    # Tokens of an answer, even if a client names none.
    most_tokens: int = 4096
    # Seconds in which a request has to be whole.
    deadline: float = 20.0
    # Requests of one key at the same time; 0 is any number.
    per_key: int = 0
    origins: tuple[str, ...] = ()
    # Whether requests may name any host, as they do through a proxy.
    any_host: bool = False


class Service:
    """The models and the other needs of the routes."""

    def __init__(self, models: Mapping[str, ServedModel], settings: Settings, metrics: prometheus.Metrics) -> None:
        self.models, self.settings, self.metrics = dict(models), settings, metrics
        self.draining, self.created = False, int(time.time())
        self._in_flight: Counter[str] = Counter()

    @property
    def ready(self) -> bool:
        """Whether requests can be served now."""
        return not self.draining and all(model.ready for model in self.models.values())

    @property
    def busy(self) -> int:
        return sum(model.busy for model in self.models.values())

    def model(self, name: str | None) -> ServedModel:
        """By the request's ``model``, which may be left out if there is one alone."""
        if name is None and len(self.models) == 1:
            return next(iter(self.models.values()))
        if name is None or name not in self.models:
            known = ", ".join(self.models)
            got = "none" if name is None else f"{name:.80}"
            raise RequestRefused(
                f"model: expected one of {known}, got {got}", "model", status=404, code="model_not_found"
            )
        return self.models[name]

    def app(self) -> Starlette:
        """All routes, guarded by the keys."""
        routes = [
            Route("/health", self.health, methods=["GET"]),
            Route("/ping", self.ping, methods=["GET", "POST"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/metrics", self.show_metrics, methods=["GET"]),
            Route("/openapi.json", self.schema, methods=["GET"]),
            Route("/v1/models", self.list_models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.show_model, methods=["GET"]),
            Route("/tokenize", _Posted(self.settings, self.tokenize), methods=["POST"]),
            Route("/v1/chat/completions", _Posted(self.settings, self.chat), methods=["POST"]),
            Route("/v1/completions", _Posted(self.settings, self.complete), methods=["POST"]),
        ]
        routes += [Route(path, self.page, methods=["GET"]) for path in PAGE]
        return Starlette(
            routes=routes,
            middleware=[Middleware(Guard, service=self)],
            exception_handlers={RequestRefused: _refuse, HTTPException: _no_route, Exception: _broken},
        )

    async def health(self, request: Request) -> Response:
        models = {
            name: msgspec.convert(model, ModelHealth, from_attributes=True) for name, model in self.models.items()
        }
        status = "draining" if self.draining else "ok" if self.ready else "starting"
        return _json(Health(status=status, models=models), 200 if self.ready else 503)  # type: ignore[arg-type]

    async def ping(self, request: Request) -> Response:
        return Response(status_code=200 if self.ready else 503)

    async def version(self, request: Request) -> Response:
        return _json(Version(__version__))

    async def show_metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type=prometheus.CONTENT_TYPE)

    async def schema(self, request: Request) -> Response:
        return Response(json.dumps(openapi(bool(self.settings.keys))), media_type="application/json")

    async def list_models(self, request: Request) -> Response:
        return _json(ModelList([self._card(model) for model in self.models.values()]))

    async def show_model(self, request: Request) -> Response:
        return _json(self._card(self.model(request.path_params["name"])))

    def _card(self, model: ServedModel) -> ModelCard:
        context = model.facts.context if model.facts else None
        return ModelCard(id=model.name, created=self.created, max_model_len=context)

    async def page(self, request: Request) -> Response:
        name, kind = PAGE[request.scope["path"]]  # not its URL, into which starlette 1.0.0 puts any Host
        content = files("draftwood.tools.serve").joinpath("page", name).read_bytes()
        return Response(content, headers=PAGE_HEADERS | {"content-type": kind})

    async def tokenize(self, content: bytes, receive: Receive, send: Send, scope: Scope) -> None:
        body = parse(content, TokenizeBody)
        model = self.model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestRefused("prompt: expected either prompt or messages", "prompt")
        if body.messages is not None and body.add_special_tokens:
            text = "add_special_tokens: a chat has those that its template writes; leave it out"
            raise RequestRefused(text, "add_special_tokens")
        for name in OF_CHATS if body.messages is None else ():
            if getattr(body, name) not in (None, False):
                raise RequestRefused(f"{name}: is of a chat; send messages and no prompt", name)
        calls = model.facts.calls if model.facts else None
        prompt = chat_of(body, tools(body, calls)) if body.prompt is None else body.prompt
        try:
            encoded = await model.encode(Encode(0, prompt, body.add_special_tokens is not False))
        except Full:
            model.metrics.rejected()
            raise unavailable("as many prompts as may wait do wait; try again soon", "queue_full") from None
        if isinstance(encoded, Encoded):
            context = model.facts.context if model.facts else None
            return await _json(Tokenized(encoded.tokens, len(encoded.tokens), context))(scope, receive, send)
        if isinstance(encoded, Refused):
            raise RequestRefused(encoded.message, "prompt" if body.messages is None else "messages")
        raise failed(encoded.message)

    async def chat(self, content: bytes, receive: Receive, send: Send, scope: Scope) -> None:
        await self._complete(parse(content, ChatBody), receive, send, scope)

    async def complete(self, content: bytes, receive: Receive, send: Send, scope: Scope) -> None:
        await self._complete(parse(content, CompletionBody), receive, send, scope)

    async def _complete(self, body: ChatBody | CompletionBody, receive: Receive, send: Send, scope: Scope) -> None:
        model = self.model(body.model)
        if self.draining:
            raise unavailable("the server is ending", "draining")
        key = scope["state"].get("key", "")
        if self.settings.per_key and self._in_flight[key] >= self.settings.per_key:
            model.metrics.rejected("per_key")
            text = f"at most {self.settings.per_key} requests of one key at the same time"
            raise RequestRefused(text, status=429, type="rate_limit_error", code="per_key", retry=1)
        self._in_flight[key] += 1
        try:
            session = dict(scope["headers"]).get(SESSION, b"").decode("latin-1")
            completion = Completion(model, body, self.settings.most_tokens, session)
            scope["state"]["told"] = completion
            if body.stream:
                await while_connected(receive, send_events(completion.chunks(), scope["state"]["headers"], send))
            else:
                answer = await while_connected(receive, completion.whole())
                await _json(answer)(scope, receive, send)
        finally:
            self._in_flight[key] -= 1
            if not self._in_flight[key]:
                del self._in_flight[key]


class _Posted:
    """A route with a body, as an ASGI application of its own: it watches whether its client is still there."""

    def __init__(self, settings: Settings, answer: Callable[[bytes, Receive, Send, Scope], Awaitable[None]]) -> None:
        self._settings, self._answer = settings, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        settings = self._settings
        try:
            content = await read_body(scope, receive, settings.most_body, settings.deadline)
            await self._answer(content, receive, send, scope)
        except RequestRefused as error:
            # The rest of a body is dropped as it comes, up to the deadline: closing would reset the connection, and the
            # client, which reads nothing while it sends, would never know why.
            await error.response()(scope, receive, send)


class Guard:
    """Before any route: an id for the request, the key, the host; after it a line in the log, without its text."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = _shared(app, service.settings.origins), service
        self._keys = [key.encode() for key in service.settings.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        proposed = headers.get(b"x-request-id", "")
        request_id = proposed if _REQUEST_ID.fullmatch(proposed) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["headers"], status, began = {"x-request-id": request_id}, 0, time.monotonic()

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                named = {name.lower() for name, _ in message["headers"]}
                if b"x-request-id" not in named:
                    message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            refused = self._refusal(scope, headers, state)
            app = self._app if refused is None else _shared(refused.response(), self._service.settings.origins)
            await app(scope, receive, answer)
        except Gone:
            status = status or 499
        finally:
            _log(scope, state, request_id, status, time.monotonic() - began)

    def _refusal(self, scope: Scope, headers: Mapping[bytes, str], state: dict[str, Any]) -> RequestRefused | None:
        settings, path = self._service.settings, scope["path"]
        # Without a key a page of another origin could reach a local server by a name that resolves to it. A browser
        # always says which; HTTP/1.0, which checks of a proxy speak, need not.
        host = headers.get(b"host")
        if host is not None and not (settings.any_host or self._keys or is_local(re.sub(r":\d+$", "", host))):
            return RequestRefused("host: expected this machine's own name, got another", status=403)
        if not self._keys or path == "/health" or path in PAGE:
            return None
        kind, _, presented = headers.get(b"authorization", "").partition(" ")
        # All are compared, and in constant time: how long it takes tells nothing.
        equal = [hmac.compare_digest(presented.strip().encode(), key) for key in self._keys]
        if kind.lower() != "bearer" or not any(equal):
            text = "authorization: expected 'Bearer KEY' with a key of this server"
            return RequestRefused(text, status=401, type="authentication_error", code="invalid_api_key")
        state["key"] = str(equal.index(True))
        return None


def _shared(app: ASGIApp, origins: tuple[str, ...]) -> ASGIApp:
    """The application for web pages of some origins. Browsers ask for leave first, and without a key. They show a page
    no answer that does not name its origin, a refusal of its key neither."""
    return CORSMiddleware(app, origins, ["GET", "POST"], ["*"], allow_private_network=True) if origins else app


def is_local(host: str) -> bool:
    """Whether a host is this machine alone, whoever says what names mean: a loopback address, or localhost."""
    try:
        return ipaddress.ip_address(re.sub(r"^\[(.*)\]$", r"\1", host)).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _log(scope: Scope, state: dict[str, Any], request_id: str, status: int, seconds: float) -> None:
    answered = state.get("told")
    tokens = ""
    if isinstance(answered, Completion):
        usage = answered.usage
        tokens = f" {answered.model.name} prompt={usage.prompt_tokens} tokens={usage.completion_tokens}"
    path = scope["path"].encode("ascii", "backslashreplace").decode()[:200]
    level = logging.DEBUG if path in ("/health", "/ping", "/metrics") else logging.INFO
    log.log(level, "%s %s %r %d %.0f ms%s", request_id, scope["method"], path, status, seconds * 1e3, tokens)


def _json(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRefused)
    return error.response()


async def _no_route(request: Request, error: Exception) -> Response:
    """404 or 405 with the paths or the method that would do: a client's base URL may lack /v1, or name another API."""
    assert isinstance(error, HTTPException)
    path = ascii(request.scope["path"][:80])[1:-1]
    paths = [route.path for route in request.app.routes if route.path not in PAGE and "{" not in route.path]
    if error.status_code == 405:
        message = f"{path}: expected {(error.headers or {})['Allow']}, got {request.method:.20}"
    elif f"/v1{path}" in paths:
        message = f"no path {path}; did you mean /v1{path}? (a client's base URL ends in /v1)"
    else:
        message = f"no path {path}; expected one of {', '.join(paths)}"
    response = RequestRefused(message, status=error.status_code).response()
    response.headers.update(error.headers or {})
    return response


async def _broken(request: Request, error: Exception) -> Response:
    return failed("the server failed; its log says how").response()
