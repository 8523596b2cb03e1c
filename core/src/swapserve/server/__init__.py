"""The OpenAI-compatible HTTP server: Starlette for the routes, uvicorn for the sockets."""
