"""Chat templates as data: in the manner of thirty-three families, and bombs. Written for the tests alone."""
# ruff: noqa: E501

# Each uses what its family's templates use; the texts are short and their own.
FAMILIES = {
    "chatml": """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
{% endif %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "llama-2": """{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}
{% set system_message = messages[0]['content'] %}{% else %}{% set rest = messages %}
{% set system_message = false %}{% endif %}{% for message in rest %}
{% if loop.index0 == 0 and system_message != false %}
{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
{% else %}{% set content = message['content'] %}{% endif %}
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}""",
    "llama-3": """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content']|trim %}
{%- set messages = messages[1:] %}{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}
{%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}{{- system }}{{- "<|eot_id|>" }}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if not message.tool_calls|length == 1 %}{{- raise_exception("one call at a time") }}{%- endif %}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}""",
    "mistral": """{%- if messages[0]["role"] == "system" %}{%- set system_message = messages[0]["content"] %}
{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
{%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
{%- if (message["role"] == "user") != (ns.index % 2 == 0) %}{{- raise_exception("roles must alternate") }}{%- endif %}
{%- set ns.index = ns.index + 1 %}{%- endif %}{%- endfor %}{{- bos_token }}
{%- for message in loop_messages %}{%- if message["role"] == "user" %}
{%- if tools is not none and (message == user_messages[-1]) %}{{- "[AVAILABLE_TOOLS] [" }}{%- endif %}
{%- if loop.last and system_message is defined %}{{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
{%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
{%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token}}{%- endif %}{%- endfor %}""",
    "gemma": """{{ bos_token }}{%- set first_user_prefix = (messages[0]['content'] + '\\n\\n') if
    messages[0]['role'] == 'system' else '' -%}
{%- set loop_messages = messages[1:] if messages[0]['role'] == 'system' else messages -%}
{%- for message in loop_messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception("must alternate") }}{%- endif -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else '') }}
{%- if message['content'] is string -%}{{ message['content'] | trim }}
{%- elif message['content'] is iterable -%}{%- for item in message['content'] -%}{{ item['text'] | trim }}
{%- endfor -%}{%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}{{ '<end_of_turn>\\n' }}
{%- endfor -%}{%- if add_generation_prompt -%}{{'<start_of_turn>model\\n'}}{%- endif -%}""",
    "phi-3": """{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}
{{'<|system|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'user' %}
{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'assistant' %}
{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}""",
    "phi-4": """{% for message in messages %}{% if (message['role'] == 'system') %}
{{'<|im_start|>system<|im_sep|>' + message['content'] + '<|im_end|>'}}{% elif (message['role'] == 'user') %}
{{'<|im_start|>user<|im_sep|>' + message['content'] + '<|im_end|>'}}{% elif (message['role'] == 'assistant') %}
{{'<|im_start|>assistant<|im_sep|>' + message['content'] + '<|im_end|>'}}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}""",
    "qwen-2.5": """{%- if tools %}{{- '<|im_start|>system\\n' }}
{{- "\\n\\n# Tools\\n<tools>" }}{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
{{- "\\n</tools>\\n<tool_call>\\n{\\"name\\": <function-name>}\\n</tool_call><|im_end|>\\n" }}
{%- else %}{%- if messages[0]['role'] == 'system' %}
{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{%- endif %}{%- endif %}
{%- for message in messages %}
{%- if (message.role == "user") or (message.role == "system" and not loop.first) or
      (message.role == "assistant" and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- elif message.role == "assistant" %}{{- '<|im_start|>' + message.role }}
{%- for tool_call in message.tool_calls %}{{- tool_call.arguments | tojson }}{%- endfor %}
{%- elif message.role == "tool" %}
{%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    "qwen-3": """{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.multi_step_tool and message.role == "user" and message.content is string and
  not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
{%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}{%- endif %}{%- endfor %}
{%- for message in messages %}{%- if message.content is string %}{%- set content = message.content %}
{%- else %}{%- set content = '' %}{%- endif %}
{%- if message.role == "assistant" %}{%- set reasoning_content = '' %}
{%- if message.reasoning_content is string %}{%- set reasoning_content = message.reasoning_content %}
{%- else %}{%- if '</think>' in content %}
{%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}{%- endif %}
{%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
{{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + content }}{%- endif %}{{- '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}""",
    "deepseek": """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% set ns = namespace(is_first=false, is_tool=false, system_prompt='', is_first_sp=true) %}
{%- for message in messages %}{%- if message['role'] == 'system' %}{%- if ns.is_first_sp %}
{% set ns.system_prompt = ns.system_prompt + message['content'] %}{% set ns.is_first_sp = false %}{%- else %}
{% set ns.system_prompt = ns.system_prompt + '\\n\\n' + message['content'] %}{%- endif %}{%- endif %}{%- endfor %}
{{ bos_token }}{{ ns.system_prompt }}
{%- for message in messages %}{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}
{{'<|User|>' + message['content']}}{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}
{% set content = message['content'] %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{'<|Assistant|>' + content + '<|end|>'}}{%- endif %}{%- endfor -%}
{% if add_generation_prompt and not ns.is_tool %}{{'<|Assistant|><think>\\n'}}{% endif %}""",
    "command-r": """{{ bos_token }}{%- macro json_type(spec) -%}
{%- set map = {"string": "str", "number": "float", "integer": "int"} -%}
{%- if spec.type in map -%}{{ map[spec.type] }}{%- elif spec.type == "array" -%}{{ "List[" + json_type(spec['items']) + "]" }}
{%- else -%}{{ "Any" }}{%- endif -%}{%- endmacro -%}
{%- if messages[0]['role'] == 'system' -%}{%- set loop_messages = messages[1:] -%}
{%- set system_message = messages[0]['content'] -%}{%- else -%}{%- set loop_messages = messages -%}
{%- set system_message = '## Task\\nHelp.' -%}{%- endif -%}
{{ '<|START|><|SYSTEM|>' }}{{ system_message | replace('\\r\\n', '\\n') }}{{ '<|END|>' }}
{{ json_type({"type": "array", "items": {"type": "string"}}) }}
{%- for message in loop_messages -%}{%- set content = message['content'] -%}
{%- if message['role'] == 'user' -%}{{ '<|START|><|USER|>' + content.strip() + '<|END|>' }}
{%- elif message['role'] == 'assistant' -%}{{ '<|START|><|CHATBOT|>'  + content.strip() + '<|END|>' }}{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|START|><|CHATBOT|>' }}{%- endif -%}""",
    "granite": """{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}
{%- set loop_messages = messages[1:] %}{%- else %}
{%- set system_message = "Today's Date: " + strftime_now('%B %d, %Y') + ".\\nYou help." %}
{%- if tools and documents %}{%- set system_message = system_message + " Tools and documents." %}
{%- elif documents %}{%- set system_message = system_message + " Documents." %}{%- endif %}
{%- set loop_messages = messages %}{%- endif %}
{{- '<|role|>system<|end_role|>' + system_message + '<|end|>\\n' }}
{%- if documents %}{{- documents | map(attribute='text') | join('\\n') }}{%- endif %}
{%- for message in loop_messages %}{{- '<|role|>' + message['role'] + '<|end_role|>' + message['content'] + '<|end|>\\n' }}
{%- if loop.last and add_generation_prompt %}{{- '<|role|>assistant' }}
{%- if controls %}{{- ' ' + controls | tojson() }}{%- endif %}{{- '<|end_role|>' }}{%- endif %}{%- endfor %}""",
    "zephyr": """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    "vicuna": """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- if messages[0].role == 'system' %}{{ messages[0].content ~ ' ' }}{% else %}A chat. {% endif -%}
{% for m in messages if m.role != 'system' -%}{% if m.role == 'user' %}USER: {{ m.content }}
{%- else %} ASSISTANT: {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %} ASSISTANT:{% endif %}""",
    "falcon": """{% for message in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}
{{- message['role'] | capitalize }}: {{ message['content'].replace('\\r\\n', '\\n').replace('\\n\\n', '\\n') }}
{%- endfor %}{% if add_generation_prompt %}{{ '\\n' + 'assistant' | title + ':' }}{% endif %}""",
    "smollm-3": """{%- set system = messages[0].content if messages[0].role == "system" else none -%}
{%- set mode = "/no_think" if system and "/no_think" in system else "/think" -%}
{%- set ns = namespace(text=(system or "").replace("/no_think", "").replace("/think", "").rstrip()) -%}
{{- "<|im_start|>system\\n## Metadata\\n\\nCutoff: June 2025\\nToday: " ~ strftime_now("%d %B %Y") ~ "\\nMode: " ~ mode ~ "\\n\\n" -}}
{%- if ns.text %}{{- "## Custom\\n\\n" + ns.text + "\\n\\n" -}}{%- endif -%}{{- "<|im_end|>\\n" -}}
{%- for message in messages -%}{%- set content = message.content if message.content is string else "" -%}
{%- if message.role == "user" -%}{{- "<|im_start|>user\\n" + content + "<|im_end|>\\n" -}}
{%- elif message.role == "assistant" -%}{%- generation -%}
{%- if mode == "/think" -%}{{- "<|im_start|>assistant\\n" + content.lstrip("\\n") + "<|im_end|>\\n" -}}
{%- else -%}{{- "<|im_start|>assistant\\n<think>\\n\\n</think>\\n" + content.lstrip("\\n") + "<|im_end|>\\n" -}}{%- endif -%}
{%- endgeneration -%}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}""",
    "gpt-oss": """{%- macro render_type(spec, required) -%}{%- if spec.type == "array" -%}{{- render_type(spec['items'], false) + "[]" }}
{%- elif spec.type is defined and spec.type is iterable and spec.type is not string and spec.type[0] is defined -%}
{{- spec.type | join(" | ") }}{%- elif spec.enum -%}{{- '"' + spec.enum|join('" | "') + '"' -}}
{%- elif spec.properties -%}{{- "{\\n" -}}{%- for name, each in spec.properties.items() -%}
{{- name ~ ("" if name in (spec.required or []) else "?") ~ ": " }}{{ render_type(each, true) }}
{%- if not loop.last %}{{- ", " }}{%- endif %}{%- endfor %}{{- "}" -}}{%- else -%}{{- spec.type or "any" }}{%- endif -%}{%- endmacro -%}
{%- macro system() -%}{{- "You are a model.\\nCurrent date: " + strftime_now("%Y-%m-%d") + "\\n\\n" }}
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
{{- "Reasoning: " + reasoning_effort + "\\n# Channels: " + ["analysis", "final"] | join(", ") }}{%- endmacro -%}
{{- "<|start|>system<|message|>" }}{{- system() }}{{- "<|end|>" }}
{%- if messages[0].role in ["developer", "system"] %}{%- set developer = messages[0].content %}
{%- set loop_messages = messages[1:] %}{%- else %}{%- set developer = "" %}{%- set loop_messages = messages %}{%- endif %}
{%- if developer or tools %}{{- "<|start|>developer<|message|># Instructions\\n\\n" + developer + "<|end|>" }}{%- endif %}
{{- render_type({"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "array", "items": {"enum": ["x", "y"]}},
   "c": {"type": ["null", "number"]}}, "required": ["a"]}, true) }}
{%- set last_tool_call = namespace(name=none) %}
{%- for message in loop_messages -%}{%- if message.role == 'assistant' -%}
{%- if "thinking" in message %}{{- raise_exception("no thinking here") }}{%- endif %}
{%- if loop.last and not add_generation_prompt %}{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
{%- else %}{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}{%- endif %}
{%- set last_tool_call.name = none %}{%- elif message.role == 'user' -%}
{{- "<|start|>user<|message|>" + message.content + "<|end|>" }}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}""",
    "glm": """[gMASK]<sop>{%- macro visible_text(content) -%}{%- if content is string -%}{{- content }}
{%- elif content is iterable and content is not mapping -%}{%- for item in content -%}
{%- if item is mapping and item.type == 'text' -%}{{- item.text }}{%- elif item is string -%}{{- item }}{%- endif -%}
{%- endfor -%}{%- else -%}{{- content }}{%- endif -%}{%- endmacro -%}
{%- set ns = namespace(last_user_index=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}
{% set ns.last_user_index = loop.index0 -%}{%- endif %}{%- endfor %}
{% for m in messages %}{%- if m.role == 'user' -%}<|user|>
{{ visible_text(m.content) }}{{- '/nothink' if (enable_thinking is defined and not enable_thinking and
 not visible_text(m.content).endswith("/nothink")) else '' -}}
{%- elif m.role == 'assistant' -%}<|assistant|>{%- set content = visible_text(m.content) %}
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{%- if loop.index0 > ns.last_user_index -%}{{ '\\n<think></think>' }}{%- endif -%}
{%- if content.strip() -%}{{ '\\n' + content.strip() }}{%- endif -%}
{%- elif m.role == 'system' -%}<|system|>
{{ visible_text(m.content) }}{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}""",
    "minimax": """{%- set toolcall_begin = '<minimax:tool_call>' -%}{%- set ns = namespace(last=-1, cut=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- macro build_system(system_message) -%}{%- if system_message and system_message.content -%}
{{- system_message.content }}{%- else -%}{{- model_identity | default("You are a helper.") }}{%- endif -%}{%- endmacro -%}
{%- set system_message = messages | selectattr('role', 'equalto', 'system') | first | default(none) -%}
{{- ']~!b[' ~ ']~b]system\\n' ~ build_system(system_message) ~ '[e~[\\n' }}
{%- for message in messages | rejectattr('role', 'equalto', 'system') -%}
{%- if message.role == 'user' -%}{{- ']~b]user\\n' ~ message.content ~ '[e~[\\n' }}{%- continue -%}{%- endif -%}
{%- if loop.index0 > 40 -%}{%- break -%}{%- endif -%}
{{- ']~b]ai\\n' }}{%- set text -%}{{ message.content | trim }}{%- endset -%}{{- text ~ '[e~[\\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{- ']~b]ai\\n' ~ '<think>' ~ '\\n' }}{%- endif -%}""",
    "kimi": """{%- macro content_of(message) -%}{%- set c = message.get('content') -%}
{%- if c is string -%}{{ c }}{%- elif c is not none -%}{% for part in c -%}{{ part.get('text', '') }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- set names = {'user': '<|im_user|>', 'system': '<|im_system|>'} -%}
{%- for message in messages -%}{%- if loop.first and messages[0]['role'] != 'system' -%}
<|im_system|>system<|im_middle|>You help.<|im_end|>{%- endif -%}
{%- set name = message.get('name') or message['role'] -%}
{{ names.get(message['role'], '<|im_assistant|>') }}{{ name }}<|im_middle|>{{ content_of(message) }}<|im_end|>
{%- endfor -%}{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}""",
    "olmo": """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>
' + message['content'] + '
' }}{% elif message['role'] == 'user' %}{{ '<|user|>
' + message['content'] + '
' }}{% elif message['role'] == 'assistant' %}{% if not loop.last %}{{ '<|assistant|>
'  + message['content'] + eos_token + '
' }}{% else %}{{ '<|assistant|>
'  + message['content'] + eos_token }}{% endif %}{% endif %}{% if loop.last and add_generation_prompt %}{{ '<|assistant|>
' }}{% endif %}{% endfor %}""",
    "nemotron": """{%- set ns = namespace(thinking=true) -%}{%- for message in messages -%}
{%- set content = message['content'] -%}{%- if message['role'] in ('user', 'system') -%}
{%- if '/think' in content -%}{%- set ns.thinking = true -%}{%- elif '/no_think' in content -%}{%- set ns.thinking = false -%}
{%- endif -%}{%- endif -%}{%- endfor -%}
{{ bos_token }}{%- for message in messages -%}{%- set content = message['content'].replace('/think', '').strip() -%}
<SPECIAL_10>{{ message['role'] | capitalize }}{{ '\\n' ~ content }}{{ '\\n' if not loop.last }}
{%- if loop.nextitem is defined and loop.nextitem.role == message.role -%}{{ '(again)' }}{%- endif -%}
{%- if loop.previtem is defined -%}{{ loop.cycle('', ' ') }}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}<SPECIAL_11>Assistant{{ '\\n<think>\\n' if ns.thinking else '\\n<think></think>' }}{%- endif -%}""",
    "hunyuan": """{% set context = {'has_head': true, 'system': messages | selectattr('role', 'eq', 'system') | map(attribute='content') | join('') } %}
{% for message in messages %}{% set content = message['content'] %}{% if message['role'] == 'user' %}
{% if loop.index0 == 0 and context.has_head %}{% set content = '<|startoftext|>' + content + '<|extra_0|>' %}
{% else %}{% set content = content + '<|extra_0|>' %}{% endif %}
{% elif message['role'] == 'assistant' %}{% set content = content + '<|eos|>' %}
{% elif message['role'] == 'system' %}{% set content = '<|startoftext|>' + content + '<|extra_4|>' %}{% endif %}{{ content }}
{% endfor %}{{ '%s-%05.1f' | format(context.system | length, 2) }}{{ messages | groupby('role') | map('first') | join(',') | upper }}
{{- (messages | map(attribute='content') | list | tojson(indent=2, ensure_ascii=true))[:80] }}{{ [3, 1, 2] | sort | reverse | list }}
{{- messages | batch(2) | list | length }}{{ 'a' | center(9) }}|{{ 'x'.ljust(4) }}|{{ 7 | round(1) }}{{ 5000000 | tojson }}""",
}

# What several of those with tools share: reasoning, the last question, calls in JSON.
_SAID = """{%- macro said(m) -%}{{ (m.content or '').split('</think>')[-1] | trim }}{%- endmacro -%}
{%- macro thought(m) -%}{%- if m.reasoning_content is string -%}{{ m.reasoning_content | trim }}
{%- elif '</think>' in m.content -%}{{ m.content.split('</think>')[0].split('<think>')[-1] | trim }}{%- endif -%}{%- endmacro -%}
{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}
{%- endif -%}{%- endfor -%}"""
_CALLS = """{%- macro call_of(call, line='\\n') -%}{%- set f = call.function -%}{%- set given = f.arguments -%}
{{- '<tool_call>' ~ line ~ '{"name": "' ~ f.name ~ '", "arguments": ' }}{{ given if given is string else given | tojson }}
{{- '}' ~ line ~ '</tool_call>' }}{%- endmacro -%}"""

# Of 2026, with tools and reasoning.
OF_2026 = {
    "qwen-3.5": _SAID
    + """{%- if ns.last < 0 -%}{{- raise_exception('no question') }}{%- endif -%}
{%- set first = messages[0].content | trim if messages[0].role == 'system' else '' -%}
{%- if tools -%}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}{%- for tool in tools -%}{{- '\\n' }}{{ tool | tojson }}{%- endfor -%}
{{- '\\n</tools>\\nCalls:\\n<tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>' }}
{{- '\\n\\n' + first if first }}{{- '<|im_end|>\\n' }}{%- elif first -%}{{- '<|im_start|>system\\n' + first + '<|im_end|>\\n' }}{%- endif -%}
{%- for m in messages -%}{%- if m.role == 'system' and not loop.first -%}{{- raise_exception('a system message is first') }}
{%- elif m.role == 'user' -%}{{- '<|im_start|>user\\n' ~ (m.content | trim) ~ '<|im_end|>\\n' }}{%- elif m.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' }}{%- if loop.index0 > ns.last -%}{{- '<think>\\n' ~ thought(m) ~ '\\n</think>\\n\\n' }}{%- endif -%}{{- said(m) }}
{%- for call in m.tool_calls or [] -%}{{- '\\n\\n' if loop.first and said(m) else '\\n' if not loop.first }}
{{- '<tool_call>\\n<function=' ~ call.function.name ~ '>\\n' }}{%- for key, value in call.function.arguments | items -%}
{{- '<parameter=' ~ key ~ '>\\n' }}{{ value | tojson | safe if value is mapping or (value is sequence and value is not string) else value | string }}
{{- '\\n</parameter>\\n' }}{%- endfor -%}{{- '</function>\\n</tool_call>' }}{%- endfor -%}{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' -%}{{- '<|im_start|>user' if loop.previtem and loop.previtem.role != 'tool' }}
{{- '\\n<tool_response>\\n' ~ m.content ~ '\\n</tool_response>' }}{{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' }}{{- '\\n</think>\\n\\n' if enable_thinking is false }}{%- endif -%}""",
    "gemma-4": """{%- macro told(v) -%}{%- if v is string -%}<|"|>{{ v }}<|"|>{%- elif v is boolean -%}{{ v | lower }}
{%- elif v is mapping -%}{{ '{' }}{% for key, each in v | dictsort %}{{ key }}:{{ told(each) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}
{%- elif v is sequence -%}[{% for each in v %}{{ told(each) }}{{ ',' if not loop.last }}{% endfor %}]{%- else -%}{{ v }}{%- endif -%}{%- endmacro -%}
{%- set ns = namespace(answered=false) -%}{%- set first = messages[0].role in ['system', 'developer'] -%}{{ bos_token }}
{%- if tools or first or enable_thinking -%}{{- '<|turn>system\\n' }}{{- '<|think|>\\n' if enable_thinking }}{{- messages[0].content | trim if first }}
{%- for tool in tools or [] -%}<|tool>declaration:{{ tool.function.name ~ told({'parameters': tool.function.parameters}) }}<tool|>{%- endfor -%}{{- '<turn|>\\n' }}{%- endif -%}
{%- set rest = messages[1:] if first else messages -%}{%- for m in rest -%}{%- set ns.answered = false -%}
{{- '<|turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\\n' }}{%- for call in m['tool_calls'] or [] -%}
{{- '<|tool_call>call:' ~ call.function.name ~ told(call.function.arguments) ~ '<tool_call|>' }}{%- endfor -%}
{%- for each in m['tool_responses'] or [] -%}{%- set ns.answered = true -%}
{{- '<|tool_response>response:' ~ each['name'] ~ told({'value': each['response']}) ~ '<tool_response|>' }}{%- endfor -%}
{{- m.content.split('<channel|>')[-1] | trim }}{{- '<turn|>\\n' if m.content or not ns.answered }}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn>model\\n' if not ns.answered }}{{- '<|channel>thought\\n<channel|>' if not enable_thinking | default(false) }}{%- endif -%}""",
    "lfm-2.5": """{{- bos_token -}}{%- set own = namespace(system='') -%}
{%- if messages[0]['role'] == 'system' -%}{%- set own.system = messages[0].get('content') -%}{%- endif -%}
{%- if tools -%}{%- set own.system = own.system ~ ('\\n\\n' if own.system else '') ~ 'List of tools: ' ~ (tools | tojson) -%}{%- endif -%}
{{- '<|im_start|>system\\n' ~ own.system ~ '<|im_end|>\\n' if own.system -}}
{%- for m in messages if m.role != 'system' -%}{{- '<|im_start|>' ~ m.role ~ '\\n' -}}{%- if m.role == 'assistant' -%}{%- generation -%}
{{- '<think>' ~ m.thinking ~ '</think>' if m.thinking is defined -}}{{- (m.content or '').split('</think>')[-1] | trim -}}{%- if m.tool_calls is defined -%}<|tool_call_start|>[
{%- for call in m.tool_calls -%}{{ ', ' if not loop.first }}{{ call['function']['name'] }}({% for key, value in call['function']['arguments'].items() %}
{{- ', ' if not loop.first }}{{ key }}={{ "'" ~ value ~ "'" if value is string else value | string }}{% endfor %}){%- endfor -%}]<|tool_call_end|>{%- endif -%}
{%- endgeneration -%}{%- else -%}{{- m.get('content') -}}{%- endif -%}{{- '<|im_end|>\\n' -}}{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt -}}""",
    "ling-2": _SAID
    + _CALLS
    + """<role>SYSTEM</role>{%- if messages[0].role == 'system' -%}{{- messages[0].content ~ '\\n' }}{%- endif -%}
{%- if tools -%}{{- '# Tools\\n<tools>' }}{%- for tool in tools -%}{{- '\\n' ~ (tool | tojson) }}{%- endfor -%}{{- '\\n</tools>\\n' }}{%- endif -%}
{{- 'detailed thinking ' ~ ('on' if enable_thinking else 'off') ~ '<|role_end|>' }}
{%- for m in messages -%}{%- if m.role == 'user' -%}{{- '<role>HUMAN</role>' ~ m.content ~ '<|role_end|>' }}{%- elif m.role == 'assistant' -%}
<role>ASSISTANT</role>{{- '\\n<think>\\n' ~ thought(m) ~ '\\n</think>\\n\\n' if thought(m) and loop.index0 > ns.last }}{{- said(m) }}
{%- for call in m.tool_calls or [] -%}{{- '\\n' }}{{ call_of(call) }}{%- endfor -%}<|role_end|>{%- elif m.role == 'tool' -%}
{{- '<role>OBSERVATION</role>' if loop.previtem.role != 'tool' }}{{- '\\n<tool_response>\\n' ~ m.content ~ '\\n</tool_response>' }}
{{- '<|role_end|>' if loop.last or loop.nextitem.role != 'tool' }}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}<role>ASSISTANT</role>{{- '\\n<think>\\n' if enable_thinking }}{%- endif -%}""",
    "ernie-4.5": """{%- if not cls_token is defined -%}{%- set cls_token = '<|begin_of_sentence|>' -%}{%- endif -%}{{- cls_token -}}
{%- for m in messages -%}{%- if m['role'] == 'user' -%}{{- 'User: ' + m['content'] + '\\n' -}}{%- elif m['role'] == 'assistant' -%}
{{- 'Assistant: ' + m['content'] + eos_token -}}{%- elif m['role'] == 'system' -%}{{- m['content'] + '\\n' -}}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant: ' -}}{%- endif -%}""",
    "ernie-4.5-thinking": _SAID
    + _CALLS
    + """{{- '<|im_start|>system\\n<global_setting>\\nthink_mode=True\\n</global_setting>' }}
{%- if messages[0].role == 'system' -%}{{- '\\n<system_setting>\\n' ~ messages[0].content ~ '\\n</system_setting>' }}{%- endif -%}
{%- if tools -%}{{- '\\n<tool_list>\\n' ~ (tools | tojson) ~ '\\n</tool_list>' }}{%- endif -%}{{- '<|im_end|>\\n\\n' }}
{%- for m in messages if m.role != 'system' -%}{{- '<|im_start|>' ~ m.role ~ '\\n' }}{%- if m.role == 'assistant' -%}
{{- '<think>\\n' ~ thought(m) ~ '\\n</think>\\n\\n\\n' if thought(m) }}{{- '<response>\\n' ~ said(m) ~ '\\n</response>\\n' if said(m) }}
{%- for call in m.tool_calls or [] -%}{{- call_of(call) ~ '\\n' }}{%- endfor -%}{%- elif m.role == 'tool' -%}
{{- '<tool_output>' ~ m.content ~ '</tool_output>' }}{%- else -%}{{- m.content }}{%- endif -%}{{- '<|im_end|>\\n\\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif -%}""",
    "exaone-moe": _SAID
    + _CALLS
    + """{%- if tools -%}{{- '<|tool_declare|>\\n# Tools\\n' }}{%- for tool in tools -%}{{- '<tool>' ~ (tool | tojson) ~ '</tool>\\n' }}{%- endfor -%}
{{- '<|endofturn|>\\n' }}{%- endif -%}{%- for m in messages -%}{%- if m.role == 'tool' -%}{{- '<|tool|>\\n' if loop.previtem.role != 'tool' else '\\n' }}
{{- '<tool_result>' ~ m.content ~ '</tool_result>' }}{{- '<|endofturn|>\\n' if loop.last or loop.nextitem.role != 'tool' }}{%- else -%}
{{- '<|' ~ m.role ~ '|>\\n' }}{%- if m.role == 'assistant' -%}{{- '<think>\\n' ~ (thought(m) if loop.index0 > ns.last) ~ '\\n</think>\\n\\n' }}{{- said(m) }}
{%- for call in m.tool_calls or [] -%}{{- '\\n' if said(m) or not loop.first }}{{ call_of(call, '') }}{%- endfor -%}{%- else -%}{{- m.content | trim }}{%- endif -%}
{{- '<|endofturn|>\\n' }}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n<think>\\n' }}{{- '\\n</think>\\n\\n' if enable_thinking is defined and not enable_thinking }}{%- endif -%}""",
    "laguna": _SAID
    + """{%- set thinks = enable_thinking | default(false) -%}〈|EOS|〉<system>{{ '\\n\\n' ~ (messages[0].content if messages[0].role == 'system' else 'You help.') }}
{%- if tools -%}{{- '\\n\\n### Tools\\n<available_tools>\\n' }}{%- for tool in tools -%}{{- (tool | tojson) ~ '\\n' }}{%- endfor -%}
{{- '</available_tools>\\n' }}{{- '<think> your thoughts </think>\\n' if thinks }}{{- '<tool_call>name\\n<arg_key>key</arg_key>\\n<arg_value>value</arg_value>\\n</tool_call>' }}
{%- endif -%}{{- '\\n</system>\\n' }}{%- for m in messages -%}{%- if m.role == 'user' -%}{{- '<user>\\n' ~ m.content ~ '\\n</user>\\n' }}
{%- elif m.role == 'tool' -%}{{- '<tool_response>\\n' ~ m.content ~ '\\n</tool_response>\\n' }}{%- elif m.role == 'assistant' -%}
{{- '<assistant>\\n' }}{{- '<think>\\n' ~ thought(m) ~ '\\n' if thought(m) }}{{- '</think>\\n' }}{{- said(m) ~ '\\n' if said(m) }}
{%- for call in m.tool_calls or [] -%}{{- '<tool_call>' ~ call.function.name ~ '\\n' }}{%- for key, value in call.function.arguments.items() -%}
{{- '<arg_key>' ~ key ~ '</arg_key>\\n<arg_value>' }}{{ value if value is string else value | tojson }}{{ '</arg_value>\\n' }}{%- endfor -%}{{- '</tool_call>\\n' }}
{%- endfor -%}{{- '</assistant>\\n' }}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<assistant>\\n' ~ ('<think>' if thinks else '</think>') }}{%- endif -%}""",
    "afmoe": _SAID
    + _CALLS
    + """{{- bos_token }}{%- if tools or messages[0].role == 'system' -%}{{- '<|im_start|>system\\n' ~ (messages[0].content if messages[0].role == 'system') }}
{%- if tools -%}{{- '\\n\\n# Tools\\n<tools>' }}{%- for tool in tools -%}{{- '\\n' ~ (tool | tojson) }}{%- endfor -%}{{- '\\n</tools>' }}{%- endif -%}
{{- '<|im_end|>\\n' }}{%- endif -%}{%- for m in messages if m.role != 'system' -%}{%- if m.role == 'tool' -%}
{{- '<|im_start|>user' if loop.previtem.role != 'tool' }}{{- '\\n<tool_response>\\n' ~ m.content ~ '\\n</tool_response>' }}
{{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}{%- else -%}{{- '<|im_start|>' ~ m.role ~ '\\n' }}{%- if m.role == 'assistant' -%}
{{- '<think>\\n' ~ thought(m) ~ '\\n</think>\\n' if thought(m) }}{{- said(m) }}{%- for call in m.tool_calls or [] -%}{{- '\\n' ~ call_of(call) }}{%- endfor -%}
{%- else -%}{{- m.content }}{%- endif -%}{{- '<|im_end|>\\n' }}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif -%}""",
    "youtu": _SAID
    + _CALLS
    + """{{ bos_token }}{{- messages[0].content if messages[0].role == 'system' }}{%- if tools -%}
{{- '\\n\\n<|begin_of_tool_description|>Tools:' }}{%- for tool in tools -%}{{- '\\n```json\\n' ~ (tool | tojson) ~ '\\n```' }}{%- endfor -%}
{{- '\\n<tool_call>{"name": "name", "arguments": {}}</tool_call>\\n<|end_of_tool_description|>' }}{%- endif -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{{- '<|User|>' ~ m.content }}{%- elif m.role == 'assistant' -%}<|Assistant|>
{{- '<think>\\n' ~ thought(m) ~ '\\n</think>\\n\\n' if thought(m) }}{{- said(m) }}{%- for call in m.tool_calls or [] -%}{{- call_of(call, '') }}{%- endfor -%}
<|end_of_text|>{%- elif m.role == 'tool' -%}{{- '<|User|>' if loop.previtem.role != 'tool' else '\\n' }}{{- '<tool_response>' ~ m.content ~ '</tool_response>' }}
{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}<|Assistant|>{{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and not enable_thinking }}{%- endif -%}""",
}
FAMILIES |= OF_2026

# What the templates of 2026's models are made of, a snippet each: Gemma 4, LFM2.5, Qwen3.5, Kimi K3, Step 3.7 and others.
FEATURES = {
    "neighbours": "{% for m in messages %}{{ loop.previtem.role if loop.previtem }}>{{ m.role }}>"
    "{{ loop.nextitem.role if loop.nextitem is defined }}{{ ', ' if not loop.last }}{% endfor %}",
    "namespaces": "{% macro more(state, by=1) %}{% set state.n = state.n + by %}{% endmacro %}{% set s = namespace(n=1) %}"
    "{% set t = namespace({'parts': []}) %}{{ more(s) }}{{ more(s, by=3) }}{% set t.parts = t.parts + [s.n] %}{{ t.parts }}",
    "lists": "{% set found = messages[3].tool_calls or [] %}{{ found | length }}{{ [1, 2] + [3] }}{{ [1] is sequence }}{{ ('a', 1)[0] }}{{ [3, 1] | sort | join(', ') }}",
    "macros": "{% macro told(v, deep=true) %}{% if v is mapping %}{% for key, of in v | dictsort %}{{ key }}:{{ told(of) }};"
    "{% endfor %}{% elif v is string %}'{{ v }}'{% elif v is boolean %}{{ v | lower }}{% elif v is number %}#{{ v }}"
    "{% elif v is none %}null{% elif v is sequence %}[{% for each in v %}{{ told(each, deep=false) }}{% endfor %}]"
    "{% endif %}{% endmacro %}{{ told(messages[3].tool_calls[0].function.arguments) | upper }}",
    "items": "{% for a, b in messages[3].tool_calls[0].function.arguments.items() %}{{ a }}={{ b }}{% endfor %}"
    "{% for a, b in messages[3].tool_calls[0].function.arguments | items %}{{ a ~ b | string }}{% endfor %}",
    "json": "{% set of = messages[3].tool_calls %}{{ of | tojson }}{{ of | tojson(ensure_ascii=True) }}"
    "{{ of | tojson(indent=2, sort_keys=true) }}{{ of | tojson(separators=(',', ':')) | safe }}",
    "dates": "{{ strftime_now('%Y') }}{{ strftime_now('%d') | int > 0 }}",
    "refusals": "{% if messages | length > 99 %}{{ raise_exception('long') }}{% endif %}",
    "generation": "{% for m in messages %}{%- generation -%}{% set own = m.role %}{{ own }}{%- endgeneration -%}{% endfor %}",
    "loops": "{% for m in messages[::-1] %}{% if m.role == 'tool' %}{% continue %}{% endif %}{{ loop.index0 }}"
    "{% if loop.index > 3 %}{% break %}{% endif %}{% else %}none{% endfor %}{% for i in range(5, 1, -2) %}{{ i }}{% endfor %}",
    "slices": "{{ messages[1:][-1].role }}{{ messages[0].content[:-2] }}{{ 'abcdef'[1:5:2] }}",
    "strings": "{% set c = '\n<think>\nwhy</think>\n\nso' %}{{ c.split('</think>')[0].split('<think>')[-1].lstrip('\n') }}"
    "{{ c.rsplit('\n', 1)[1] }}{{ c.startswith('\n<') }}{{ c.endswith('so') }}{{ c.strip() | length }}"
    "{{ 'a b'.title() }}{{ 'x' * 3 }}{{ '%s-%d' % ('a', 2) }}{{ '%s!' | format('b') }}{{ '{:>4}'.format(7) }}"
    "{{ c.splitlines() | length }}{{ c.find('why') }}{{ c.count('\n') }}{{ 'Ab'.lower() ~ 'Ab'.upper() }}",
    "filters": "{{ messages | map(attribute='role') | unique | list }}{{ messages | selectattr('role', 'equalto', 'tool') | "
    "map(attribute='content') | join('|') }}{{ messages | rejectattr('tool_calls', 'defined') | list | length }}"
    "{{ ['a', 'b'] | map('upper') | list }}{{ [1, 2] | reverse | first }}{{ '<a&b>' | trim | replace('&', '+') }}"
    "{{ (messages | groupby('role') | last).grouper }}{{ '  x' | trim | indent(2, first=true) }}{{ [0, 3] | select | list }}",
    "blocks": "{% set text %}in {{ 1 + 1 }}{% endset %}{{ text | trim }}{% filter upper %}up{% endfilter %}"
    "{% macro around() %}<{{ caller() }}>{% endmacro %}{% call around() %}it{% endcall %}{# nothing #}",
    "undefined": "{{ thinking | default('no') }}{{ '' | default('yes', true) }}{{ thinking is undefined }}"
    "{{ messages[0].none is defined }}{% if enable_thinking is defined and enable_thinking is false %}off{% endif %}",
    "dictionaries": "{% set d = dict(a=1, **{'b': 2}) %}{{ d }}{{ dict.fromkeys(['x', 'y'], 0) }}{{ d.get('c', 'none') }}"
    "{{ 'a' in d }}{{ d.keys() | list }}{{ d.values() | sum }}{{ {'k': [1]}['k'][0] }}",
    "arithmetic": "{{ (7 // 2, 7 % 4, 2 ** 3, 1 if 2 > 1 > 0 else 0, not none, 7 / 2) }}{{ 3.6 | round | int }}{{ -2 | abs }}",
}

_RANGE = "{% for i in range(99999) %}"
_END = "{% endfor %}"
_GROW = "{% set n = namespace(x=START) %}{% for i in range(60) %}{% set n.x = STEP %}{% endfor %}{{ n.x | length }}"
_MACRO = "{% macro f(n) %}BODY{% endmacro %}{{ f(30) }}"


def _grow(start, step):
    return _GROW.replace("START", start).replace("STEP", step)


# Each renders as a little or ends in an error. `messages` is one message, "user": "Hello".
BOMBS = [
    # texts and lists that double
    _grow("'aaaaaaaaaa'", "n.x + n.x"),
    _grow("'aaaaaaaaaa'", "n.x ~ n.x"),
    _grow("['aaaaaaaaaa']", "n.x + n.x"),
    _grow("(1, 2, 3)", "n.x + n.x"),
    _grow("'a'", "n.x * 9"),
    _grow("[1]", "n.x * 9"),
    _grow("'a'", "n.x.replace('a', 'aaaaaaaaa')"),
    _grow("'a'", "n.x | replace('a', 'aaaaaaaaa')"),
    _grow("'a'", "'%s%s%s' | format(n.x, n.x, n.x)"),
    _grow("'a'", "'%s%s%s' % (n.x, n.x, n.x)"),
    _grow("'a'", "'{0}{0}{0}'.format(n.x)"),
    _grow("'a'", "'{x}{x}{x}'.format_map({'x': n.x})"),
    _grow("'a'", "[n.x, n.x, n.x] | join"),
    _grow("'a'", "n.x.join([n.x, n.x, n.x])"),
    _grow("'a'", "[n.x, n.x, n.x] | join(n.x)"),
    _grow("'a'", "(n.x ~ n.x) | title"),
    _grow("'a'", "(n.x ~ n.x) | upper | lower | capitalize"),
    _grow("'<'", "n.x | escape | string"),
    _grow("'<'", "n.x | forceescape | string"),
    _grow("' '", "(n.x ~ n.x) | urlencode"),
    _grow("'\\\\'", "n.x | tojson"),
    _grow("'a'", "[n.x, n.x, n.x] | tojson"),
    _grow("'a'", "[n.x, n.x, n.x] | pprint"),
    _grow("'a'", "[n.x, n.x, n.x] | string"),
    _grow("['a']", "[n.x, n.x, n.x] | sum(start=[])"),
    _grow("['a']", "(n.x + n.x) | list | reverse | list"),
    _grow("'ab'", "(n.x ~ n.x) | list | join('ab')"),
    _grow("'a\\n'", "(n.x ~ n.x) | indent(900000)"),
    _grow("'a b '", "(n.x ~ n.x) | wordwrap(1, wrapstring='aaaaaaaaaaaaaaaa')"),
    _grow("'a'", "(n.x ~ n.x).encode('utf-16')"),
    _grow("{'a': 1}", "dict(a=n.x, b=n.x) | tojson"),
    # counts
    "{{ 'a' * 10**11 }}",
    "{{ 10**11 * [1] }}",
    "{{ [[1] * 100000] * 100000 | length }}",
    "{{ '%*d' | format(2000000000, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '%.1000000000f' | format(1.5) }}",
    "{{ '%*d' % (2000000000, 1) }}",
    "{{ '{:>2000000000}'.format('x') }}",
    "{{ '{:{w}}'.format('x', w=2000000000) }}",
    "{{ '{0:>2000000000}'.format_map({'0': 'x'}) }}",
    "{{ 'x' | center(2000000000) }}",
    "{{ 'x'.center(2000000000) }}",
    "{{ 'x'.ljust(2000000000) }}",
    "{{ 'x'.rjust(2000000000) }}",
    "{{ 'x'.zfill(2000000000) }}",
    "{{ 'a\\tb'.expandtabs(2000000000) }}",
    "{{ [1] | batch(500000000, 0) | list | length }}",
    "{{ [1] | slice(500000000) | list | length }}",
    "{{ messages | tojson(indent=2000000000) }}",
    "{{ messages[0] | xmlattr | indent(2000000000, first=true) }}",
    "{{ 1.5 | round(2000000000, 'ceil') }}",
    "{{ range(10**9) | list }}",
    "{{ strftime_now('%2000000000Y') }}",
    "{{ strftime_now('%Y' * 4000000) | length }}",
    # wide integers
    "{{ 2 ** 100000000 }}",
    "{{ messages | length + 9 ** (9 ** 9) }}",
    "{% set n = namespace(x=99999999999999999999) %}{% for i in range(40) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x=3) %}{% for i in range(40) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x % 10 }}",
    "{% set n = namespace(x=3) %}{% for i in range(40) %}{% set n.x = n.x ** 3 %}{% endfor %}{{ n.x // 7 }}",
    "{% set n = namespace(x=7) %}{% for i in range(30) %}{% set n.x = n.x ** 2 // 3 %}{% endfor %}{{ '%d' % n.x }}",
    "{{ ('9' * 4000000) | int(0, 16) | string | length }}",
    "{{ ('9' * 1000000) | int }}",
    "{{ (10 ** 4000000) | tojson }}",
    # without end
    _RANGE * 3 + _END * 3,
    _RANGE * 2 + "{{ 'aaaaaaaa' }}" + _END * 2,
    _RANGE + "{{ 'a' * 9999 }}" + _END,
    "{% set x %}" + _RANGE + "{{ 'a' * 9999 }}" + _END + "{% endset %}{{ x | length }}",
    "{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}" + _RANGE + "{{ 'a' * 9999 }}" + _END + "{% endcall %}",
    "{% filter upper %}" + _RANGE + "{{ 'a' * 9999 }}" + _END + "{% endfilter %}",
    _MACRO.replace("BODY", "{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"),
    _MACRO.replace("BODY", "{{ f(n + 1) }}"),
    _MACRO.replace("BODY", "{{ f(n - 1) ~ f(n - 1) if n else 'aaaa' }}"),
    "{% for a in [[1]] recursive %}{{ loop([a]) }}{% endfor %}",
    "{% for a in [[1]] recursive %}{% if loop.depth < 40 %}{{ loop([a, a]) }}{{ loop([a, a]) }}{% endif %}{% endfor %}",
    "{{ range(99999) | map('string') | map('center', 99999) | join | length }}",
    "{% for i in range(99999) %}{{ (range(99999) | sum) }}{% endfor %}",
    "{{ ('a' * 3000000) | wordwrap(1) | length }}",
    "{{ ('a' * 30000) | list | map('replace', 'a', 'a' * 30000) | join | length }}",
    "{{ ('a.' * 300000) | urlize | length }}",
    "{{ ('<' * 1000000) | striptags | length }}",
    "{{ ('<!--' * 200000) | striptags | length }}",
    # escapes
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ '' | attr('__class__') }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{x.__class__}'.format_map({'x': ''}) }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ self.__init__ }}",
    "{{ loop | default(self._TemplateReference__context.environment) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{{ lipsum(100000) }}",
    "{{ raise_exception('a' * 20000000) }}",
    "{{ raise_exception.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
]
