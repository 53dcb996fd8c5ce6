"""Chat templates of several families and with odd habits, written for these tests.

Those of families are in our own words, after the formats that the makers document (model cards and
prompt-format pages of Qwen3, Llama 3.1 and 3.2, Gemma 3, GLM-4, Mistral), and do what matters to
rendering as they do: order, control tokens, what is trimmed, moved, dropped or refused. The long
instructions about tools are shortened.
"""

from __future__ import annotations

from dataclasses import dataclass

# Reasoning only behind the last question; results in a row share a user turn; an answer that begins
# with its own think block is taken apart.
QWEN3 = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
{{- '# Tools\\nSchemas within <tools></tools>:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{% endfor %}
{{- '\\n</tools>\\nCall as <tool_call>{...}</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=messages | length - 1, open=true) %}
{%- for message in messages[::-1] %}{% set index = messages | length - 1 - loop.index0 %}
{%- if ns.open and message.role == 'user' and not (
    message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')
) %}{% set ns.open = false %}{% set ns.last = index %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content %}{% set reasoning = message.reasoning_content or '' %}
{%- if not reasoning and '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or reasoning) %}
{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{- content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{%- if call.function.arguments is string %}{{- call.function.arguments }}
{%- else %}{{- call.function.arguments | tojson }}{% endif %}
{{- '}\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""

# A date in the system turn, tools in the first user turn, everything trimmed, one call a turn and
# no text beside it, results as JSON strings.
LLAMA3 = """\
{%- if date_string is not defined %}{% set date_string = '26 Jul 2024' %}{% endif %}
{%- macro turn(role) %}{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}{% endmacro %}
{{- '<|begin_of_text|>' }}
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content | trim %}{% set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{{- turn('system') }}{% if tools %}{{- 'Environment: ipython\\n' }}{% endif %}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: ' + date_string + '\\n\\n' }}
{{- system + '<|eot_id|>' }}
{%- for message in rest %}
{%- if message.role == 'tool' %}{{- turn('ipython') + message.content | tojson + '<|eot_id|>' }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
{%- set call = message.tool_calls[0].function %}{{- turn('assistant') }}
{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
{%- else %}{{- turn(message.role) }}
{%- if loop.first and tools %}
{{- 'Answer with a JSON for a function call.\\n\\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}{% endif %}
{{- message.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- turn('assistant') }}{% endif %}"""

# The system text opens the first user turn, roles alternate, content is trimmed and may be a list
# of parts. Knows no tools.
GEMMA3 = """\
{{- '<bos>' }}
{%- if messages[0].role == 'system' %}
{%- set first = messages[0].content + '\\n\\n' %}{% set rest = messages[1:] %}
{%- else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{%- for message in rest %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/...') }}{% endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{{- first if loop.first else '' }}
{%- if message.content is string %}{{- message.content | trim }}
{%- else %}{% for part in message.content %}{{- part.text | trim }}{% endfor %}{% endif %}
{{- '<end_of_turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{% endif %}"""

# A turn has a beginning and no end; each call is a turn of its own, named in the head.
GLM4 = """\
{{- '[gMASK]<sop>' }}
{%- if tools %}{{- '<|system|>\\n# Tools' }}
{%- for tool in tools %}
{{- '\\n\\n## ' + tool.function.name + '\\n\\n' + tool.function | tojson(indent=4) }}{% endfor %}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{- '<|observation|>\\n' + message.content }}
{%- elif message.role == 'assistant' and message.tool_calls %}
{%- if message.content %}{{- '<|assistant|>\\n' + message.content }}{% endif %}
{%- for call in message.tool_calls %}
{{- '<|assistant|>' + call.function.name + '\\n' + call.function.arguments | tojson }}{% endfor %}
{%- else %}{{- '<|' + message.role + '|>' + message.metadata | default('') }}
{{- '\\n' + message.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"""

# Tools and the system text go to the last user turn; ids of calls have nine characters; arguments
# must be objects; no generation prompt.
MISTRAL = """\
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content + '\\n\\n' %}{% set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{%- set users = rest | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(users=0) %}
{{- '<s>' }}
{%- for message in rest %}
{%- if message.role == 'user' %}{% set ns.users = ns.users + 1 %}
{%- set is_last = ns.users == users | length %}
{%- if is_last and tools %}
{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + (system if is_last else '') + message.content + '[/INST]' }}
{%- elif message.tool_calls %}{{- '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' }}
{{- dict(call.function.arguments) | tojson + ', "id": "' + call.id + '"}' }}
{{- ', ' if not loop.last else ']</s>' }}{% endfor %}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content + '</s>' }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS]{"content": ' + message.content | tojson }}
{{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}{% endfor %}"""


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models.

    Attributes:
        template: its chat template.
        special: its special tokens.
        other: added tokens of its format that do not count as special.
        calls: most calls that one message can show; 0 if it knows no tools.
    """

    template: str
    special: tuple[str, ...]
    other: tuple[str, ...] = ()
    calls: int = 2


FAMILIES = {
    "qwen3": Family(
        QWEN3,
        ("<|im_start|>", "<|im_end|>"),
        ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>")
        + ("</tool_response>",),
    ),
    "llama3": Family(
        LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        calls=1,
    ),
    "gemma3": Family(GEMMA3, ("<bos>", "<start_of_turn>", "<end_of_turn>"), calls=0),
    "glm4": Family(
        GLM4,
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    ),
    "mistral": Family(
        MISTRAL,
        ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
        + ("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ),
}

# No control tokens at all.
PLAIN = """\
{%- for message in messages %}{{- message.role + ': ' + message.content + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{% endif %}"""

# Shows what depends on the content without being it: no marks can be put into it.
SHORTENING = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content[:12] + '<|im_end|>\\n' }}{% endfor %}"""

# Joins strings, so that an object of arguments fails.
JOINING = """\
{%- for message in messages %}{{- '<|im_start|>' + message.content }}
{%- for call in message.tool_calls or [] %}{{- call.function.arguments + '!' }}{% endfor %}
{{- '<|im_end|>' }}{% endfor %}"""
