"""The HTTP side: one loopback address for all sessions of a run; the API key says which session a request is of.

    Authorization: Bearer KEY, x-api-key: KEY, or /s/KEY before the path for a harness that cannot set a key

A key is drawn for each session and means nothing once that is over. Nothing else listens here, and no key is written
anywhere but into the environment of the harness it is for. Called by the collector.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable
from typing import Self, TypeVar

import msgspec
from aiohttp import web

from megathunder.rollout.endpoint.anthropic_messages import MessagesRequest, events, message
from megathunder.rollout.endpoint.chat_completions import ChatRequest, EndRequest, ExecRequest, chunks, completion
from megathunder.rollout.endpoint.requests import Answer, Refused
from megathunder.rollout.endpoint.session import Session

Body = TypeVar("Body", bound=msgspec.Struct)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MAX_BODY_BYTES = 64 << 20
HOST = "127.0.0.1"
KINDS = {401: "authentication_error", 403: "permission_error", 503: "api_error"}


class AgentEndpoint:
    """`async with AgentEndpoint() as endpoint:`; `url` ends in /v1."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[refusals])
        for prefix in ("/v1", "/s/{key}/v1"):
            app.router.add_get(f"{prefix}/models", self._models)
            app.router.add_post(f"{prefix}/chat/completions", self._chat)
            app.router.add_post(f"{prefix}/messages", self._messages)
            app.router.add_post(f"{prefix}/messages/count_tokens", self._count_tokens)
            app.router.add_get(f"{prefix}/session", self._task)
            app.router.add_post(f"{prefix}/session/exec", self._exec)
            app.router.add_post(f"{prefix}/session/end", self._end)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"http://{HOST}:{port}/v1"
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._runner.cleanup()

    def open(self, session: Session) -> str:
        """The key of a new session."""
        key = f"mt-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        return key

    def close(self, key: str) -> None:
        """The key means nothing from here on."""
        del self._sessions[key]

    def _session(self, request: web.Request) -> Session:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        key = request.match_info.get("key") or request.headers.get("x-api-key") or bearer
        session = self._sessions.get(key)
        if session is None:
            raise Refused(401, "invalid_api_key", "no open session has this key")
        return session

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self._session(request).model, "object": "model", "created": 0, "owned_by": "megathunder"}
        return web.json_response({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        body = await decoded(request, ChatRequest)
        answer = await session.complete(body.checked())
        if not body.stream:
            return await deliver(request, session, answer, completion(session.model, answer))
        lines = [f"data: {json.dumps(event)}\n\n" for event in chunks(session.model, answer, usage=body.wants_usage)]
        return await deliver(request, session, answer, [*lines, "data: [DONE]\n\n"])

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        body = await decoded(request, MessagesRequest)
        answer = await session.complete(body.checked())
        if not body.stream:
            return await deliver(request, session, answer, message(session.model, answer))
        said = events(session.model, answer)
        lines = [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in said]
        return await deliver(request, session, answer, lines)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        session = self._session(request)
        body = await decoded(request, MessagesRequest)
        return web.json_response({"input_tokens": session.count_tokens(body.checked())})

    async def _task(self, request: web.Request) -> web.Response:
        return encoded(self._session(request).task)

    async def _exec(self, request: web.Request) -> web.Response:
        session = self._session(request)
        body = await decoded(request, ExecRequest)
        return encoded(await session.execute(body.command, body.checked_timeout_s))

    async def _end(self, request: web.Request) -> web.Response:
        session = self._session(request)
        await session.end(await decoded(request, EndRequest))
        return web.json_response({})


@web.middleware
async def refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refused as OpenAI says it, or Anthropic where its form is spoken."""
    try:
        return await handler(request)
    except Refused as refusal:
        kind = KINDS.get(refusal.status, "invalid_request_error")
        error = {"message": refusal.message, "type": kind, "code": refusal.code, "param": refusal.field or None}
        anthropic = "/v1/messages" in request.path
        return web.json_response(({"type": "error"} if anthropic else {}) | {"error": error}, status=refusal.status)


async def decoded(request: web.Request, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except msgspec.DecodeError as error:
        field = str(error).rpartition("`$.")[2].rstrip("`") if "`$." in str(error) else ""
        raise Refused(400, "invalid_request", str(error), field) from error
    except RecursionError:
        raise Refused(400, "invalid_request", "objects or lists are nested too deeply") from None


def encoded(answer: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(answer, enc_hook=str), content_type="application/json")


async def deliver(
    request: web.Request, session: Session, answer: Answer, body: dict[str, object] | list[str]
) -> web.StreamResponse:
    """Send an answer, as JSON or as the lines of a stream; the session hears when it has left."""
    if isinstance(body, dict):
        response: web.StreamResponse = web.json_response(body)
        await response.prepare(request)
    else:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for line in body:
            await response.write(line.encode())
    await response.write_eof()
    if request.transport is not None and not request.transport.is_closing():
        session.delivered(answer)
    return response
