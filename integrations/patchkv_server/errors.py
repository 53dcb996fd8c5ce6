"""Errors in the form that OpenAI's clients know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from patchkv_agents.errors import ContextTooLongError, InputError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: HTTP status.
        message: for people: what is wrong and what to do.
        code: for programs.
        param: the field of the request that is wrong.
        headers: further HTTP headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def anthropic_body(self) -> dict[str, Any]:
        """The JSON body in Anthropic's form."""
        message = self.message
        if self.code == "context_length_exceeded":  # the words that its clients look for
            message = f"prompt is too long: {message}"
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be answered as it is."""
    return ApiError(400, message, param=param, code=code)


def api_error(error: BaseException) -> ApiError:
    """The error to answer with. What is no fault of the request is not told in detail."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextTooLongError):
        return invalid(str(error), "messages", "context_length_exceeded")
    if isinstance(error, InputError):
        return invalid(str(error))
    return ApiError(500, "the server failed to answer; its log says where", code="internal_error")
