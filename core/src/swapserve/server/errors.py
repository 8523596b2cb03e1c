"""Errors as OpenAI's clients expect them: one JSON object with a sentence, a type, a field and a status code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from swapserve.async_engine import EngineDraining
from swapserve.request import RequestRefused

TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 503: "unavailable_error"}


class ApiError(Exception):
    """A request that gets an error instead of an answer."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers: Mapping[str, str] = {}

    def body(self) -> dict[str, Any]:
        """The error object, as it stands in a response or in a stream."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "internal_server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code or self.status}}

    def response(self) -> Response:
        headers = {"Retry-After": "1"} if self.status == 503 else {}
        return JSONResponse(self.body(), self.status, {**headers, **self.headers})


def as_api_error(error: Exception) -> ApiError:
    """What any exception of a handler means to the client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestRefused):
        return ApiError(400, str(error), error.param)
    if isinstance(error, EngineDraining):
        return ApiError(503, str(error))
    if isinstance(error, ValidationError):
        return _from_validation(error)
    if isinstance(error, ClientDisconnect):
        return ApiError(400, "the connection was closed before the whole body had come")
    if isinstance(error, HTTPException):
        made = ApiError(error.status_code, str(error.detail))
        made.headers = error.headers or {}
        return made
    return ApiError(500, f"the server failed: {type(error).__name__}")


def _from_validation(error: ValidationError) -> ApiError:
    """One sentence for the first thing that is wrong, and how many more there are."""
    problems = error.errors()
    first = problems[0]
    path = [str(part) for part in first["loc"] if not (isinstance(part, str) and ("[" in part or "(" in part))]
    # Members of a union appear in the path under the name of their type: the field itself comes first.
    field = path[0] if path else None
    if first["type"] == "extra_forbidden":
        name = ".".join(path)
        message = f"the field {name!r} is unknown or not supported here: leave it out"
    else:
        message = f"{'.'.join(path) or 'the body'}: {first['msg'][:1].lower()}{first['msg'][1:]}"
        message = message.replace("value error, ", "")
    if len(problems) > 1:
        others = sorted({str(problem["loc"][0]) for problem in problems[1:] if problem["loc"]} - {field})
        message += f" (also wrong: {', '.join(others)})" if others else ""
    return ApiError(400, message, field)


async def handle(request: Request, error: Exception) -> Response:
    """Starlette's exception handler for what is expected."""
    made = as_api_error(error)
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        allowed = made.headers.get("Allow")
        made.message = f"{request.method} {request.url.path}: " + (
            f"this path takes {allowed}" if allowed else "there is no such path here"
        )
    return made.response()
