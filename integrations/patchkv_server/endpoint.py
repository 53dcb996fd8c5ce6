"""An endpoint that answers: one request from its arrival to the end of its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Protocol

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from patchkv_agents.context.rendering.forms import forms_of
from patchkv_agents.context.rendering.lengths import min_tokens, shown_texts
from patchkv_server.answers import Answered, AnswerWriter, Piece
from patchkv_server.auth import ApiKeys
from patchkv_server.errors import ApiError, api_error, invalid
from patchkv_server.requests import ChatRequest, Sender, read_json
from patchkv_server.service import Event, Ready, Service, Ticket, log_failure

THREAD_HEADER = "x-patchkv-thread"
LONG_TOKEN = 5
"""Characters a token: texts of more for all tokens of a context are counted before the work."""
_CLIENT_GONE = 499  # nobody reads it; in metrics and logs


class Api(Protocol):
    """What requests and answers of one endpoint look like."""

    def user(self, fields: Mapping[str, Any]) -> str | None:
        """Who the client says the user is.

        Raises:
            ApiError: 400, it is no name.
        """
        ...

    def read(self, fields: Mapping[str, Any], sender: Sender) -> tuple[ChatRequest, AnswerWriter]:
        """Check a request; and what writes its answer.

        Raises:
            ApiError: it cannot be answered.
            PatchKVError: messages or tools are malformed.
        """
        ...


Handler = Callable[[Request], Awaitable[Any]]


def guarded(handler: Handler, service: Service) -> Handler:
    """A handler whose errors are `ApiError`s: what uvicorn logs of others may repeat a prompt."""

    async def handle(request: Request) -> Any:
        try:
            return await handler(request)
        except Exception as error:
            shown = api_error(error)
            if shown.status == 500 and shown is not error:
                log_failure("a request failed", error, service.settings.log_content)
            raise shown from None

    return handle


class Reader:
    """Reads bodies of requests, for those who may send them.

    Args:
        service: that has the engine.
        keys: that are accepted.
    """

    def __init__(self, service: Service, keys: ApiKeys) -> None:
        self._service = service
        self._keys = keys

    async def fields(self, request: Request) -> dict[str, Any]:
        """The object in the body of a request.

        Raises:
            ApiError: it may not be sent, does not arrive, or is not one.
            ClientDisconnect: the client went away.
        """
        self._keys.tenant(request.headers)  # before anything is read for somebody unknown
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # Web pages may send other types to this machine without asking first.
            raise ApiError(415, "send JSON, with the header Content-Type: application/json")
        settings = self._service.settings
        try:
            body = await asyncio.wait_for(
                _body(request, settings.max_body_bytes), settings.body_timeout_s
            )
        except asyncio.TimeoutError:
            raise ApiError(
                408,
                f"the body did not arrive within {settings.body_timeout_s:g} s: send it again",
                code="timeout",
                headers={"Connection": "close"},  # the rest of the body may come yet
            ) from None
        return await asyncio.to_thread(read_json, body)

    def sender(self, headers: Mapping[str, str], user: str | None) -> Sender:
        """Where a request comes from.

        Raises:
            ApiError: as `ApiKeys.tenant`.
        """
        return Sender(self._keys.tenant(headers, user), headers.get(THREAD_HEADER))

    def check_length(self, fields: Mapping[str, Any]) -> None:
        """Refuse a context that is far too long before it is copied and rendered.

        Raises:
            ContextTooLongError: it is.
        """
        engine = self._service.engine
        texts: list[str] = []
        for field in ("messages", "input", "prompt"):
            given = fields.get(field)
            if isinstance(given, str):
                texts.append(given)
            elif isinstance(given, list):
                texts += shown_texts(given)
        for field in ("system", "instructions"):
            texts += shown_texts([{"content": fields.get(field)}])
        if sum(map(len, texts)) > LONG_TOKEN * engine.max_tokens:
            tokens = min_tokens(texts, engine.tokenizer, stop=engine.max_tokens)
            engine.check_length(max(1, tokens))


class Endpoint:
    """Answers the requests of one API.

    Args:
        service: that has the engine.
        reader: of bodies.
        api: what they look like.
        model: name of the model, as clients know it.
    """

    def __init__(self, service: Service, reader: Reader, api: Api, model: str) -> None:
        self._model = model
        self._service = service
        self._reader = reader
        self._api = api

    async def __call__(self, request: Request) -> Response:
        """Answer a request.

        Raises:
            ApiError: it cannot be answered.
        """
        try:
            fields = await self._reader.fields(request)
            asked, writer = await asyncio.to_thread(self._parse, fields, request.headers)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)
        ticket = self._service.submit(asked)
        answering = _Answering(self._service, ticket, request)
        try:
            ready = await answering.event()
            while not isinstance(ready, Ready | BaseException):
                ready = await answering.event()
            if isinstance(ready, Ready) and asked.stream:
                answering.watch_no_longer()  # Starlette does so while it streams
                return _Stream(
                    answering, self._stream(answering, writer), thread=_header(ready.thread)
                )
            return await self._whole(answering, writer)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)
        finally:
            if not asked.stream or answering.is_watching:
                answering.end()

    def _parse(
        self, fields: Mapping[str, Any], headers: Mapping[str, str]
    ) -> tuple[ChatRequest, AnswerWriter]:
        engine = self._service.engine
        self._reader.check_length(fields)
        sender = self._reader.sender(headers, self._api.user(fields))
        asked, writer = self._api.read(fields, sender)
        forms = forms_of(engine.tokenizer)
        if asked.tools and asked.tool_choice != "none" and not (forms.tools or forms.calls):
            raise invalid(
                f"the chat template of {self._model!r} shows no tools, so the model would "
                "never see them: leave tools out, or serve a model whose template knows them",
                "tools",
                "unsupported_parameter",
            )
        return asked, writer

    async def _whole(self, answering: _Answering, writer: AnswerWriter) -> Response:
        while not isinstance(event := await answering.event(), Answered):
            pass
        return JSONResponse(writer.whole(event), headers={THREAD_HEADER: _header(event.thread)})

    async def _stream(self, answering: _Answering, writer: AnswerWriter) -> AsyncIterator[bytes]:
        try:
            for line in writer.start():
                yield line
            while True:
                event = await answering.event(within=self._service.settings.keep_alive_s)
                if event is None:
                    yield writer.keep_alive
                elif isinstance(event, Piece):
                    for line in writer.piece(event):
                        yield line
                elif isinstance(event, Answered):
                    for line in writer.end(event):
                        yield line
                    return
        except Exception as error:
            shown = api_error(error)
            if shown is not error:
                log_failure("a request failed", error, self._service.settings.log_content)
            yield writer.error(shown)


class _Stream(StreamingResponse):
    """Server-sent events. However it ends, the request is given up if it is not done."""

    def __init__(self, answering: _Answering, events: AsyncIterator[bytes], *, thread: str) -> None:
        headers = {THREAD_HEADER: thread, "Cache-Control": "no-cache"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._answering = answering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answering.end()


class _Answering:
    """A ticket, with the patience of its client."""

    def __init__(self, service: Service, ticket: Ticket, request: Request) -> None:
        self._service = service
        self._ticket = ticket
        self._deadline = ticket.arrived + service.settings.timeout_s
        self._next: asyncio.Task[Event] | None = None
        self._gone: asyncio.Task[None] | None = asyncio.create_task(_disconnect(request))

    @property
    def is_watching(self) -> bool:
        """Whether it is noticed here that the client goes away."""
        return self._gone is not None

    async def event(self, within: float | None = None) -> Event | None:
        """What happens next; None if nothing does within so many seconds.

        Raises:
            ApiError: what happened is an error; or 504, the time is up.
            ClientDisconnect: the client went away.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._ticket.next())
        left = self._deadline - time.monotonic()
        waits = {self._next} if self._gone is None else {self._next, self._gone}
        done, _ = await asyncio.wait(
            waits,
            timeout=max(0.0, left if within is None else min(left, within)),
            return_when=asyncio.FIRST_COMPLETED,
        )
        if self._next in done:
            event, self._next = self._next.result(), None
            if isinstance(event, BaseException):
                error = api_error(event)
                if error.status == 500:
                    content = self._service.settings.log_content
                    log_failure("a request failed", event, content)
                raise error from None
            return event
        if done:
            raise ClientDisconnect
        if time.monotonic() >= self._deadline:
            raise ApiError(
                504,
                f"there was no whole answer within {self._service.settings.timeout_s:g} s: ask for "
                "fewer tokens, or start the server with a larger --timeout-s",
                code="timeout",
            )
        return None

    def watch_no_longer(self) -> None:
        """Leave it to somebody else to notice that the client goes away."""
        if self._gone is not None:
            self._gone.cancel()
            self._gone = None

    def end(self) -> None:
        """Nobody waits any more."""
        self._service.cancel(self._ticket)
        self.watch_no_longer()
        if self._next is not None:
            self._next.cancel()


async def _disconnect(request: Request) -> None:
    """Return when the client goes away. The body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request, most: int) -> bytes:
    length = request.headers.get("content-length", "")
    too_large = ApiError(
        413,
        f"the body has more than {most} bytes: shorten the messages, or start the server with a "
        "larger --max-body-bytes",
        code="request_too_large",
    )
    if length.isdigit() and int(length) > most:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise too_large
    return bytes(body)


def _header(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()
