"""The application: routes, who may call them, and what every answer carries."""

from __future__ import annotations

import hmac
import logging
import time
import uuid
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swapserve import __version__
from swapserve.async_engine import EngineDraining
from swapserve.request import RequestRefused
from swapserve.server.chat import chat_completions, rendered
from swapserve.server.completions import completions
from swapserve.server.errors import ApiError, as_api_error, handle
from swapserve.server.protocol import DetokenizeRequest, TokenizeRequest
from swapserve.server.state import ServerState, read_body, state_of

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ping", "/version"})
"""What may be asked without a key."""
MAX_REQUEST_ID = 256


def create_app(state: ServerState) -> Starlette:
    """The ASGI application of one server."""
    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/health", health),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/version", version),
        Route("/load", load),
        Route("/server_info", server_info),
        Route("/policies", policies),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"]),
    ]
    expected = (HTTPException, ApiError, EngineDraining, RequestRefused, ValidationError, ClientDisconnect)
    app = Starlette(routes=routes, exception_handlers=dict.fromkeys(expected, handle))
    app.add_middleware(Door)
    app.state.server = state
    return app


class Door:
    """Lets in who has a key, gives each answer the id of its request, and answers when a handler fails."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id")
        too_long = request_id is not None and len(request_id) > MAX_REQUEST_ID
        echoed, begun = uuid.uuid4().hex if request_id is None or too_long else request_id, False

        async def send_with_id(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                MutableHeaders(scope=message)["X-Request-Id"] = echoed
            await send(message)

        if too_long:
            refused = ApiError(400, f"X-Request-Id has {len(request_id or '')} characters: at most {MAX_REQUEST_ID}")
            return await refused.response()(scope, receive, send_with_id)
        if (refused_key := self._refuse(scope, headers)) is not None:
            return await refused_key.response()(scope, receive, send_with_id)
        try:
            await self.app(scope, receive, send_with_id)
        except Exception as error:
            if begun:
                raise
            logger.exception("%s %s failed", scope["method"], scope["path"])
            await as_api_error(error).response()(scope, receive, send_with_id)

    def _refuse(self, scope: Scope, headers: Headers) -> ApiError | None:
        keys = scope["app"].state.server.api_keys
        if not keys or scope["path"] in OPEN_PATHS:
            return None
        given = headers.get("authorization", "").removeprefix("Bearer ").encode()
        # Every key is compared, whatever the first says: the time tells nothing.
        right = [hmac.compare_digest(given, key.encode()) for key in keys]
        if any(right):
            return None
        return ApiError(401, "the API key is missing or wrong: send Authorization: Bearer KEY", code="invalid_api_key")


def _card(state: ServerState, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "swapserve",
        "root": state.engine.engine.model.name,
        "parent": None,
        "max_model_len": state.engine.engine.limits.max_model_len,
    }


async def models(request: Request) -> Response:
    """`GET /v1/models`."""
    state = state_of(request)
    return JSONResponse({"object": "list", "data": [_card(state, name) for name in state.model_names]})


async def model(request: Request) -> Response:
    """`GET /v1/models/NAME`."""
    state = state_of(request)
    return JSONResponse(_card(state, state.check_model(request.path_params["name"])))


async def health(request: Request) -> Response:
    """200 while requests are taken; 503 while shutting down and when the engine has died."""
    engine = state_of(request).engine
    if engine.draining or not engine.alive:
        raise ApiError(503, engine.death or "the server is shutting down")
    return JSONResponse({"status": "ok"})


async def version(_: Request) -> Response:
    return JSONResponse({"version": __version__})


async def load(request: Request) -> Response:
    """How busy the server is, now."""
    engine = state_of(request).engine
    return JSONResponse(
        {
            "server_load": engine.num_open,
            "num_requests_running": engine.num_running,
            "num_requests_waiting": engine.num_waiting,
            "kv_cache_usage_perc": engine.kv_usage,
            "num_preemptions": engine.engine.num_preemptions,
            "num_failed": engine.engine.num_failed,
            "num_slow_readers": engine.num_slow_readers,
            "request_success": engine.num_finished,
        }
    )


async def server_info(request: Request) -> Response:
    """What was chosen at start."""
    state = state_of(request)
    return JSONResponse({"version": __version__, "models": list(state.model_names), **state.info})


async def policies(request: Request) -> Response:
    """The policies that run, with their options."""
    engine = state_of(request).engine.engine
    parts: dict[str, Any] = {"scheduler": engine.scheduler, "kv": engine.kv, "speculator": engine.speculator}
    return JSONResponse(
        {kind: {"name": part.name, "options": part.options.model_dump(mode="json")} for kind, part in parts.items()}
    )


async def tokenize(request: Request) -> Response:
    """`POST /tokenize`: the token ids of a text or of a conversation, as a prompt would have them."""
    state = state_of(request)
    body = await read_body(request, TokenizeRequest, state.max_body_bytes)
    state.check_model(body.model)
    if body.messages is not None:
        ids = await rendered(state, body, body.messages)
    else:
        ids = await state.encode(body.prompt or "", body.add_special_tokens)
    made = {"count": len(ids), "max_model_len": state.engine.engine.limits.max_model_len, "tokens": ids}
    if body.return_token_strs:
        made["token_strs"] = [state.tokenizer.token_text(token) for token in ids]
    return JSONResponse(made)


async def detokenize(request: Request) -> Response:
    """`POST /detokenize`: the text of token ids."""
    state = state_of(request)
    body = await read_body(request, DetokenizeRequest, state.max_body_bytes)
    state.check_model(body.model)
    size = state.engine.engine.model.vocab_size
    if wrong := next((token for token in body.tokens if not 0 <= token < size), None):
        raise ApiError(400, f"tokens: token id {wrong} is outside the vocabulary; ids are 0 to {size - 1}", "tokens")
    return JSONResponse({"prompt": state.tokenizer.decode(body.tokens)})


async def reset_prefix_cache(request: Request) -> Response:
    """Forget what is kept for sharing; 409 while live requests hold some of it."""
    engine = state_of(request).engine
    reset: Callable[[], bool] = engine.engine.kv.reset
    if not await engine.run_in_engine(reset):
        raise ApiError(409, "some of the prefix cache is held by requests that run: try again when they have ended")
    return JSONResponse({"status": "ok"})
