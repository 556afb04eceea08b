"""The registry of wire formats: every way to write tool calls that Troth reads, by name.

Which format a model uses is proved by rendering its template (``text/template_probe.py``), never by its name.
Read next: ``format.py`` (the table), ``json_calls.py`` (the commonest body), ``docs/tools.md`` (families and formats).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

from troth.text.tool_formats import element_calls
from troth.text.tool_formats.argument_pairs import ArgumentPairs
from troth.text.tool_formats.deepseek import STEP, read_step
from troth.text.tool_formats.deepseek import read as read_deepseek
from troth.text.tool_formats.format import ToolFormat
from troth.text.tool_formats.gemma_calls import GemmaCalls
from troth.text.tool_formats.json_calls import JsonCalls
from troth.text.tool_formats.named_json import NamedJson
from troth.text.tool_formats.notation import KIND
from troth.text.tool_formats.python_calls import PythonCalls
from troth.text.tool_formats.tagged import Tagged
from troth.text.tool_formats.xml_calls import XmlCalls

__all__ = ["FORMATS", "ToolFormat"]

_OBJECT: Final = JsonCalls(array=False)
_OBJECTS: Final = JsonCalls()
_EITHER_KEY: Final = JsonCalls(argument_keys=("arguments", "parameters"))

_FUNCTION_TAGS: Final = XmlCalls(
    call_open=("<function=",),
    call_close="</function>",
    argument_open=("<parameter=",),
    argument_close="</parameter>",
    quoted=False,
    paired_newlines=True,
    json_body=True,
)


_PAIRS: Final = ArgumentPairs()
_LONGCAT_PAIRS: Final = ArgumentPairs(
    key=("<longcat_arg_key>", "</longcat_arg_key>"),
    value=("<longcat_arg_value>", "</longcat_arg_value>"),
    close="</longcat_tool_call>",
)


def _spelled(body: XmlCalls | ArgumentPairs | GemmaCalls | PythonCalls, **table: Any) -> ToolFormat:
    """A format whose body says by itself how its calls are written."""
    return ToolFormat(body=body, notation=body.notation, **table)


def _invoke_tags(prefix: str, *, string_attribute: str = "", other_attribute: str = "") -> XmlCalls:
    """``<PREFIXinvoke name="f"><PREFIXparameter name="k">``."""
    return XmlCalls(
        call_open=(f"<{prefix}invoke name=",),
        call_close=f"</{prefix}invoke>",
        argument_open=(f"<{prefix}parameter name=",),
        argument_close=f"</{prefix}parameter>",
        string_attribute=string_attribute,
        other_attribute=other_attribute,
    )


def _dsml(section: str) -> ToolFormat:
    """DeepSeek V3.2 and V4 differ in the name of the wrapper alone."""
    tags = _invoke_tags("｜DSML｜", string_attribute='string="true"', other_attribute='string="false"')
    return _spelled(
        name=f"dsml_{section}",
        sections=(f"<｜DSML｜{section}>",),
        opens=tags.call_open,
        body=tags,
        section_ends=(f"</｜DSML｜{section}>",),
    )


_ALL: Final = (
    ToolFormat(
        name="hermes",
        opens=("<tool_call>",),
        body=Tagged(close="</tool_call>", objects=_OBJECTS, tags=_FUNCTION_TAGS),
        resumes=("</tool_call>",),
    ),
    ToolFormat(
        name="function_tags",
        opens=("<tool_call>", "<function="),
        body=Tagged(close="</tool_call>", objects=_OBJECTS, tags=_FUNCTION_TAGS),
        notation=_FUNCTION_TAGS.notation,
        section_ends=("</tool_call>",),
        resumes=("</tool_call>", "</function>"),
    ),
    ToolFormat(
        name="argument_pairs",
        opens=("<tool_call>",),
        body=Tagged(close="</tool_call>", objects=_OBJECTS, tags=_FUNCTION_TAGS, pairs=_PAIRS),
        notation=_PAIRS.notation,
        inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        resumes=("</tool_call>",),
    ),
    _spelled(
        name="gemma4",
        opens=("<|tool_call>",),
        body=GemmaCalls(quote='<|"|>', sorted_keys=True),
        inner=('<|"|>',),
        closes=("<tool_call|>",),
    ),
    _spelled(
        name="functiongemma",
        opens=("<start_function_call>",),
        body=GemmaCalls(quote="<escape>", quoted_values=True),
        inner=("<escape>",),
        closes=("<end_function_call>",),
    ),
    _spelled(
        name="lfm2",
        opens=("<|tool_call_start|>",),
        body=PythonCalls(),
        closes=("<|tool_call_end|>",),
        section_ends=("<|tool_call_end|>",),
    ),
    _spelled(
        name="minicpm3",
        opens=("<|tool_call_start|>",),
        body=PythonCalls(lines=True, fence=("```python", "```")),
        closes=("<|tool_call_end|>",),
    ),
    _spelled(
        name="olmo3",
        opens=("<function_calls>",),
        body=PythonCalls(lines=True),
        closes=("</function_calls>",),
    ),
    _spelled(
        name="pythonic",
        opens=("<|python_start|>",),
        body=PythonCalls(brackets_required=True),
        bare=("[",),
        section_ends=("<|python_end|>",),
    ),
    ToolFormat(
        name="deepseek",
        sections=("<｜tool▁calls▁begin｜>",),
        opens=("<｜tool▁call▁begin｜>",),
        body=read_deepseek,
        inner=("<｜tool▁sep｜>",),
        closes=("<｜tool▁call▁end｜>",),
        section_ends=("<｜tool▁calls▁end｜>",),
    ),
    _dsml("function_calls"),
    _dsml("tool_calls"),
    ToolFormat(
        name="kimi_k2",
        sections=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
        opens=("<|tool_call_begin|>",),
        lone=True,
        body=NamedJson(after_name=("<|tool_call_argument_begin|>",), prefixes=("functions.",), name_is_id=True),
        inner=("<|tool_call_argument_begin|>",),
        closes=("<|tool_call_end|>",),
        section_ends=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
    ),
    _spelled(
        name="kimi_k3",
        sections=("<|open|>tools<|sep|>",),
        opens=("<|open|>call tool=",),
        body=XmlCalls(
            call_open=("<|open|>call tool=",),
            call_close="<|close|>call<|sep|>",
            argument_open=("<|open|>argument key=",),
            argument_close="<|close|>argument<|sep|>",
            tag_end="<|sep|>",
            string_attribute='type="string"',
            other_attribute=f'type="{KIND}"',
            number_attribute="index",
        ),
        inner=("<|close|>argument<|sep|>", "<|close|>call<|sep|>"),
        section_ends=("<|close|>tools<|sep|>",),
        frames=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    ToolFormat(
        name="solar",
        sections=("<|tool_calls|>",),
        opens=("<|tool_call:begin|>",),
        lone=True,
        body=NamedJson(after_name=("<|tool_call:args|>",), id_first="<|tool_call:name|>"),
        inner=("<|tool_call:name|>", "<|tool_call:args|>"),
        closes=("<|tool_call:end|>",),
        section_ends=("<|calls|>",),
    ),
    ToolFormat(
        name="mistral",
        opens=("[TOOL_CALLS]",),
        body=NamedJson(after_name=("[ARGS]",), id_marker="[CALL_ID]", object_ends_name=True, array=_OBJECTS),
        inner=("[ARGS]", "[CALL_ID]"),
        id_style="nine",
    ),
    _spelled(
        name="minimax_m2",
        sections=("<minimax:tool_call>",),
        opens=("<invoke name=",),
        body=_invoke_tags(""),
        section_ends=("</minimax:tool_call>",),
    ),
    ToolFormat(
        name="minimax_m3",
        sections=(f"{element_calls.MARK}<tool_call>",),
        opens=(element_calls.CALL_OPEN,),
        body=element_calls.read,
        notation=element_calls.NOTATION,
        section_ends=(f"{element_calls.MARK}</tool_call>",),
    ),
    ToolFormat(
        name="tool_calls_array",
        opens=("<tool_calls>",),
        body=_OBJECTS,
        closes=("</tool_calls>",),
    ),
    ToolFormat(
        name="minimax_m1",
        opens=("<tool_calls>",),
        body=JsonCalls(spaced=True),
        closes=("</tool_calls>",),
    ),
    _spelled(
        name="minicpm5",
        opens=("<function name=", "<functionĠname=", "<functionname="),
        body=XmlCalls(
            call_open=("<function name=", "<functionĠname=", "<functionname="),
            call_close="</function>",
            argument_open=("<param name=", "<paramĠname=", "<paramname="),
            argument_close="</param>",
            character_data=True,
        ),
        resumes=("</function>",),
    ),
    _spelled(
        name="seed",
        opens=("<seed:tool_call>",),
        body=_FUNCTION_TAGS,
        closes=("</seed:tool_call>",),
    ),
    _spelled(
        name="zaya",
        opens=("<zyphra_tool_call>",),
        body=_FUNCTION_TAGS,
        closes=("</zyphra_tool_call>",),
    ),
    _spelled(
        name="atem",
        sections=("<atem:function_calls>",),
        opens=("<atem:invoke name=",),
        body=_invoke_tags("atem:"),
        section_ends=("</atem:function_calls>",),
    ),
    ToolFormat(
        name="step3",
        sections=("<｜tool_calls_begin｜>",),
        opens=("<｜tool_call_begin｜>",),
        body=read_step,
        notation=STEP.notation,
        inner=("<｜tool_sep｜>",),
        closes=("<｜tool_call_end｜>",),
        section_ends=("<｜tool_calls_end｜>",),
    ),
    _spelled(
        name="hunyuan",
        sections=("<tool_calls>", "<tool_calls:opensource>"),
        opens=("<tool_call>",),
        body=ArgumentPairs(separator="<tool_sep>", json_values=True),
        inner=("<tool_sep>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"),
        section_ends=("</tool_calls>", "</tool_calls:opensource>"),
        resumes=("</tool_call>",),
    ),
    ToolFormat(
        name="longcat",
        opens=("<longcat_tool_call>",),
        body=Tagged(close="</longcat_tool_call>", objects=_OBJECTS, pairs=_LONGCAT_PAIRS),
        notation=_LONGCAT_PAIRS.notation,
        resumes=("</longcat_tool_call>",),
    ),
    ToolFormat(
        name="cohere",
        opens=("<|START_ACTION|>",),
        body=JsonCalls(name_keys=("tool_name", "name"), argument_keys=("parameters",), id_keys=("tool_call_id",)),
        closes=("<|END_ACTION|>",),
        frames=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    ToolFormat(
        name="command_r",
        opens=("Action:\n```json\n", "Action: ```json\n"),
        soft=("Action:\n```json\n", "Action: ```json\n"),
        body=JsonCalls(name_keys=("tool_name",), argument_keys=("parameters",)),
        closes=("```",),
    ),
    ToolFormat(
        name="granite",
        opens=("<|tool_call|>",),
        body=_OBJECTS,
    ),
    ToolFormat(
        name="granite_function_call",
        opens=("<function_call>",),
        body=_OBJECT,
    ),
    ToolFormat(
        name="nemotron2",
        opens=("<TOOLCALL>",),
        body=_OBJECTS,
        closes=("</TOOLCALL>",),
    ),
    ToolFormat(
        name="internlm2",
        opens=("<|action_start|><|plugin|>",),
        body=_EITHER_KEY,
        closes=("<|action_end|>",),
    ),
    ToolFormat(
        name="functools",
        opens=("functools",),
        body=_OBJECTS,
        soft=("functools",),
    ),
    ToolFormat(
        name="apertus",
        opens=("<|tools_prefix|>",),
        body=JsonCalls(keyed=True),
        section_ends=("<|tools_suffix|>",),
    ),
    ToolFormat(
        name="gigachat",
        opens=("<|message_sep|>\n\nfunction call<|role_sep|>\n", "<|function_call|>"),
        body=_OBJECT,
    ),
    ToolFormat(
        name="qwen_brackets",
        opens=("[Calling tool: ", "[Calling tool:"),
        body=NamedJson(after_name=("(",)),
        closes=(")]",),
    ),
    _spelled(
        name="tool_code",
        opens=("```tool_code\n",),
        soft=("```tool_code\n",),
        body=PythonCalls(lines=True),
        closes=("```",),
    ),
    ToolFormat(
        name="llama3_json",
        opens=("<|python_tag|>",),
        body=JsonCalls(argument_keys=("parameters", "arguments"), separators=("; ", ";")),
        bare=("{",),
    ),
    ToolFormat(
        name="json_list",
        opens=("```json\n",),
        soft=("```json\n",),
        body=_OBJECTS,
        bare=("[",),
        section_ends=("\n```", "```"),
    ),
)

FORMATS: Final = MappingProxyType({item.name: item for item in _ALL})
"""Every format by its name. ``harmony`` and ``functionary`` are not here: they are channels (``text/channels.py``)."""
