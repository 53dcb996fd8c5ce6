"""The agent's context: messages, versions and edits; rendering to tokens.

Imports neither torch nor transformers: tokenizers are passed in as objects.
"""

from patchkv_agents.context.edits import Edit, EditKind
from patchkv_agents.context.frozen import FrozenJson
from patchkv_agents.context.history import ContextHistory
from patchkv_agents.context.inference import infer_edits
from patchkv_agents.context.messages import Conversation, Message, ToolCall
from patchkv_agents.context.parsing import (
    load_conversation,
    parse_messages,
    parse_template_args,
    parse_tools,
)
from patchkv_agents.context.rendering import PartSpan, RenderedContext, render
from patchkv_agents.context.versions import ContextVersion

__all__ = [
    "ContextHistory",
    "ContextVersion",
    "Conversation",
    "Edit",
    "EditKind",
    "FrozenJson",
    "Message",
    "PartSpan",
    "RenderedContext",
    "ToolCall",
    "infer_edits",
    "load_conversation",
    "parse_messages",
    "parse_template_args",
    "parse_tools",
    "render",
]
