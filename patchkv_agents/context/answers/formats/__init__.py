"""How families of models write calls of tools: one form a file."""

from patchkv_agents.context.answers.formats.base import CallFormat
from patchkv_agents.context.answers.formats.deepseek import DeepSeekFormat, KimiFormat
from patchkv_agents.context.answers.formats.functions import FunctionFormat
from patchkv_agents.context.answers.formats.gemma import GemmaFormat
from patchkv_agents.context.answers.formats.glm import Glm4Format, GlmFormat
from patchkv_agents.context.answers.formats.harmony import HarmonyFormat, HarmonyParser
from patchkv_agents.context.answers.formats.hermes import GraniteFormat, JsonFormat
from patchkv_agents.context.answers.formats.invoke import DSML, InvokeFormat
from patchkv_agents.context.answers.formats.llama import LlamaFormat
from patchkv_agents.context.answers.formats.mistral import MistralFormat
from patchkv_agents.context.answers.formats.pythonic import PythonicFormat

__all__ = [
    "FORMATS",
    "CallFormat",
    "DeepSeekFormat",
    "FunctionFormat",
    "GemmaFormat",
    "Glm4Format",
    "GlmFormat",
    "GraniteFormat",
    "HarmonyFormat",
    "HarmonyParser",
    "InvokeFormat",
    "JsonFormat",
    "KimiFormat",
    "LlamaFormat",
    "MistralFormat",
    "PythonicFormat",
    "detect_format",
]

FORMATS: dict[str, CallFormat] = {
    call_format.name: call_format
    for call_format in (
        JsonFormat(),
        LlamaFormat(),
        GlmFormat(),
        Glm4Format(),
        MistralFormat(),
        FunctionFormat(),
        FunctionFormat("seed", "<seed:tool_call>", "</seed:tool_call>"),
        HarmonyFormat(),
        GemmaFormat(),
        DeepSeekFormat(),
        InvokeFormat("dsml", f"<{DSML}function_calls>", f"</{DSML}function_calls>", tag=DSML),
        InvokeFormat("dsml4", f"<{DSML}tool_calls>", f"</{DSML}tool_calls>", tag=DSML),
        KimiFormat(),
        InvokeFormat(),
        JsonFormat("nemotron", "<TOOLCALL>", "</TOOLCALL>", is_list=True),
        JsonFormat("apriel", "<tool_calls>", "</tool_calls>", is_list=True),
        GraniteFormat(),
        JsonFormat(
            "cohere",
            "<|START_ACTION|>",
            "<|END_ACTION|>",
            inner=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
            thinking=("<|START_THINKING|>", "<|END_THINKING|>"),
            is_list=True,
            keys=("tool_name", "parameters"),
        ),
        PythonicFormat(),
        PythonicFormat("olmo3", "<function_calls>", "</function_calls>", is_list=False),
    )
}
"""The formats by name."""

_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("", ("]minimax[",)),  # MiniMax M3: its tags are named after the arguments
    ("", ("<|python_tag|>", "</function>")),  # Functionary
    ("glm", ("<arg_key>",)),
    ("minimax", ("<minimax:tool_call>",)),
    ("dsml4", (DSML, "tool_calls>")),
    ("dsml", (DSML,)),
    ("dsml", ("DSML", "function_calls>", "invoke name=")),
    ("kimi", ("<|tool_call_begin|>",)),
    ("deepseek", (DeepSeekFormat().begin,)),
    ("harmony", ("<|channel|>", "<|message|>")),
    ("gemma4", ("<|tool_call>",)),
    ("seed", ("<seed:tool_call>",)),
    ("nemotron", ("<TOOLCALL>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("cohere", ("<|START_ACTION|>",)),
    ("granite", ("<|tool_call|>",)),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("apriel", ("<tool_calls>",)),
    ("hermes", ("<tool_call>",)),
    ("olmo3", ("<function_calls>",)),
    ("llama3", ("<|python_tag|>",)),
    ("llama3", ("ipython", '"parameters"')),
    ("glm4", ("<|observation|>",)),
)
"""Texts that a chat template of each format contains; the first that fits counts."""


def detect_format(template: str) -> CallFormat | None:
    """The format in which a chat template shows calls; None if it shows none that is known."""
    for name, signs in _SIGNS:
        if all(sign in template for sign in signs):
            if name == "mistral" and "[ARGS]" in template:
                return MistralFormat(named=True)
            if name == "deepseek" and "```json" in template:
                return DeepSeekFormat(fenced=True)
            return FORMATS.get(name)
    return None
