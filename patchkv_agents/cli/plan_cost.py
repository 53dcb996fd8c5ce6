"""`patchkv plan-cost`: predicts what resuming costs on a machine."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchkv_agents.cli.options import AsJson
from patchkv_agents.console import new_console, print_table

if TYPE_CHECKING:
    from rich.console import Console

    from patchkv_agents.recovery.costs import (
        CostEstimate,
        DeviceCost,
        EditedContext,
        MethodCost,
        ModelCost,
    )

METHODS = ("prefix_cache", "cacheblend", "direct_reuse", "patchkv")
"""The methods: the baseline first, ours last."""
PUBLISHED = "paper's ratios"
PUBLISHED_RECOMPUTE, PUBLISHED_PAYLOAD = 0.0926, 0.398
"""Rows after the prefix that are computed, and payload to 16 bits, as the paper states them."""
PAYING_FACTOR = 2.0
"""How many times faster recovery must be than exact reuse to be said to pay."""
PUBLISHED_SPEEDUPS = """\
Published for three such models at about 10,000 tokens on 8 A800: 2.51 to 3.85 times faster than \
prefix cache (median 3.40), 1.26 to 2.06 times faster than CacheBlend. This model, which knows no \
cost but arithmetic and transfers, gives {prefix_cache:.1f} and {cacheblend:.1f} at the paper's \
ratios: what it leaves out took {overhead:.0%} of prefix cache's time there, at the median."""
PUBLISHED_MEDIAN = 3.40
PUBLISHED_UP_TO = 16_000
"""Context length in tokens up to which the published figures stand beside the prediction."""


@dataclass(frozen=True, slots=True)
class _Case:
    """One context length, with the cost of every method."""

    context: EditedContext
    estimates: tuple[CostEstimate, ...]
    least_suffix: int | None
    largest_edit: int | None
    least_transfer_rate: float | None

    def speedup(self, estimate: CostEstimate) -> float:
        return self.estimates[0].resume_ttft_ms / estimate.resume_ttft_ms

    def to_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.context.tokens,
            "prefix": self.context.prefix,
            "new": self.context.new,
            "suffix": self.context.suffix,
            "methods": {
                estimate.method: {
                    **{key: value for key, value in asdict(estimate).items() if key != "method"},
                    "speedup_over_prefix_cache": self.speedup(estimate),
                }
                for estimate in self.estimates
            },
            "least_suffix_at_twice_the_speed": self.least_suffix,
            "largest_edit_at_twice_the_speed": self.largest_edit,
            "least_transfer_bytes_per_s": self.least_transfer_rate,
        }


def plan_cost(
    model: Annotated[
        str,
        typer.Option(
            help="qwen3-32b, glm-4-9b, llama-3.3-70b, or the name of a model whose configuration "
            "can be loaded."
        ),
    ] = "qwen3-32b",
    device: Annotated[
        str,
        typer.Option(help="a800, h200, or 'this' to measure this machine with the model loaded."),
    ] = "a800",
    tokens: Annotated[
        list[int] | None, typer.Option(help="Length of the edited context; may be repeated.")
    ] = None,
    edit_at: Annotated[float, typer.Option(help="Where the edit is, as a share of it.")] = 0.2,
    new_tokens: Annotated[int, typer.Option(help="Length of the edit.")] = 256,
    tera_flops: Annotated[
        float | None, typer.Option(help="Sustained rate of a prefill, in place of the device's.")
    ] = None,
    transfer_gb_s: Annotated[
        float | None, typer.Option(help="Rate at which stored rows arrive, such as a disk's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict the time to first token of every method, and from where on recovery pays."""
    from patchkv_agents.errors import InputError

    if not 0.0 <= edit_at < 1.0:
        raise InputError(f"--edit-at {edit_at}: give a share of the context, 0 up to 1")
    sizes, rates = _sizes_and_rates(model, device)
    rates = _changed(rates, tera_flops, transfer_gb_s)
    lengths = tokens or [10_000, 32_000, 64_000, 128_000]
    cases = [_case(sizes, rates, length, edit_at, new_tokens) for length in lengths]
    if as_json:
        document = {
            "model": asdict(sizes),
            "device": asdict(rates),
            "edit_at": edit_at,
            "cases": [case.to_dict() for case in cases],
        }
        typer.echo(json.dumps(document))
    else:
        _print(new_console(), sizes, rates, cases)


