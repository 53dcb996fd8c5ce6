"""Load tokenizers and models: the embedded model, a local folder or a Transformers model id."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from patchkv_agents.backends.transformers.embedded import (
    EMBEDDED_NAME,
    chat_template,
    embedded_folder,
)
from patchkv_agents.backends.transformers.quiet import quiet_transformers
from patchkv_agents.errors import (
    InputError,
    ModelNotFoundError,
    PatchKVError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
    from typing_extensions import Unpack

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_TIMEOUT_S = 4.0


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model.

    Args:
        name: `smollm2` for the embedded model (converted at first use), a local folder, a GGUF
            file, or a Transformers model id. An id is first looked for in the local Transformers
            cache.

    Raises:
        ModelNotFoundError: there is no such model, or it cannot be fetched.
        UnsupportedModelError: Transformers cannot load it.
    """
    if name == EMBEDDED_NAME:
        # The class which AutoTokenizer would find, only slower: it imports torch on the way.
        from transformers import PreTrainedTokenizerFast

        embedded: PreTrainedTokenizerBase = _load(PreTrainedTokenizerFast, name)
        # Set here, not stored by the conversion, so that it always is the installed version's.
        embedded.chat_template = chat_template()
        return embedded
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = _load(AutoTokenizer, name)
    return tokenizer


def load_config(name: str) -> PreTrainedConfig:
    """Load the configuration of a model, without its weights.

    Args:
        name: as for `load_tokenizer`.

    Raises:
        ModelNotFoundError: there is no such model, or it cannot be fetched.
        UnsupportedModelError: Transformers does not know the architecture.
    """
    from transformers import AutoConfig

    config: PreTrainedConfig = _load(AutoConfig, name)
    return config


class LoadOptions(TypedDict, total=False):
    """How weights are loaded, all optional.

    Attributes:
        dtype: of the weights, such as `"bfloat16"`; the checkpoint's own where None.
        device: of the whole model, such as `"cuda:1"`; the first CUDA device where None, the CPU
            where there is none.
        device_map: layers on several devices, in place of `device`: `"auto"`, or devices (`"cpu"`
            and `"disk"` among them) by module name, as Transformers takes it. What does not fit
            on GPUs waits on the CPU or on disk, and is brought to a device each time it runs.
        max_memory: what an automatic `device_map` may use of each device, such as
            `{0: "20GiB", "cpu": "60GiB"}`.
        offload_folder: where weights that `device_map` puts on disk are kept, unless they can be
            read from the checkpoint itself.
        quantization_config: quantises the weights as they are loaded, such as Transformers'
            `BitsAndBytesConfig`. A checkpoint that is quantised already needs none.
        longrope: `"long"` pins the long factors of a model with longrope (see `pin_longrope`).
    """

    dtype: str | torch.dtype | None
    device: str | torch.device | None
    device_map: str | Mapping[str, int | str | torch.device] | None
    max_memory: Mapping[int | str, int | str] | None
    offload_folder: str | Path | None
    quantization_config: Any
    longrope: Literal["long"] | None


def load_model(
    name: str, **options: Unpack[LoadOptions]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model for inference (evaluation mode, no gradients) and its tokenizer.

    Args:
        name: as for `load_tokenizer`.
        options: see `LoadOptions`.

    Raises:
        InputError: an option is unknown, or names a dtype or device that does not exist.
        ModelNotFoundError: there is no such model, or it cannot be fetched.
        UnsupportedModelError: Transformers cannot load it as a causal language model.
    """
    arguments = _model_arguments(options)
    tokenizer = load_tokenizer(name)  # the cheap part first: it finds most mistakes
    auto_class: Any = _auto_class(name)
    if options.get("longrope") is not None:
        config = load_config(name)
        pin_longrope(config)
        arguments["config"] = config
    model: PreTrainedModel = _load(auto_class, name, **arguments)
    return model.eval().requires_grad_(False), tokenizer


def pin_longrope(config: Any) -> None:
    """Make a model use longrope's long factors at every length; changes its configuration.

    What it computes then does not depend on the length of the context, so that keys can be moved.
    Short contexts are a little less precise, as in every other engine that pins them.

    Raises:
        InputError: the model has no longrope.
    """
    text = config.get_text_config(decoder=True)
    from patchkv_agents.backends.transformers.verdict import rope_parameters  # loads torch

    parameters = [each for each in rope_parameters(text) if "long_factor" in each]
    if not parameters:
        raise InputError(f"model type '{config.model_type}' has no longrope: leave the option out")
    for each in parameters:
        each["short_factor"] = list(each["long_factor"])


def _auto_class(name: str) -> Any:
    """The class of Transformers that loads a model as one that continues text.

    Some families exist only with a part for pictures (Mistral 3, Qwen3-VL): text alone is the same
    to them.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto import modeling_auto

    if name == EMBEDDED_NAME or Path(name).expanduser().is_file():
        return AutoModelForCausalLM
    config = load_config(name)
    is_custom = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    only_with_pictures = (
        config.model_type not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        and config.model_type in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    )
    if only_with_pictures and not is_custom:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def _model_arguments(options: LoadOptions) -> dict[str, Any]:
    """The options as arguments of `from_pretrained`."""
    import torch

    unknown = sorted(set(options) - set(LoadOptions.__annotations__))
    if unknown:
        raise InputError(
            f"unknown options {unknown}: loading takes {sorted(LoadOptions.__annotations__)}"
        )
    dtype = options.get("dtype")
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise InputError("unknown dtype: use float32, bfloat16 or float16")
    arguments: dict[str, Any] = {"dtype": dtype or "auto"}
    device, device_map = options.get("device"), options.get("device_map")
    if device is not None and device_map is not None:
        raise InputError("device puts the whole model on one device: give it or device_map")
    for option in ("max_memory", "offload_folder"):
        if options.get(option) is not None and device_map is None:
            raise InputError(f"{option} is for layers on several devices: add device_map='auto'")
    # One device is a map too: so weights go there as they are read, quantised ones untouched.
    arguments["device_map"] = device_map or {"": _device(device)}
    for option in ("max_memory", "offload_folder", "quantization_config"):
        if options.get(option) is not None:
            arguments[option] = options.get(option)
    return arguments


def _device(device: str | torch.device | None) -> torch.device:
    import torch

    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise InputError(f"unknown device {device!r}: use cpu, cuda or cuda:N") from None
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"device {chosen} does not exist: this machine shows {torch.cuda.device_count()} CUDA "
            "devices to torch; use device='cpu', or install a torch build for your GPU"
        )
    return chosen


