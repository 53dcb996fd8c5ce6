"""The agent's context: messages, versions and edits; rendering to tokens.

Imports neither torch nor transformers: tokenizers are passed in as objects.
"""

from .edits import Edit, EditKind
from .frozen import FrozenJson
from .history import ContextHistory
from .inference import infer_edits
from .messages import Conversation, Message, ToolCall
from .parsing import load_conversation, parse_messages, parse_tools
from .rendering import PartSpan, RenderedContext, render
from .versions import ContextVersion

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
    "parse_tools",
    "render",
]
