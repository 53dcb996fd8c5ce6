"""Chat templates with the habits of several families, written for these tests."""

from __future__ import annotations

# As Qwen3: reasoning only behind the last question; results in a row share a user turn; an answer
# that begins with its own think block is taken apart.
QWEN_LIKE = """\
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
{%- if loop.index0 > ns.last and reasoning %}
{{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}{% endif %}
{{- content }}
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
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

# As Gemma: the system text opens the first user turn, roles alternate, content is trimmed and may
# be a list of parts.
GEMMA_LIKE = """\
{{- '<|endoftext|>' }}
{%- if messages[0].role == 'system' %}
{%- set first = messages[0].content + '\\n\\n' %}{% set rest = messages[1:] %}
{%- else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{%- for message in rest %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/...') }}{% endif %}
{{- '<|im_start|>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{{- first if loop.first else '' }}
{%- if message.content is string %}{{- message.content | trim }}
{%- else %}{% for part in message.content %}{{- part.text | trim }}{% endfor %}{% endif %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>model\\n' }}{% endif %}"""

# As GLM-4: a turn has a beginning and no end.
GLM_LIKE = """\
{{- '<repo_name>' }}{% for message in messages %}
{{- {'user': '<filename>', 'assistant': '<gh_stars>'}[message.role] + '\\n' + message.content }}
{%- endfor %}{% if add_generation_prompt %}{{- '<gh_stars>' }}{% endif %}"""

# As Mistral: the system text goes into the last user turn; no generation prompt; arguments must
# be objects.
MISTRAL_LIKE = """\
{{- '<jupyter_start>' }}{% for message in messages %}
{%- if message.role == 'user' %}{{- '<issue_start>' }}
{%- if loop.last and messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
{{- message.content + '<issue_comment>' }}
{%- elif message.role == 'assistant' %}
{%- for call in message.tool_calls or [] %}
{{- '<jupyter_code>' + call.function.name + dict(call.function.arguments) | tojson }}{% endfor %}
{{- message.content + '<issue_closed>' }}
{%- elif message.role == 'tool' %}{{- '<jupyter_output>' + message.content + '<file_sep>' }}
{%- endif %}{% endfor %}"""

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
