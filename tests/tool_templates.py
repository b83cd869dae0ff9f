"""Chat templates with tools, worded anew after those of published families, and tokenizers that have them.

What the published ones write behind the question of some conversations is in ``tool_templates.json``, with the place
where each was read; the templates here must write the same. ``llama3.2``, of which no text is stored, is ``llama3.1``
with the calls of Llama 4.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chat_families import write_family

from ragr1_actors.rollout.engines.base import PolicyTokenizer

STORED: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""``conversations`` with calls, the ``schema`` of their tool, and of each family its source and texts."""
_TOOLS = "{% if tools %}Tools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n{% endif %}"
_RESULT = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
_JSON_CALLS = (
    "{% for call in m.tool_calls %}{% if m.content or not loop.first %}\n{% endif %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)
_CODER_CALLS = (
    "{% for call in m.tool_calls %}{% if not loop.first %}\n{% endif %}"
    "<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for name, value in call.function.arguments | items %}<parameter={{ name }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}"
)
_CHATML = (
    f"<|im_start|>system\n{_TOOLS}Help.<|im_end|>\n"
    "{% set at = namespace(question=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set at.question = loop.index0 %}{% endif %}{% endfor %}"
    f"{{% for m in messages %}}{{% if m.role == 'tool' %}}{_RESULT}"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\nBODY<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nOPEN{% endif %}"
)
_THOUGHT = (
    "{% set thought, closed, said = m.content.rpartition('</think>') %}{% if loop.index0 > at.question WHEN %}"
    "<think>\n{{ thought.replace('<think>', '').strip('\n') }}\n</think>\n\n{% endif %}{{ said.lstrip('\n') }}"
)
_LLAMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}"
    "<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
    "{% elif 'tool_calls' in m %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call a turn') }}{% endif %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>'
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    f"{{% if loop.first %}}{_TOOLS}{{% endif %}}{{{{ m.content | trim }}}}<|eot_id|>{{% endif %}}{{% endfor %}}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_PYTHONIC = _LLAMA.replace(
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}',
    "[{{ m.tool_calls[0].function.name }}({% for name, value in m.tool_calls[0].function.arguments | items %}"
    "{{ name }}={{ value | tojson }}{% if not loop.last %}, {% endif %}{% endfor %})]",
)
_MISTRAL = (
    "{{ bos_token }}{% set at = namespace(question=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set at.question = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == at.question %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('a wrong id') }}{% endif %}"
    "[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]"
    "{% else %}{{ m.content }}{% for call in m.tool_calls or [] %}[TOOL_CALLS]{{ call.function.name }}"
    "[CALL_ID]{{ call.id }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}"
    "{{ eos_token }}{% endif %}{% endfor %}"
)
_QWEN3 = _CHATML.replace("BODY", _THOUGHT + _JSON_CALLS.replace("m.content or", "said | trim or")).replace("OPEN", "")
_QWEN3_5 = _CHATML.replace("BODY", _THOUGHT + _CODER_CALLS).replace("OPEN", "<think>\n")
_TRIMMED = ("{{ m.content }}", "{{ m.content | trim }}")
TEMPLATES = {
    "qwen2.5": ("qwen2.5", "hermes", _CHATML.replace("BODY", "{{ m.content }}" + _JSON_CALLS).replace("OPEN", "")),
    "qwen3": ("qwen3", "hermes", _QWEN3.replace("WHEN", "and (loop.last or thought | trim)")),
    "qwen3.5": ("qwen3.5", "qwen3_coder", _QWEN3_5.replace("WHEN", "").replace(*_TRIMMED)),
    "llama3.1": ("llama3", "llama3_json", _LLAMA),
    "llama3.2": ("llama3", "pythonic", _PYTHONIC),
    "mistral": ("mistral_nemo", "mistral", _MISTRAL),
}
"""By name: the family of the tokenizer, the grammar, and the template."""


def write_tool_family(folder: Path, name: str) -> PolicyTokenizer:
    """Write tokenizer and template into a new folder, and load them."""
    family, _, template = TEMPLATES[name]
    template = template.replace("%}\n", "%}{{ '\\n' }}")  # transformers' Jinja drops a line break behind a block
    write_family(folder, family)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return PolicyTokenizer(folder)
