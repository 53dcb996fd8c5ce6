"""`patchkv serve`: an OpenAI-compatible server."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from patchkv_agents.cli.options import Device, Dtype, load_options
from patchkv_agents.errors import InputError


def serve(
    model: Annotated[
        str, typer.Argument(help="smollm2 (embedded), a folder, a GGUF file or a Transformers id.")
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on. Any but this machine's own needs API keys.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8080,
    policy: Annotated[
        str | None,
        typer.Option(
            help="How edited contexts are recovered: exact, default (faster, approximate), or the "
            "name of a method. If left out: the profile's if it has passed validation, else exact."
        ),
    ] = None,
    recovery_profile: Annotated[
        str | None,
        typer.Option(
            help="The model's profile: a file of patchkv profile, or the name of one that comes "
            "with the package."
        ),
    ] = None,
    shadow: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Share of the approximate answers that are compared with a full prefill, while "
            "nobody is answered; see patchkv_shadow_* at /metrics.",
        ),
    ] = 0.0,
    store: Annotated[
        str | None,
        typer.Option(help="Where suspended KV state is kept: a folder, s3://..., redis://..."),
    ] = None,
    history: Annotated[
        Path | None,
        typer.Option(
            help="SQLite file of the conversations' histories; with --store, a restart goes on "
            "where it was. It holds what the messages say.",
            dir_okay=False,
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="PATCHKV_API_KEY",
            help="Key that requests must send, or name:key. Each key is a tenant with state of its "
            "own. May be repeated.",
        ),
    ] = None,
    api_keys_file: Annotated[
        Path | None, typer.Option(help="File of such keys, one a line.", dir_okay=False)
    ] = None,
    max_running: Annotated[
        int, typer.Option(min=1, help="Requests answered at a time; they share the model.")
    ] = 4,
    max_waiting: Annotated[
        int, typer.Option(min=0, help="Requests that may wait; more are refused (429).")
    ] = 64,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Longest answer where a request does not say.")
    ] = 4096,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Longest body of a request.")] = 2**24,
    timeout_s: Annotated[
        float, typer.Option(min=0.1, help="Longest time from a request to the end of its answer.")
    ] = 600.0,
    body_timeout_s: Annotated[
        float, typer.Option(min=0.1, help="Seconds within which a request's body has to arrive.")
    ] = 60.0,
    memory_budget_gb: Annotated[
        float, typer.Option(min=0.01, help="KV state in memory, of all threads together.")
    ] = 8.0,
    idle_suspend_s: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="Suspend a thread after so long without a request, so that a store gets it; left "
            "out: only where memory is short.",
        ),
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    model_name: Annotated[
        str | None,
        typer.Option(
            help="Name of the model for clients; MODEL, or its folder's name, if left out."
        ),
    ] = None,
    log_content: Annotated[
        bool,
        typer.Option("--log-content", help="Write messages and answers into the log and the page."),
    ] = False,
) -> None:
    """Serve a model to any program that talks to OpenAI's chat completions.

    Edits of a conversation are detected by comparing it with earlier requests, and the unchanged
    state is reused. The page at / shows the activity; /metrics has Prometheus metrics.
    """
    try:
        from patchkv_server import ApiKeys, ServerSettings, create_app
        from patchkv_server.auth import is_loopback
        from patchkv_server.running import AppServer
    except ModuleNotFoundError as error:
        raise InputError(
            f"patchkv serve needs the package {error.name}: pip install 'patchkv-agents[server]'"
        ) from None
    keys = ApiKeys.read(api_key or (), api_keys_file)
    if not keys and not is_loopback(host):
        raise InputError(
            f"{host} can be reached by others: give --api-key or --api-keys-file, or listen on "
            "127.0.0.1"
        )
    budget_bytes = int(memory_budget_gb * 2**30)
    settings = ServerSettings(
        max_running=max_running,
        max_waiting=max_waiting,
        max_body_bytes=max_body_bytes,
        timeout_s=timeout_s,
        body_timeout_s=body_timeout_s,
        max_tokens=max_tokens,
        memory_budget_bytes=budget_bytes,
        idle_suspend_s=idle_suspend_s,
        log_content=log_content,
    )
    print(f"loading {model}", file=sys.stderr)
    from patchkv_agents.checkpoint.stores import open_store
    from patchkv_agents.context import SQLiteHistoryStore
    from patchkv_agents.engine import Engine
    from patchkv_agents.engine.shadow import ShadowChecks
    from patchkv_agents.recovery.named import setup_named
    from patchkv_agents.recovery.profile import Profile

    profile = None if recovery_profile is None else Profile.load(recovery_profile)
    setup = None if policy is None else setup_named(policy, profile)
    checkpoints = None if store is None else open_store(store)
    engine = Engine.from_pretrained(
        model,
        policy=None if setup is None else setup.policy,
        storage=None if setup is None else setup.storage,
        recovery_profile=profile,
        shadow=ShadowChecks(shadow) if shadow else None,
        store=checkpoints,
        history=None if history is None else SQLiteHistoryStore(history),
        memory_budget_bytes=budget_bytes,
        **load_options(device, dtype),
    )
    name = model_name or (None if Path(model).exists() else model)
    app = create_app(engine, settings, keys, model=name, store=checkpoints)
    _log_to_stderr()
    AppServer(app, host, port).run()
    if checkpoints is not None:
        checkpoints.close()


def _log_to_stderr() -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    for name in ("uvicorn", "patchkv_server"):
        logging.getLogger(name).setLevel(logging.INFO)