def _load(auto_class: Any, name: str, **options: Any) -> Any:
    """`auto_class.from_pretrained`, with clear errors, and off the network where that is possible.

    Transformers retries the hub for most of a minute where there is no network. So what is on this
    machine is tried first, and one request with a short timeout decides whether to ask the hub.
    """
    from safetensors import SafetensorError

    try:
        if name == EMBEDDED_NAME:
            folder = embedded_folder()
            with quiet_transformers():
                return auto_class.from_pretrained(folder, local_files_only=True, **options)
        with quiet_transformers(progress=True):  # a large model takes minutes
            local = Path(name).expanduser()
            if name and local.is_dir():
                _check_folder(local)
                return auto_class.from_pretrained(local, local_files_only=True, **options)
            if local.is_file():
                return auto_class.from_pretrained(
                    local.parent, gguf_file=_gguf_file(local), local_files_only=True, **options
                )
            if not _HUB_ID.fullmatch(name):
                raise ModelNotFoundError(
                    f"there is no folder {name!r}, and it is no model id: give '{EMBEDDED_NAME}', "
                    "a folder with a Transformers model, or an id such as Qwen/Qwen3-0.6B"
                )
            try:
                return auto_class.from_pretrained(name, local_files_only=True, **options)
            except OSError:
                _check_hub_has(name)
                return auto_class.from_pretrained(name, **options)
    except PatchKVError:
        raise
    except OSError as error:
        raise ModelNotFoundError(
            f"no usable model in {name!r}: {_first_line(error)}. It needs config.json, "
            "the tokenizer's files and the weights, as `save_pretrained` writes them"
        ) from error
    except (ValueError, KeyError, ImportError, SafetensorError) as error:
        raise UnsupportedModelError(
            f"Transformers cannot load {name!r}: {_first_line(error)}. Check that its files are "
            "whole, and that it is a causal language model known to the installed Transformers"
        ) from error


def _gguf_file(file: Path) -> str:
    """The name of a GGUF file, if it can be read."""
    if file.suffix.lower() != ".gguf":
        raise ModelNotFoundError(
            f"{str(file)!r} is a file, and not GGUF: give the model's folder, with config.json and "
            "weights"
        )
    if importlib.util.find_spec("gguf") is None:
        raise ModelNotFoundError(
            "reading a GGUF file needs the package `gguf`: run "
            "`pip install 'patchkv-agents[embedded]'`"
        )
    return file.name


def _check_folder(folder: Path) -> None:
    """Raise where a look into the folder explains better than Transformers why loading fails."""
    from transformers import AutoConfig

    if (folder / "config.json").is_file():
        AutoConfig.from_pretrained(folder, local_files_only=True)  # names an unknown architecture
    elif not (folder / "tokenizer.json").is_file():
        raise ModelNotFoundError(
            f"the folder {str(folder)!r} holds no model (no config.json): give the folder that "
            "`save_pretrained` wrote, or the one that holds a downloaded model's files"
        )


def _check_hub_has(name: str) -> None:
    """Raise unless the model hub answers, within seconds, that it has the model `name`."""
    from huggingface_hub import model_info
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        model_info(name, timeout=_HUB_TIMEOUT_S)
    except GatedRepoError:
        raise ModelNotFoundError(
            f"the model {name!r} asks for its licence to be accepted: do so on its page, then run "
            "`hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise ModelNotFoundError(
            f"there is no folder and no model {name!r}: check the spelling, or run `hf auth login` "
            f"if it is private. '{EMBEDDED_NAME}' names the embedded model"
        ) from None
    except Exception as error:  # the hub's HTTP client has changed twice: no common class
        raise ModelNotFoundError(
            f"there is no folder {name!r}, the local Transformers cache does not hold it, and the "
            f"model hub cannot be asked ({_first_line(error)}): check the spelling and the "
            f"network, give a local folder, or use the embedded model '{EMBEDDED_NAME}'"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
