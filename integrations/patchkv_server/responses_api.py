"""OpenAI's Responses API: `/v1/responses`, and responses that are kept for later requests."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request

from patchkv_agents.context import Message
from patchkv_server.answers import Answered, AnswerWriter
from patchkv_server.chat_requests import check_model
from patchkv_server.endpoint import Endpoint, Reader, guarded
from patchkv_server.errors import ApiError, invalid
from patchkv_server.requests import ChatRequest, Sender, checked_name
from patchkv_server.responses_answers import ResponsesWriter
from patchkv_server.responses_requests import input_messages, read_body, request_of
from patchkv_server.service import Service

PATH = "/v1/responses"
MAX_KEPT = 4096
"""Responses that are kept."""
KEPT_S = 24 * 3600.0
"""Seconds for which a response is kept."""


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response that later requests may go on from.

    Attributes:
        tenant: whose it is; nobody else can use it.
        thread: name of its conversation.
        messages: of its context behind the instructions, with the answer.
        response: as it was sent.
        expires: time of the clock.
    """

    tenant: str
    thread: str
    messages: tuple[Message, ...]
    response: dict[str, Any]
    expires: float


class KeptResponses:
    """Responses by their ids, which cannot be guessed; in memory, the newest of them.

    Args:
        clock: seconds, such as `time.monotonic`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, KeptResponse] = OrderedDict()

    def keep(
        self,
        response: dict[str, Any],
        *,
        tenant: str,
        thread: str,
        messages: tuple[Message, ...],
    ) -> None:
        """Keep a response."""
        expires = self._clock() + KEPT_S
        with self._lock:
            self._kept[response["id"]] = KeptResponse(tenant, thread, messages, response, expires)
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)

    def get(self, response_id: str, tenant: str) -> KeptResponse:
        """A tenant's response.

        Raises:
            ApiError: 404, there is none of this id.
        """
        with self._lock:
            kept = self._kept.get(response_id)
            if kept is not None and kept.expires <= self._clock():
                kept = self._kept.pop(response_id) and None
        if kept is None or kept.tenant != tenant:
            raise ApiError(
                404,
                "there is no such response: it was not stored, has expired or was deleted; send "
                "the whole conversation instead",
                code="response_not_found",
                param="previous_response_id",
            )
        return kept

    def delete(self, response_id: str, tenant: str) -> None:
        """Delete a tenant's response.

        Raises:
            ApiError: 404, there is none of this id.
        """
        self.get(response_id, tenant)
        with self._lock:
            self._kept.pop(response_id, None)


class ResponsesApi:
    """`/v1/responses`.

    Args:
        service: that has the engine.
        models: names of the model; the first is shown to clients.
        kept: responses that may be gone on from.
    """

    def __init__(self, service: Service, models: Sequence[str], kept: KeptResponses) -> None:
        self._service = service
        self._models = models
        self._kept = kept

    def user(self, fields: Mapping[str, Any]) -> str | None:
        """As `Api.user`."""
        user = fields.get("user")
        if user is not None and not isinstance(user, str):
            raise invalid("user has to be a name", "user")
        return checked_name(user, "user")

    def read(self, fields: Mapping[str, Any], sender: Sender) -> tuple[ChatRequest, AnswerWriter]:
        """As `Api.read`."""
        body = read_body(fields)
        check_model(body.model, self._models)
        past: tuple[Message, ...] = ()
        if body.previous_response_id is not None:
            before = self._kept.get(body.previous_response_id, sender.tenant)
            past, sender = before.messages, Sender(sender.tenant, before.thread)
        past = (*past, *input_messages(body, len(past)))
        if not past:
            raise invalid("input is empty: give a text or a list of items", "input")
        system = (Message("system", body.instructions),) if body.instructions else ()
        request = request_of(
            body, sender, (*system, *past), max_tokens=self._service.settings.max_tokens
        )

        def keep(response: dict[str, Any], answered: Answered) -> None:
            if body.store is not False:
                message = answered.answer.to_message()
                self._kept.keep(
                    response,
                    tenant=request.tenant,
                    thread=answered.thread,
                    messages=(*past, message),
                )

        response_id = f"resp_{secrets.token_hex(24)}"
        return request, ResponsesWriter(response_id, self._models[0], body, keep)


def router(service: Service, reader: Reader, models: Sequence[str]) -> APIRouter:
    """Routes: to ask, and to get and delete what is kept."""
    routes = APIRouter(include_in_schema=False)
    kept = KeptResponses()
    handler = guarded(
        Endpoint(service, reader, ResponsesApi(service, models, kept), models[0]), service
    )
    routes.add_api_route(PATH, handler, methods=["POST"], response_model=None)

    @routes.get(PATH + "/{response_id}", response_model=None)
    def get(request: Request, response_id: str) -> dict[str, Any]:
        tenant = reader.sender(request.headers, request.query_params.get("user")).tenant
        return kept.get(response_id, tenant).response

    @routes.delete(PATH + "/{response_id}", response_model=None)
    def delete(request: Request, response_id: str) -> dict[str, Any]:
        tenant = reader.sender(request.headers, request.query_params.get("user")).tenant
        kept.delete(response_id, tenant)
        return {"id": response_id, "object": "response", "deleted": True}

    return routes
