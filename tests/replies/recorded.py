"""Answers in the manner of each family, with what they say, written by hand from the families' own descriptions.

Each names where its form is described: a model's card and chat template, or the format's document.
"""

TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "near": {"type": ["string", "null"]},
            "of": {"type": "array", "items": {"type": "string"}},
        },
    },
    "now": {"type": "object", "properties": {}},
    "write": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
}
COLOGNE = ("get_weather", {"city": "Köln", "days": 3})
NOW = ("now", {})

# (where the form is described, format, answer, reasoning, text, calls; a call may have the id that it must have)
ANSWERS = [
    ("Qwen3's chat template; Hermes 2 Pro's card", "hermes",
     "<think>\nRain, or not?\n</think>\n\nI look.\n<tool_call>\n"
     '{"name": "get_weather", "arguments": {"city": "Köln", "days": 3}}\n</tool_call>\n'
     '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "Rain, or not?", "I look.", [COLOGNE, NOW]),
    ("SmolLM3's chat template (xml_tools)", "hermes",
     '<think>\n\n</think>\n<tool_call>{"name": "get_weather", "arguments": {"city": "Köln", "days": 3}}</tool_call>',
     "", "", [COLOGNE]),
    ("Qwen2.5's chat template; arguments as a text", "hermes",
     '<tool_call>\n{"name": "get_weather", "arguments": "{\\"city\\": \\"Köln\\", \\"days\\": 3}"}\n</tool_call>',
     "", "", [COLOGNE]),
    ("Qwen2.5's chat template; arguments before the name", "hermes",
     '<tool_call>\n{"arguments": {"city": "Köln", "days": 3}, "name": "get_weather"}\n</tool_call>', "", "", [COLOGNE]),
    ("Qwen2.5's chat template; without the last brace", "hermes",
     '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": 3}\n</tool_call>', "", "", [COLOGNE]),
    ("Qwen2.5's chat template; a mark and braces in a text", "hermes",
     '<tool_call>\n{"name": "write", "arguments": {"path": "a", "text": "}</tool_call>\\"{"}}\n</tool_call>Done.',
     "", "Done.", [("write", {"path": "a", "text": '}</tool_call>"{'})]),
    ("Qwen3-Coder's chat template", "qwen-coder",
     "I look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n3\n"
     "</parameter>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=of>\n[\"sun\"]\n</parameter>\n</function>\n"
     "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>", "", "I look.",
     [("get_weather", {"city": "Köln", "days": 3, "exact": True, "of": ["sun"]}), NOW]),
    ("Qwen3.5's chat template; lines in an argument", "qwen-coder",
     "<think>\nA file.\n</think>\n\n<tool_call>\n<function=write>\n<parameter=path>\na.py\n</parameter>\n"
     "<parameter=text>\n\ndef f(a):\n    return \"<b>\\n\"\n\n</parameter>\n</function>\n</tool_call>", "A file.", "",
     [("write", {"path": "a.py", "text": '\ndef f(a):\n    return "<b>\\n"\n'})]),
    ("Qwen3-Coder, which at times leaves out the first mark", "qwen-coder",
     "<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=near>\nnull\n</parameter>\n</function>\n"
     "</tool_call>", "", "", [("get_weather", {"city": "Köln", "near": None})]),
    ("Llama 3.1's chat template", "llama3", '{"name": "get_weather", "parameters": {"city": "Köln", "days": 3}}',
     "", "", [COLOGNE]),
    ("Llama 3.1; several", "llama3",
     '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}; {"name": "get_weather", "parameters": '
     '{"city": "Köln", "days": 3}}', "", "", [NOW, COLOGNE]),
    ("Llama 3.1's prompt format, built-in tools", "llama3",
     '<|python_tag|>brave_search.call(query="Köln now")<|eom_id|>',
     "", "", [("brave_search", {"query": "Köln now"})]),
    ("Llama 3.2's prompt format", "llama3", "[get_weather(city='Köln', days=3), now()]", "", "", [COLOGNE, NOW]),
    ("Llama 3.2, a text that Python warns of", "llama3", r"[write(path='\d', text='a')]", "", "",
     [("write", {"path": "\\d", "text": "a"})]),
    ("Llama 4's prompt format", "llama4",
     '<|python_start|>[get_weather(city="Köln", days=3, exact=True, near=None, of=["a"])]<|python_end|>', "", "",
     [("get_weather", {"city": "Köln", "days": 3, "exact": True, "near": None, "of": ["a"]})]),
    ("Llama 4's chat template", "llama4",
     '<|python_start|>{"name": "get_weather", "parameters": {"city": "Köln", "days": 3}}<|python_end|>', "", "",
     [COLOGNE]),
    ("Mistral 7B 0.3 (tokenizer v3, with ids)", "mistral",
     '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Köln", "days": 3}, "id": "VvvODy9mT"}]', "", "",
     [(*COLOGNE, "VvvODy9mT")]),
    ("Mistral (tokenizer v2, without ids)", "mistral",
     '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Köln", "days": 3}}, {"name": "now", '
     '"arguments": {}}]', "", "", [COLOGNE, NOW]),
    ("Mistral Small 3.2 (tokenizer v11)", "mistral",
     'I look.[TOOL_CALLS]get_weather[CALL_ID]abcdefgh1[ARGS]{"city": "Köln", "days": 3}[TOOL_CALLS]now[CALL_ID]'
     "abcdefgh2[ARGS]{}", "", "I look.", [(*COLOGNE, "abcdefgh1"), (*NOW, "abcdefgh2")]),
    ("Magistral 2509 (tokenizer v13)", "mistral",
     '[THINK]Rain?[/THINK][TOOL_CALLS]get_weather[ARGS]{"city": "Köln", "days": 3}', "Rain?", "", [COLOGNE]),
    ("DeepSeek V3's chat template", "deepseek",
     "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
     '{"city": "Köln", "days": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n'
     "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "", "", [COLOGNE, NOW]),
    ("DeepSeek R1's chat template", "deepseek",
     "<think>\nRain?\n</think>\n\nI look."
     "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n"
     "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "Rain?", "I look.", [NOW]),
    ("DeepSeek V3.1's chat template", "deepseek",
     "<｜tool▁calls▁begin｜>"
     '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Köln", "days": 3}<｜tool▁call▁end｜>'
     "<｜tool▁calls▁end｜>", "", "", [COLOGNE]),
    ("Kimi K2's tool_call_guidance", "kimi",
     "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
     '{"city": "Köln", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
     "<|tool_call_end|><|tool_calls_section_end|>", "", "I look.",
     [(*COLOGNE, "functions.get_weather:0"), (*NOW, "functions.now:1")]),
    ("GLM 4.5's chat template", "glm",
     "\n<think>Rain?</think>\nI look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n"
     "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>", "Rain?",
     "I look.", [COLOGNE, NOW]),
    ("GLM 4.7's chat template", "glm",
     "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Köln</arg_value><arg_key>days</arg_key><arg_value>3"
     "</arg_value></tool_call>", "", "", [COLOGNE]),
    ("MiniMax-M2's tool calling guide", "minimax",
     '<think>\nRain?\n</think>\n\nI look.\n<minimax:tool_call>\n<invoke name="get_weather">\n'
     '<parameter name="city">Köln</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n'
     "</invoke>\n</minimax:tool_call>", "Rain?", "I look.", [COLOGNE, NOW]),
    ("Granite 3.3's chat template", "granite",
     '<think>Rain?</think><response>I look.</response><|tool_call|>[{"name": "get_weather", "arguments": '
     '{"city": "Köln", "days": 3}}, {"name": "now", "arguments": {}}]', "Rain?", "I look.", [COLOGNE, NOW]),
    ("Granite 4's chat template", "hermes",
     '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": 3}}\n</tool_call>', "", "", [COLOGNE]),
    ("Gemma 4's response template in transformers", "gemma4",
     '<|channel>thought\nRain?\n<channel|>I look.<|tool_call>call:get_weather{city:<|"|>Köln<|"|>,days:3}<tool_call|>'
     "<|tool_call>call:now{}<tool_call|>", "Rain?", "I look.", [COLOGNE, NOW]),
    ("FunctionGemma's card", "functiongemma",
     "<start_function_call>call:get_weather{city:<escape>a, b:{<escape>,exact:true,of:[<escape>x<escape>]}"
     "<end_function_call>", "", "", [("get_weather", {"city": "a, b:{", "exact": True, "of": ["x"]})]),
    ("Phi-4-mini's card", "phi4",
     '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Köln", "days": 3}}]<|/tool_call|>', "", "",
     [COLOGNE]),
    ("Phi-4-mini as it often writes", "phi4", 'functools[{"name": "now", "arguments": {}}]', "", "", [NOW]),
    ("Command R7B's and A's prompt format", "cohere",
     "<|START_THINKING|>Rain?<|END_THINKING|><|START_ACTION|>[\n"
     '    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Köln", "days": 3}},\n'
     '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>', "Rain?", "", [COLOGNE, NOW]),
    ("Command A's prompt format, an answer", "cohere",
     "<|START_THINKING|>Fine.<|END_THINKING|><|START_RESPONSE|>It rains.<|END_RESPONSE|>", "Fine.", "It rains.", []),
    ("Nemotron Super 1.5's chat template", "nemotron",
     '<think>\nRain?\n</think>\n\n<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Köln", "days": 3}}, '
     '{"name": "now", "arguments": {}}]</TOOLCALL>', "Rain?", "", [COLOGNE, NOW]),
    ("OpenAI's harmony format", "harmony",
     "<|channel|>analysis<|message|>Rain?<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
     "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
     '{"city": "Köln", "days": 3}<|call|>', "Rain?", "I look.", [COLOGNE]),
    ("harmony, the recipient in the role", "harmony",
     "<|channel|>analysis<|message|>Rain?<|end|><|start|>assistant to=functions.now<|channel|>commentary json"
     "<|message|>{}<|call|>", "Rain?", "", [NOW]),
    ("harmony, the recipient at once", "harmony", " to=functions.now<|channel|>commentary<|message|><|call|>", "", "",
     [NOW]),
    ("harmony, an answer", "harmony",
     "<|channel|>analysis<|message|>Fine.<|end|><|start|>assistant<|channel|>final<|message|>It  rains.<|return|>",
     "Fine.", "It  rains.", []),
    ("LFM2's card and chat template", "lfm2",
     "<think>Rain?</think>I look.<|tool_call_start|>[get_weather(city='Köln', days=3), now()]<|tool_call_end|>",
     "Rain?", "I look.", [COLOGNE, NOW]),
    ("LFM2's card, where its system prompt asks for JSON", "lfm2",
     '<|tool_call_start|>[{"name": "get_weather", "arguments": {"city": "Köln", "days": 3}}]<|tool_call_end|>Done.', "",
     "Done.", [COLOGNE]),
    ("LFM2.5's chat template, values as Python and JSON have them", "lfm2",
     "<|tool_call_start|>[get_weather(city='Köln', exact=True, near=None, of=[\"a\"])]<|tool_call_end|>", "", "",
     [("get_weather", {"city": "Köln", "exact": True, "near": None, "of": ["a"]})]),
    ("Hunyuan's chat template (7B; A13B)", "hunyuan",
     "<think>\nRain?\n</think>\n<answer>\nI look.\n</answer><tool_calls>\n<tool_call>get_weather\n```json\n"
     '{"city": "Köln", "days": 3}\n```</tool_call>\n<tool_call>now\n```json\n{}\n```</tool_call>\n</tool_calls>',
     "Rain?", "I look.", [COLOGNE, NOW]),
    ("Hy3's chat template", "hy3",
     "<think:opensource>Rain?</think:opensource>I look.<tool_calls:opensource>\n<tool_call:opensource>get_weather"
     "<tool_sep:opensource>\n<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>Köln"
     "</arg_value:opensource>\n<arg_key:opensource>days</arg_key:opensource>\n<arg_value:opensource>3"
     "</arg_value:opensource>\n</tool_call:opensource>\n<tool_call:opensource>now<tool_sep:opensource>\n"
     "</tool_call:opensource>\n</tool_calls:opensource>", "Rain?", "I look.", [COLOGNE, NOW]),
    ("ERNIE 4.5 Thinking's card", "ernie",
     '<think>\nRain?\n</think>\n\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": 3}}\n'
     "</tool_call>\n", "Rain?", "", [COLOGNE]),
    ("ERNIE 4.5 Thinking's card, an answer", "ernie",
     "<think>\nFine.\n</think>\n\n\n<response>\nIt rains.\n</response>\n", "Fine.", "It rains.", []),
    ("Ling 2.0's, EXAONE 4's and Trinity's chat templates", "hermes",
     'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": 3}}\n</tool_call>\n'
     '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "", "I look.", [COLOGNE, NOW]),
    ("QwQ's and R1's distilled models", "thinking", "<think>\nRain?\n</think>\n\nIt rains.", "Rain?", "It rains.", []),
]  # fmt: skip

# (format, answer) that hold no call: all of it is text
MALFORMED = [
    ("hermes", 'Between <tool_call> and </tool_call>  stands\n<tool_call>\n{"name": 1}\n</tool_call>\n'),
    ("hermes", '<tool_call>\n{"name": "get_weather", "argumints": {"city": "Köln"}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "get_weather", "argum'),
    ("hermes", "I think <think> is a mark.  "),
    ("qwen-coder", "<tool_call>\n <function=get_weather\n</tool_call>"),
    ("glm", "<tool_call>two words<arg_key>a</arg_key></tool_call>"),
    ("llama3", '{"name": "Ann", "age": 3}'),
    ("llama3", '{"name": "nobody", "parameters": {}}'),
    ("llama4", "[1] is a note, [get_weather] is no call"),
    ("llama4", "[get_weather(1)]"),
    ("llama3", "  <|python_tag|>print(1 +"),
    ("mistral", '[TOOL_CALLS] [{"name": "now"'),
    ("mistral", "[TOOL_CALLS]" + "a" * 700 + "[ARGS]{}"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    ("kimi", "<|tool_calls_section_begin|>\n none"),
    ("gemma4", '<|tool_call>call:get_weather{city:<|"|>Köln}<tool_call|>'),
    ("minimax", '<minimax:tool_call> <invoke name="now"'),
]

# (format, answer, name, arguments as they are told): a call that has begun, with arguments that are no JSON object
BROKEN = [
    ("hermes", '<tool_call>\n{"name": "write", "arguments": {"path": "a, "text": "b"}}\n</tool_call>', "write",
     '{"path": "a, "text": "b"}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "write", "arguments": {"path": <b>}}\n</tool_call>', "write", '{"path": <b>}}'),
    ("hermes", '<tool_call>\n{"name": "write", "arguments": {"path": "a", "te', "write", '{"path": "a", "te'),
    ("hermes", '<tool_call>\n{"name": "write", "arguments": {"path": NaN}}</tool_call>', "write", '{"path": NaN}'),
    ("hermes", '<tool_call>\n{"arguments": [1], "name": "write"}</tool_call>', "write", "[1]"),
    ("qwen-coder", "<function=write>\n<parameter=path>\na</parameter>\nno!\n</function>", "write", '{"path": "a"no!'),
    ("qwen-coder", "<function=write>\n<parameter=path>\na\n", "write", '{"path": "a'),
    ("harmony", "<|channel|>commentary to=functions.write<|message|>print(1)<|call|>", "write", "print(1)"),
]  # fmt: skip

# what a chat template of the family writes, and its format
TEMPLATES = [
    ("<tool_call>\\n{{ call | tojson }}\\n</tool_call> <think>", "hermes"),
    ("<tool_call>\\n<function={{ name }}>\\n<parameter={{ key }}>", "qwen-coder"),
    ("<tool_call>{{ name }}<arg_key>{{ k }}</arg_key>", "glm"),
    ("<tool_calls>\n<tool_call>function_name\n```json\n{}\n```</tool_call>", "hunyuan"),
    ("{%- set a = '<arg_key{}>'.format(':opensource') %}", "hy3"),
    ("<|im_start|>system\nList of tools: <|tool_list_start|>[", "lfm2"),
    ("<|im_start|>assistant<tool_call>{{ call }}</tool_call><response>{{ content }}</response>", "ernie"),
    ("[AVAILABLE_TOOLS] [TOOL_CALLS] [", "mistral"),
    ("{{ '<|tool_call|>' }} <think>", "granite"),
    ("<|tool|>{{ message['tools'] }}<|/tool|>", "phi4"),
    ("<|start_header_id|>ipython {{ tools }} <|python_tag|>", "llama3"),
    ("<|header_start|>ipython {{ tools }}", "llama4"),
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜> </think>", "deepseek"),
    ("<|im_assistant|>assistant<|im_middle|>", "kimi"),
    ("<|start_header_id|>{{ tools }}<TOOLCALL>", "nemotron"),
    ("<minimax:tool_call>", "minimax"),
    ("<|tool_call>call:", "gemma4"),
    ("<start_function_call>call:", "functiongemma"),
    ("<|START_ACTION|>", "cohere"),
    ("<|start|>assistant<|channel|>final<|message|>", "harmony"),
    ("{{ content.split('</think>')[-1] }}", "thinking"),
    ("<|im_start|>{{ role }}", None),
]
