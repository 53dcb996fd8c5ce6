"""OpenAI's endpoints: chat completions, completions, and what other servers put beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request

from patchkv_agents.context import Conversation, parse_messages, parse_tools, render
from patchkv_server.answers import AnswerWriter
from patchkv_server.chat_answers import ChatWriter, TextWriter
from patchkv_server.chat_requests import read_chat, read_text
from patchkv_server.endpoint import Endpoint, Reader, guarded
from patchkv_server.errors import ApiError, invalid
from patchkv_server.requests import ChatRequest, Sender, checked_name
from patchkv_server.service import Service


class _OpenAI:
    """What both endpoints have in common.

    Args:
        service: that has the engine.
        models: names of the model; the first is shown to clients.
    """

    def __init__(self, service: Service, models: Sequence[str]) -> None:
        self._service = service
        self._models = models

    def user(self, fields: Mapping[str, Any]) -> str | None:
        """As `Api.user`."""
        user = fields.get("user")
        if user is not None and not isinstance(user, str):
            raise invalid("user has to be a name", "user")
        return checked_name(user, "user")


class ChatApi(_OpenAI):
    """`/v1/chat/completions`."""

    def read(self, fields: Mapping[str, Any], sender: Sender) -> tuple[ChatRequest, AnswerWriter]:
        """As `Api.read`."""
        max_tokens = self._service.settings.max_tokens
        body, request = read_chat(fields, sender, self._models, max_tokens)
        writer = ChatWriter(
            self._models[0],
            self._service.engine.tokenizer,
            include_usage=body.include_usage,
            with_logprobs=bool(body.logprobs),
        )
        return request, writer


class TextApi(_OpenAI):
    """`/v1/completions`."""

    def read(self, fields: Mapping[str, Any], sender: Sender) -> tuple[ChatRequest, AnswerWriter]:
        """As `Api.read`."""
        max_tokens = self._service.settings.max_tokens
        body, request = read_text(fields, sender, self._models, max_tokens)
        return request, TextWriter(self._models[0], include_usage=body.include_usage)


def router(service: Service, reader: Reader, models: Sequence[str]) -> APIRouter:
    """Routes of both, of `/v1/embeddings`, which is refused, and of `/tokenize` and back."""
    routes = APIRouter(include_in_schema=False)
    tokenizer = service.engine.tokenizer
    for path, api in (
        ("/v1/chat/completions", ChatApi(service, models)),
        ("/v1/completions", TextApi(service, models)),
    ):
        handler = guarded(Endpoint(service, reader, api, models[0]), service)
        routes.add_api_route(path, handler, methods=["POST"], response_model=None)

    async def embeddings(request: Request) -> None:
        await reader.fields(request)
        raise ApiError(
            501,
            "this server gives no embeddings: it serves a model that writes text; use a server "
            "with an embedding model",
            code="unsupported_endpoint",
        )

    def count(fields: Mapping[str, Any]) -> list[int]:
        text = fields.get("prompt", fields.get("content"))
        if isinstance(text, str):
            ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
            return ids
        if not isinstance(fields.get("messages"), list):
            raise invalid("give prompt, a text, or messages", "prompt")
        reader.check_length(fields)
        messages, tools = parse_messages(fields["messages"]), parse_tools(fields.get("tools"))
        arguments = fields.get("chat_template_kwargs")
        rendered = render(
            Conversation(messages, tools),
            tokenizer,
            template_args=arguments if isinstance(arguments, dict) else None,
            add_generation_prompt=fields.get("add_generation_prompt") is not False,
        )
        return [int(token_id) for token_id in rendered.token_ids]

    async def tokenize(request: Request) -> dict[str, Any]:
        ids = await asyncio.to_thread(count, await reader.fields(request))
        return {"tokens": ids, "count": len(ids), "max_model_len": service.engine.max_tokens}

    async def detokenize(request: Request) -> dict[str, Any]:
        ids = (await reader.fields(request)).get("tokens")
        size = len(tokenizer)
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < size for i in ids):
            raise invalid(f"tokens has to be a list of ids from 0 to {size - 1}", "tokens")
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return {"prompt": text, "content": text}

    for path, other in (
        ("/v1/embeddings", embeddings),
        ("/tokenize", tokenize),
        ("/detokenize", detokenize),
    ):
        routes.add_api_route(path, guarded(other, service), methods=["POST"], response_model=None)
    return routes
