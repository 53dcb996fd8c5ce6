"""Parameters that LangGraph fills in by their name and annotation."""

from __future__ import annotations

import inspect
from typing import Any


def with_keyword(signature: inspect.Signature, name: str, annotation: Any) -> inspect.Signature:
    """The signature with one more keyword parameter, which is None by default."""
    parameter = inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )
    parameters = list(signature.parameters.values())
    has_more = bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
    parameters.insert(len(parameters) - has_more, parameter)
    return signature.replace(parameters=parameters)
