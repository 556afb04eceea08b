"""One call of ``f`` with ``{"city": "Paris", "n": 1}`` in every wire format."""

from __future__ import annotations

from troth.contracts.tools import ToolPolicy, ToolSpec
from troth.text.classifier import ReplyFormat
from troth.text.tool_calls import ToolSet

OBJECT = '{"city": "Paris", "n": 1}'
CALL = f'{{"name": "f", "arguments": {OBJECT}}}'

EXAMPLES: dict[str, str] = {
    "hermes": f"<tool_call>\n{CALL}\n</tool_call>",
    "function_tags": (
        "<tool_call>\n<function=f>\n<parameter=city>\nParis\n</parameter>\n<parameter=n>\n1\n</parameter>\n"
        "</function>\n</tool_call>"
    ),
    "argument_pairs": (
        "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>n</arg_key>\n"
        "<arg_value>1</arg_value>\n</tool_call>"
    ),
    "gemma4": '<|tool_call>call:f{city:<|"|>Paris<|"|>,n:1}<tool_call|>',
    "functiongemma": "<start_function_call>call:f{city:<escape>Paris<escape>,n:1}<end_function_call>",
    "lfm2": "<|tool_call_start|>[f(city='Paris', n=1)]<|tool_call_end|>",
    "minicpm3": "<|tool_call_start|>\n```python\nf(city='Paris', n=1)\n```\n<|tool_call_end|>",
    "olmo3": "<function_calls>f(city='Paris', n=1)</function_calls>",
    "pythonic": "<|python_start|>[f(city='Paris', n=1)]<|python_end|>",
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
        f"```json\n{OBJECT}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "dsml_function_calls": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n" string="false">1</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    ),
    "dsml_tool_calls": (
        '<｜DSML｜tool_calls><｜DSML｜invoke name="f">'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>'
        '<｜DSML｜parameter name="n" string="false">1</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>'
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        f"{OBJECT}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "kimi_k3": (
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>'
        '<|open|>argument key="n" type="number"<|sep|>1<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>"
    ),
    "solar": (
        f"<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>f<|tool_call:args|>{OBJECT}<|tool_call:end|><|calls|>"
    ),
    "mistral": f"[TOOL_CALLS]f[ARGS]{OBJECT}",
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="n">1</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "minimax_m3": (
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">]<]minimax[>[<city>Paris]<]minimax[>[</city>'
        "]<]minimax[>[<n>1]<]minimax[>[</n>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>"
    ),
    "minimax_m1": f"<tool_calls>\n{CALL}\n</tool_calls>",
    "minicpm5": '<function name="f"><param name="city">Paris</param><param name="n">1</param></function>',
    "seed": (
        "<seed:tool_call>\n<function=f>\n<parameter=city>Paris</parameter>\n<parameter=n>1</parameter>\n"
        "</function>\n</seed:tool_call>"
    ),
    "zaya": (
        "<zyphra_tool_call>\n<function=f>\n<parameter=city>Paris</parameter>\n<parameter=n>1</parameter>\n"
        "</function>\n</zyphra_tool_call>"
    ),
    "atem": (
        '<atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="city">Paris</atem:parameter>\n'
        '<atem:parameter name="n">1</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
    ),
    "step3": (
        '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">'
        '<steptml:parameter name="city">Paris</steptml:parameter><steptml:parameter name="n">1</steptml:parameter>'
        "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>"
    ),
    "hunyuan": (
        '<tool_calls><tool_call>f<tool_sep><arg_key>city</arg_key><arg_value>"Paris"</arg_value>'
        "<arg_key>n</arg_key><arg_value>1</arg_value></tool_call></tool_calls>"
    ),
    "longcat": (
        "<longcat_tool_call>f<longcat_arg_key>city</longcat_arg_key><longcat_arg_value>Paris</longcat_arg_value>"
        "<longcat_arg_key>n</longcat_arg_key><longcat_arg_value>1</longcat_arg_value></longcat_tool_call>"
    ),
    "cohere": f'<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "f", "parameters": {OBJECT}}}]<|END_ACTION|>',
    "command_r": f'Action:\n```json\n[{{"tool_name": "f", "parameters": {OBJECT}}}]```',
    "granite": f"<|tool_call|>[{CALL}]",
    "granite_function_call": f"<function_call> {CALL}",
    "tool_calls_array": f"<tool_calls>[{CALL}]</tool_calls>",
    "nemotron2": f"<TOOLCALL>[{CALL}]</TOOLCALL>",
    "internlm2": f'<|action_start|><|plugin|>{{"name": "f", "parameters": {OBJECT}}}<|action_end|>',
    "functools": f"functools[{CALL}]",
    "apertus": f'<|tools_prefix|>[{{"f": {OBJECT}}}]<|tools_suffix|>',
    "gigachat": f"<|function_call|>{CALL}",
    "qwen_brackets": f"[Calling tool: f({OBJECT})]",
    "tool_code": "```tool_code\nf(city='Paris', n=1)\n```",
    "llama3_json": f'<|python_tag|>{{"name": "f", "parameters": {OBJECT}}}',
    "json_list": f"```json\n[{CALL}]\n```",
}

# Answers whose every part has a header.
CHANNEL_EXAMPLES: dict[str, str] = {
    "harmony": f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{OBJECT}<|call|>",
    "functionary": f"f\n{OBJECT}",
    "functionary2": f"f\n<|content|>{OBJECT}<|stop|>",
    "muse": f" to=f<|message|>{EXAMPLES['atem']}<|eom|>",
}

# Formats whose last marker is optional: a call is over before it.
ENDS_EARLY = frozenset(
    {"mistral", "granite", "granite_function_call", "functools", "apertus", "gigachat", "llama3_json", "json_list"}
    | {"pythonic"}
)

TOOLS = (
    ToolSpec(
        name="f",
        parameters={
            "type": "object",
            "properties": {"city": {"type": "string"}, "n": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    ),
    ToolSpec(name="g"),
)
COMPILED = ToolSet(TOOLS)
POLICY = ToolPolicy(tools=TOOLS)


def channel_form(name: str) -> tuple[ReplyFormat, str]:
    """The form and the end of a prompt that goes with it."""
    form = ReplyFormat.named(channels=name, tools="atem" if name == "muse" else None)
    assert form.channels is not None
    return form, form.channels.prompt_tails[0]
