"""The agent's context: messages, versions and edits; rendering to tokens.

Imports neither torch nor transformers: tokenizers are passed in as objects.
"""

from patchkv_agents.context.changes.anchors import message_anchors
from patchkv_agents.context.changes.inference import infer_edits
from patchkv_agents.context.changes.matching import match_messages
from patchkv_agents.context.conversion import (
    from_langchain,
    from_openai,
    to_langchain,
    to_openai,
)
from patchkv_agents.context.edits import Edit, EditKind
from patchkv_agents.context.frozen import FrozenJson
from patchkv_agents.context.lineage.forms import MessageForm
from patchkv_agents.context.messages import Conversation, Message, ToolCall
from patchkv_agents.context.parsing import (
    load_conversation,
    parse_messages,
    parse_template_args,
    parse_tools,
)
from patchkv_agents.context.rendering.render import PartSpan, RenderedContext, render
from patchkv_agents.context.rendering.sampled import SampledReply, match_replies
from patchkv_agents.context.stores import (
    HistoryStore,
    MemoryHistoryStore,
    SQLiteHistoryStore,
)
from patchkv_agents.context.versioning.history import ContextHistory
from patchkv_agents.context.versions import ContextVersion, Forgotten, ThreadKey

__all__ = [
    "ContextHistory",
    "ContextVersion",
    "Conversation",
    "Edit",
    "EditKind",
    "Forgotten",
    "FrozenJson",
    "HistoryStore",
    "MemoryHistoryStore",
    "Message",
    "MessageForm",
    "PartSpan",
    "RenderedContext",
    "SQLiteHistoryStore",
    "SampledReply",
    "ThreadKey",
    "ToolCall",
    "from_langchain",
    "from_openai",
    "infer_edits",
    "load_conversation",
    "match_messages",
    "match_replies",
    "message_anchors",
    "parse_messages",
    "parse_template_args",
    "parse_tools",
    "render",
    "to_langchain",
    "to_openai",
]