def _sizes_and_rates(model: str, device: str) -> tuple[ModelCost, DeviceCost]:
    from patchkv_agents.errors import InputError
    from patchkv_agents.recovery.cost_presets import DEVICES, MODELS
    from patchkv_agents.recovery.costs import ModelCost

    if device == "this":
        from patchkv_agents.engine import Engine
        from patchkv_agents.engine.rates import measured_rates

        if model in MODELS:
            raise InputError("--device this measures with a model: name one that fits this machine")
        return measured_rates(Engine.from_pretrained(model), model)
    if device not in DEVICES:
        raise InputError(f"no device '{device}': choose {', '.join(DEVICES)}, or 'this'")
    if model in MODELS:
        return MODELS[model], DEVICES[device]
    from patchkv_agents.backends.transformers.loading import load_config

    return ModelCost.of_config(model, load_config(model)), DEVICES[device]


def _changed(
    device: DeviceCost, tera_flops: float | None, transfer_gb_s: float | None
) -> DeviceCost:
    from dataclasses import replace

    if tera_flops is not None:
        device = replace(device, flops_per_s=tera_flops * 1e12)
    if transfer_gb_s is not None:
        device = replace(device, transfer_bytes_per_s=transfer_gb_s * 1e9)
    return device


def _case(
    model: ModelCost, device: DeviceCost, tokens: int, edit_at: float, new_tokens: int
) -> _Case:
    from patchkv_agents.recovery.costs import (
        EditedContext,
        MethodCost,
        estimate,
        largest_edit,
        least_suffix,
        least_transfer_rate,
    )
    from patchkv_agents.recovery.named import method

    context = EditedContext(tokens, prefix=int(edit_at * tokens), new=new_tokens)
    setups = [method(name) for name in METHODS]
    costs = [MethodCost.of_setup(setup, context, model) for setup in setups]
    ours, own_cost = setups[-1], costs[-1]
    return _Case(
        context,
        tuple(estimate(model, device, context, cost) for cost in (*costs, _published(context))),
        least_suffix(model, device, context, ours, factor=PAYING_FACTOR),
        largest_edit(model, device, context, ours, factor=PAYING_FACTOR),
        least_transfer_rate(model, device, context, payload_ratio=own_cost.payload_ratio),
    )


def _published(context: EditedContext) -> MethodCost:
    from patchkv_agents.recovery.costs import MethodCost

    rows = PUBLISHED_RECOMPUTE * (context.tokens - context.prefix)
    return MethodCost(PUBLISHED, rows, context.tokens - rows, PUBLISHED_PAYLOAD)


def _print(console: Console, model: ModelCost, device: DeviceCost, cases: list[_Case]) -> None:
    from patchkv_agents.recovery.cost_presets import DEVICES

    console.print(
        f"{model.name} on {device.name}: {device.flops_per_s / 1e12:,.3g} TFLOPS sustained, rows "
        f"fetched at {device.transfer_bytes_per_s / 1e9:,.3g} GB/s, "
        f"{model.kv_bytes / 1024:,.0f} KiB a token unquantised."
    )
    for case in cases:
        context = case.context
        console.print(
            f"\n{context.tokens:,} tokens, {context.new:,} of them new at {context.prefix:,}:"
        )
        _print_methods(console, case)
        console.print(_break_even(case))
    if device == DEVICES["a800"] and cases[0].context.tokens <= PUBLISHED_UP_TO:
        console.print("\n" + _beside_published(cases[0]))


def _break_even(case: _Case) -> str:
    """The context length from which recovery pays, in a sentence or two."""
    if case.least_suffix is None or case.largest_edit is None:
        pays = "PatchKV is not twice as fast here, however much lies behind the edit."
    else:
        pays = (
            f"PatchKV is at least twice as fast from {case.least_suffix:,} tokens behind the edit "
            f"on, and with edits of up to {case.largest_edit:,} tokens."
        )
    if case.least_transfer_rate is None:
        return f"{pays} Rows are computed faster than memory takes them."
    rate = case.least_transfer_rate / 1e9
    return f"{pays} Rows are worth fetching where they arrive at {rate:.2g} GB/s or more."


def _beside_published(case: _Case) -> str:
    times = {estimate.method: estimate.resume_ttft_ms for estimate in case.estimates}
    ours = times[PUBLISHED]
    return PUBLISHED_SPEEDUPS.format(
        prefix_cache=times["prefix_cache"] / ours,
        cacheblend=times["cacheblend"] / ours,
        overhead=1 / PUBLISHED_MEDIAN - ours / times["prefix_cache"],
    )


def _print_methods(console: Console, case: _Case) -> None:
    headers = ("method", "rows", "compute ms", "fetch ms", "first token ms", "faster by")
    rows = [
        (
            estimate.method.replace("_", " "),
            f"{estimate.rows:,.0f}",
            f"{estimate.compute_ms:,.1f}",
            f"{estimate.fetch_ms:,.1f}",
            f"{estimate.resume_ttft_ms:,.1f}",
            f"{case.speedup(estimate):.2f}",
        )
        for estimate in case.estimates
    ]
    print_table(console, headers, rows)
