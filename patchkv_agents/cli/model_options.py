"""How commands load a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from patchkv_agents.backends.transformers.loading import LoadOptions

Device = Annotated[str | None, typer.Option(help="Device of the model, such as cuda.")]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16; the usual one if left out.")
]


def load_options(device: str | None, dtype: str | None) -> LoadOptions:
    """What is given of the options above, for `Engine.from_pretrained`."""
    options: LoadOptions = {}
    if device is not None:
        options["device"] = device
    if dtype is not None:
        options["dtype"] = dtype
    return options
