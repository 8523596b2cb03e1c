"""The application: routes, who may call them, and what every answer carries."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swapserve import __version__
from swapserve.async_engine import EngineDraining
from swapserve.request import RequestRefused
from swapserve.server.chat import chat_completions
from swapserve.server.completions import completions
from swapserve.server.errors import ApiError, handle
from swapserve.server.protocol import DetokenizeRequest, TokenizeRequest
from swapserve.server.state import ServerState, read_body, state_of

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
    # Starlette logs the traceback of what only the handler of Exception takes: these are no surprise.
    expected = (HTTPException, ApiError, EngineDraining, RequestRefused, ValidationError)
    app = Starlette(routes=routes, exception_handlers=dict.fromkeys((Exception, *expected), handle))
    app.add_middleware(Door)
    app.state.server = state
    return app


class Door:
    """Lets in who has a key, and gives each answer the id of its request."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id")
        refused = self._refuse(scope, headers, request_id)
        if refused is not None:
            return await refused.response()(scope, receive, send)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start" and request_id is not None:
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self.app(scope, receive, send_with_id)

    def _refuse(self, scope: Scope, headers: Headers, request_id: str | None) -> ApiError | None:
        if request_id is not None and len(request_id) > MAX_REQUEST_ID:
            return ApiError(400, f"X-Request-Id has {len(request_id)} characters: at most {MAX_REQUEST_ID}")
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
        messages = [message.plain() for message in body.messages]
        text = state.tokenizer.render_chat(messages, add_generation_prompt=body.add_generation_prompt)
        ids = state.tokenizer.encode_chat(text)
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
