"""Errors as clients of OpenAI's interface expect them."""

from __future__ import annotations

import msgspec
from msgspec import Struct
from starlette.responses import Response

from draftwood.errors import RequestError


class ErrorBody(Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(Struct):
    """The body of every answer that is no success."""

    error: ErrorBody


class RequestRefused(Exception):
    """A request that is answered with an error."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        code: str | None = None,
        retry: int | None = None,
    ) -> None:
        message = str(RequestError(message))  # one printable line, with any quotes of the request
        super().__init__(message)
        self.status, self.retry = status, retry
        self.body = ErrorAnswer(ErrorBody(message, type, param, code))

    def response(self) -> Response:
        headers = {"retry-after": str(self.retry)} if self.retry is not None else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return Response(msgspec.json.encode(self.body), self.status, headers, "application/json")


def unavailable(message: str, code: str) -> RequestRefused:
    """503: try again soon."""
    return RequestRefused(message, status=503, type="server_error", code=code, retry=1)


def failed(message: str) -> RequestRefused:
    """500: a text that our side could not finish."""
    return RequestRefused(message, status=500, type="server_error", code="engine_failed")
