"""How families of models write calls of tools: one a file."""

from patchkv_agents.context.answers.formats.base import CallFormat, properties_of
from patchkv_agents.context.answers.formats.glm import Glm4Format, GlmFormat
from patchkv_agents.context.answers.formats.hermes import HermesFormat
from patchkv_agents.context.answers.formats.llama import LlamaFormat
from patchkv_agents.context.answers.formats.mistral import MistralFormat

__all__ = [
    "CallFormat",
    "Glm4Format",
    "GlmFormat",
    "HermesFormat",
    "LlamaFormat",
    "MistralFormat",
    "properties_of",
]
