"""Options that several commands share, alone and in groups."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from patchkv_agents.backends.transformers.loading import LoadOptions

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Device = Annotated[str | None, typer.Option(help="Device of the model, such as cuda.")]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16; the usual one if left out.")
]
_MODEL_HELP = "smollm2 (embedded), a folder, or a Transformers model id."
ModelArgument = Annotated[str, typer.Argument(help=_MODEL_HELP)]
ModelOption = Annotated[str, typer.Option("--model", "-m", help=_MODEL_HELP)]


def load_options(device: str | None, dtype: str | None) -> LoadOptions:
    """What is given of the options above, for `Engine.from_pretrained`."""
    options: LoadOptions = {}
    if device is not None:
        options["device"] = device
    if dtype is not None:
        options["dtype"] = dtype
    return options


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer in which each parameter that is a dataclass becomes its fields.

    The fields are annotated as typer's options are, and have defaults; the parameter needs none.
    """
    hints = get_type_hints(command, include_extras=True)
    hints.pop("return", None)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(annotation=hints[name]))
            continue
        group_hints = get_type_hints(groups[name], include_extras=True)
        for field in fields(groups[name]):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            parameters.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=default,
                    annotation=group_hints[field.name],
                )
            )

    def expanded(**values: Any) -> None:
        for name, group in groups.items():
            given: Any = {field.name: values.pop(field.name) for field in fields(group)}
            values[name] = group(**given)
        command(**values)

    keyword_only = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    expanded.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    expanded.__annotations__ = {each.name: each.annotation for each in keyword_only}
    expanded.__doc__, expanded.__name__ = command.__doc__, command.__name__
    expanded.__module__ = command.__module__
    return expanded
