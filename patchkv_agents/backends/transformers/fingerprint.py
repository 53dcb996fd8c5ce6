"""What a model is called in stores: the same in every process that computes the same state."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

SAMPLES = 256
"""Elements of each weight that count, evenly spaced, the first and the last among them."""

_IGNORED = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


def model_fingerprint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of what decides the keys and values of a context, 32 hexadecimal digits.

    Counted are the configuration (rotary embedding included), the tokenizer's vocabulary and
    rules, and name, shape, dtype and `SAMPLES` elements of each weight, adapters among them.
    (Weights that agree in all of these and differ elsewhere are taken for the same: training does
    not make such.) Where the model was loaded from, and where its weights lie, do not count.
    """
    digest = hashlib.blake2b(digest_size=16)
    config = {key: value for key, value in model.config.to_dict().items() if key not in _IGNORED}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    digest.update(_tokenizer_bytes(tokenizer))
    for name, weight in sorted(model.state_dict().items()):
        _add(digest, name, weight, model)
    return digest.hexdigest()


def _add(digest: hashlib.blake2b, name: str, weight: Any, model: PreTrainedModel) -> None:
    if not isinstance(weight, torch.Tensor):  # settings of a quantised layer
        digest.update(f"{name} {weight!r}".encode())
    elif weight.is_meta:  # offloaded by Accelerate: read again, one at a time
        from accelerate.utils import align_module_device

        module, _, own = name.rpartition(".")
        with align_module_device(model.get_submodule(module), torch.device("cpu")):
            _add(digest, name, getattr(model.get_submodule(module), own), model)
    elif hasattr(weight, "__tensor_flatten__"):  # quantised, in several tensors
        parts, settings = weight.__tensor_flatten__()
        digest.update(f"{name} {settings!r}".encode())
        for part in parts:
            _add(digest, f"{name}.{part}", getattr(weight, part), model)
    else:
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(_sampled(weight))


def _sampled(weight: torch.Tensor) -> bytes:
    flat = weight.detach().reshape(-1)
    count = min(SAMPLES, len(flat))
    indices = torch.from_numpy(np.linspace(0, len(flat) - 1, count).round().astype(np.int64))
    sample = flat[indices.to(flat.device)].cpu().contiguous()
    return bytes(sample.view(torch.uint8).numpy().tobytes()) if count else b""


def _tokenizer_bytes(tokenizer: PreTrainedTokenizerBase) -> bytes:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # In front of the added tokens stands what the last call asked for: truncation, padding.
        # (Taken as text: parsing and writing a large vocabulary again takes half a second.)
        text = str(backend.to_str())
        return text[max(0, text.find('"added_tokens"')) :].encode()
    return json.dumps(sorted(tokenizer.get_vocab().items())).encode()
