"""Anthropic's endpoints: `/v1/messages` and its token count."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request

from patchkv_agents.context import Conversation, FrozenJson, Message, render
from patchkv_server.answers import AnswerWriter
from patchkv_server.chat_requests import check_model
from patchkv_server.clearing import Cleared, ToolClearing
from patchkv_server.endpoint import Endpoint, Reader, guarded
from patchkv_server.messages_answers import MessagesWriter
from patchkv_server.messages_requests import (
    MessagesBody,
    messages_of,
    read_body,
    request_of,
    tools_of,
)
from patchkv_server.requests import ChatRequest, Sender
from patchkv_server.service import Service

PREFIX = "/v1/messages"
ALIAS = "claude-"
"""Begins names of models that programs cannot be told to leave: they mean the one served."""


class MessagesApi:
    """`/v1/messages`.

    Args:
        service: that has the engine.
        models: names of the model.
    """

    def __init__(self, service: Service, models: Sequence[str]) -> None:
        self._service = service
        self._models = models
        self._clearing = ToolClearing()
        template = str(service.engine.tokenizer.chat_template or "")
        self._knows_thinking = "enable_thinking" in template

    def user(self, fields: Mapping[str, Any]) -> str | None:
        """None: `metadata.user_id` names a session too, and sessions of a user share rows."""
        return None

    def read(self, fields: Mapping[str, Any], sender: Sender) -> tuple[ChatRequest, AnswerWriter]:
        """As `Api.read`."""
        body, tools, cleared = self.context(fields, sender)
        request = request_of(
            body,
            sender,
            cleared.messages,
            tools,
            max_tokens=self._service.settings.max_tokens,
            knows_thinking=self._knows_thinking,
        )
        writer = MessagesWriter(
            body.model,
            self._service.engine.tokenizer,
            stop=body.stop_sequences or (),
            applied_edits=cleared.applied if body.context_management is not None else None,
        )
        return request, writer

    def context(
        self, fields: Mapping[str, Any], sender: Sender, *, remember: bool = True
    ) -> tuple[MessagesBody, tuple[FrozenJson, ...], Cleared]:
        """The body, the tools, and the messages after the edits that are asked for.

        Args:
            fields: of the body.
            sender: whose it is.
            remember: see `ToolClearing.apply`.

        Raises:
            ApiError: 400, naming the field; 404, another model is asked for.
            ContextError: messages or tools are malformed.
        """
        body = read_body(fields)
        if not body.model.startswith(ALIAS):
            check_model(body.model, self._models)
        messages, tools = messages_of(body), tools_of(body)
        cleared = self._clearing.apply(
            sender.tenant,
            messages,
            body.edits,
            lambda shown: self.count(shown, tools),
            remember=remember,
        )
        return body, tools, cleared

    def count(self, messages: Sequence[Message], tools: Sequence[FrozenJson]) -> int:
        """Tokens of a context, with the prompt for an answer."""
        conversation = Conversation(tuple(messages), tuple(tools))
        return len(render(conversation, self._service.engine.tokenizer))


def router(service: Service, reader: Reader, models: Sequence[str]) -> APIRouter:
    """Routes of both."""
    routes = APIRouter(include_in_schema=False)
    api = MessagesApi(service, models)

    def tokens(fields: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        reader.check_length(fields)
        _, tools, cleared = api.context(fields, reader.sender(headers, None), remember=False)
        count = {"input_tokens": api.count(cleared.messages, tools)}
        if fields.get("context_management") is None:
            return count
        original = api.count(messages_of(read_body(fields)), tools)
        return {**count, "context_management": {"original_input_tokens": original}}

    async def count_tokens(request: Request) -> dict[str, Any]:
        fields = await reader.fields(request)
        return await asyncio.to_thread(tokens, fields, request.headers)

    for path, handler in (
        (PREFIX, Endpoint(service, reader, api, models[0])),
        (f"{PREFIX}/count_tokens", count_tokens),
    ):
        routes.add_api_route(path, guarded(handler, service), methods=["POST"], response_model=None)
    return routes
