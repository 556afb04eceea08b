"""Owns the Jinja environment of chat templates: what they may call, and how much work they may do.

Knows no message and no model. A template comes with a download, so it is hostile until it has rendered: everything it
does is paid from one budget per render, in steps. A step is about one syntax node executed or 16 bytes touched, so
the budget bounds time and memory together. Read next: ``chat_template.py``.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any, Final

from jinja2 import nodes, pass_context
from jinja2.exceptions import TemplateError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from markupsafe import soft_str

MAX_OUTPUT_CHARACTERS: Final = 16 * 2**20
MAX_STEPS: Final = 20_000_000
"""A conversation of 4 MB and a thousand turns takes about two million in the longest templates in use."""

# What the meter charges; measured, so that the whole budget is spent in about three seconds whatever it is spent on.
_BYTES_PER_STEP_LOG2: Final = 4
_LOOK_STEPS: Final = 8
_ITERATION_STEPS: Final = 10
_CALL_STEPS: Final = 20
_MACRO_STEPS: Final = 40
_ELEMENT_STEPS: Final = 4  # a list entry with a small object behind it: about 64 bytes
_MAX_INT_BITS: Final = 4096
_MAX_INDENT: Final = 16
_MAX_PADDING: Final = 9999
_WIDE_FORMAT: Final = {
    "{": re.compile(r"\{[^{}]*:[^{}]*(?:\d{5}|\{)"),
    "%": re.compile(r"%(?:\([^)]*\))?[-+ #0]*(?:\d{5}|\*|\d*\.(?:\d{5}|\*))"),
}

# Filters that look at the shape of their input only; the others may read all of it.
_SHALLOW_FILTERS: Final = frozenset(
    "attr batch count d default dictsort first items last length list map reject rejectattr reverse select "
    "selectattr slice".split()
)
_DEEP_TESTS: Final = frozenset("== != < <= > >= eq equalto ne lt lessthan le gt greaterthan ge in".split())
# No template in use needs these, and each costs more than its input's size or is not deterministic.
_WITHHELD_FILTERS: Final = ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
_WITHHELD_METHODS: Final = frozenset({"maketrans", "translate"})


class Refused(TemplateError):
    """The template called ``raise_exception``: it does not accept this conversation."""


class TooMuchWork(TemplateRuntimeError):
    """The template spent its budget."""


class _GenerationBlock(Extension):
    """``{% generation %}``: marks what the assistant says in training data; here only a scope."""

    tags: Final = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Read up to ``{% endgeneration %}``."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Hugging Face's template dialect in a sandbox with a budget. Rendering is safe from several threads."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationBlock],
            finalize=_pay_for_output,
            optimized=False,  # nothing is computed while a template is compiled
        )
        self._spending = threading.local()
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.filters["tojson"] = self._tojson
        for name in _WITHHELD_FILTERS:
            del self.filters[name]
        self.filters["format"] = self._format
        for name, function in self.filters.items():
            self.filters[name] = self._metered(function, deep=name not in _SHALLOW_FILTERS, growth=_GROWTH.get(name))
        for name, function in self.tests.items():
            self.tests[name] = self._metered(function, deep=name in _DEEP_TESTS)
        self.filters["_tick"] = _tick
        self.filters["_weigh"] = _weigh

    @contextmanager
    def budget(self, num_steps: int) -> Iterator[None]:
        """Let this thread's template work until ``num_steps`` are spent."""
        self._spending.left = num_steps
        try:
            yield
        finally:
            self._spending.left = 0

    def pay(self, num_steps: int) -> None:
        """Spend steps. Raises TooMuchWork when there are none left."""
        self._spending.left -= num_steps
        if self._spending.left < 0:
            raise TooMuchWork("the template does too much work for this conversation")

    def pay_for(self, value: object, *, deep: bool = True) -> None:
        """Spend what reading ``value`` costs; ``deep`` also what is inside it, before anyone turns it into text."""
        waiting = [value]
        while waiting:
            item = waiting.pop()
            if isinstance(item, str):
                self.pay(_LOOK_STEPS + (len(item) >> _BYTES_PER_STEP_LOG2))
            elif isinstance(item, int):
                self.pay(_LOOK_STEPS + (item.bit_length() >> (_BYTES_PER_STEP_LOG2 + 3)))
            elif isinstance(item, Sized):
                self.pay(_LOOK_STEPS + len(item))
                if deep and isinstance(item, Mapping):
                    waiting += item
                    waiting += item.values()
                elif deep and isinstance(item, (list, tuple)):
                    waiting += item

    def concat(self, pieces: Iterable[str]) -> str:  # type: ignore[override]  # jinja2 declares a plain function here
        """Join what a template or a block of it has written."""
        kept: list[str] = []
        length = 0
        for piece in pieces:
            length += len(piece)
            if length > MAX_OUTPUT_CHARACTERS:
                raise TooMuchWork(f"the template writes more than {MAX_OUTPUT_CHARACTERS} characters")
            kept.append(piece)
        self.pay(length >> _BYTES_PER_STEP_LOG2)
        return "".join(kept)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """As the sandbox says, less the string methods whose result no input bounds."""
        return attr not in _WITHHELD_METHODS and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format`` as the sandbox offers it, paid for."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def metered(*args: Any, **kwargs: Any) -> str:
            self._pay_for_format(value.__self__, "{", (args, kwargs))
            return wrapped(*args, **kwargs)

        return metered

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902  # as jinja2
        """Call a macro, a method or a global function, paid for."""
        __self.pay(_CALL_STEPS)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
            __self.pay_for((owner, args, kwargs))
            growth = _GROWTH.get(__obj.__name__)
            if growth is not None:
                __self.pay(growth((owner, *args), kwargs) >> _BYTES_PER_STEP_LOG2)
        elif isinstance(owner, (list, tuple)) or getattr(__obj, "__name__", "") == "changed":
            __self.pay_for((owner, args))  # these compare
        else:
            for arg in (*args, *kwargs.values()):
                __self.pay_for(arg, deep=False)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An arithmetic operator, paid for; numbers stay below 4,096 bits."""
        if operator == "%" and isinstance(left, str):
            self._pay_for_format(left, "%", right)
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            bits = bits + right.bit_length() if operator == "*" else bits * abs(right)
            if bits > _MAX_INT_BITS:
                raise TooMuchWork(f"the template computes a number of {bits} bits; {_MAX_INT_BITS} are allowed")
        elif operator == "*":
            for items, count in ((left, right), (right, left)):
                if isinstance(items, Sized) and isinstance(count, int):
                    unit = 0 if isinstance(items, str) else _BYTES_PER_STEP_LOG2
                    self.pay((len(items) * max(count, 0) * _ELEMENT_STEPS << unit) >> (_BYTES_PER_STEP_LOG2))
        self.pay_for(left, deep=False)
        self.pay_for(right, deep=False)
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Metering().visit(super()._parse(source, name, filename))  # type: ignore[no-any-return]

    def _metered(
        self, function: Callable[..., Any], *, deep: bool, growth: Callable[..., int] | None = None
    ) -> Callable[..., Any]:
        """A filter or test that pays for what it reads, and for each item when it answers one at a time."""
        first = 0 if getattr(function, "jinja_pass_arg", None) is None else 1

        @functools.wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            values = [list(arg) if deep and isinstance(arg, Iterator) else arg for arg in args[first:]]
            self.pay(_CALL_STEPS)
            for value in (*values, *kwargs.values()):
                self.pay_for(value, deep=deep)
            if growth is not None:
                self.pay(growth(values, kwargs) >> _BYTES_PER_STEP_LOG2)
            result = function(*args[:first], *values, **kwargs)
            return self._paced(result) if isinstance(result, Iterator) else result

        return metered

    def _paced(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self.pay(_ELEMENT_STEPS)
            self.pay_for(item, deep=False)
            yield item

    def _pay_for_format(self, pattern: str, mark: str, values: Any) -> None:
        if _WIDE_FORMAT[mark].search(pattern):
            raise TooMuchWork(f"the template pads to more than {_MAX_PADDING} characters in {pattern[:80]!r}")
        for _ in range(pattern.count(mark)):
            self.pay_for(values)
            self.pay(_MAX_PADDING >> _BYTES_PER_STEP_LOG2)

    def _format(self, pattern: Any, *args: Any, **kwargs: Any) -> str:
        """``pattern % values``, as the operator does it."""
        if args and kwargs:
            raise TypeError("format takes values by position or by name, not both")
        self._pay_for_format(str(pattern), "%", kwargs or args)
        return soft_str(pattern) % (kwargs or args)

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as Hugging Face's templates expect it: Unicode kept, nothing escaped for HTML."""
        width = 0 if indent is None else indent if isinstance(indent, int) else len(indent)
        if max(width, *map(len, separators or ("",))) > _MAX_INDENT:
            raise TooMuchWork(f"tojson indents or separates by more than {_MAX_INDENT} characters")
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        if indent is None:
            return encoder.encode(value)
        return self.concat(encoder.iterencode(value))  # indentation grows with depth: paid as it is written


class _Metering(NodeTransformer):
    """Puts the meter into a parsed template: at each turn of a loop or macro, and on what grows or compares."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        """Pay per iteration, also for items that the loop's own condition drops."""
        self.generic_visit(node)
        node.body.insert(0, _tick_statement(node.body, _ITERATION_STEPS))
        if node.test is not None:
            node.test = nodes.And(_call("_tick", nodes.Const(_ITERATION_STEPS)), node.test)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        """Pay per call."""
        self.generic_visit(node)
        node.body.insert(0, _tick_statement(node.body, _MACRO_STEPS))
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:
        """Pay per call."""
        self.generic_visit(node)
        node.body.insert(0, _tick_statement(node.body, _MACRO_STEPS))
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        """Pay for both sides."""
        self.generic_visit(node)
        node.expr = _call("_weigh", node.expr)
        for operand in node.ops:
            operand.expr = _call("_weigh", operand.expr)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Concat:
        """Pay for the parts of ``~``."""
        self.generic_visit(node)
        node.nodes = [_call("_weigh", part) for part in node.nodes]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        """Pay for a slice, which is a copy."""
        self.generic_visit(node)
        return _call("_weigh", node) if isinstance(node.arg, nodes.Slice) else node


def _call(filter_name: str, value: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, filter_name, [], [], None, None)


def _tick_statement(body: list[nodes.Node], num_steps: int) -> nodes.ExprStmt:
    num_nodes = sum(1 for node in body for _ in node.find_all(nodes.Node))
    return nodes.ExprStmt(_call("_tick", nodes.Const(num_steps + num_nodes)))


@pass_context
def _tick(context: Context, num_steps: int) -> bool:
    context.environment.pay(abs(num_steps))  # type: ignore[attr-defined]
    return True


@pass_context
def _weigh(context: Context, value: Any) -> Any:
    context.environment.pay_for(value)  # type: ignore[attr-defined]
    return value


@pass_context
def _pay_for_output(context: Context, value: Any) -> Any:
    context.environment.pay_for(value)  # type: ignore[attr-defined]
    return value


def _raise_exception(message: object) -> None:
    raise Refused(str(message))


def _padding(values: Any, kwargs: Mapping[str, Any]) -> int:
    """Characters that an integer argument may add to a text."""
    return sum(abs(value) for value in (*values[1:], *kwargs.values()) if isinstance(value, int))


def _tabs(values: Any, kwargs: Mapping[str, Any]) -> int:
    return str(values[0]).count("\t") * (8 + _padding(values, kwargs))


def _second(values: Any, kwargs: Mapping[str, Any], name: str) -> Any:
    return values[1] if len(values) > 1 else kwargs.get(name, "")


def _replacing(values: Any, kwargs: Mapping[str, Any]) -> int:
    new = values[2] if len(values) > 2 else kwargs.get("new", "")
    return str(values[0]).count(str(_second(values, kwargs, "old"))) * len(str(new))


def _joining(values: Any, kwargs: Mapping[str, Any]) -> int:
    """``text.join(items)`` or ``items|join(text)``: one text per item, whichever of the two comes first."""
    lengths = [len(value) for value in (values[0], _second(values, kwargs, "d")) if isinstance(value, Sized)]
    return lengths[0] * lengths[1] if len(lengths) == 2 else 0


def _indenting(values: Any, kwargs: Mapping[str, Any]) -> int:
    width = _second(values, kwargs, "width")
    return (str(values[0]).count("\n") + 1) * (4 + (abs(width) if isinstance(width, int) else len(str(width))))


def _slots(values: Any, kwargs: Mapping[str, Any]) -> int:
    return _padding(values, kwargs) * _ELEMENT_STEPS << _BYTES_PER_STEP_LOG2


def _summing(values: Any, kwargs: Mapping[str, Any]) -> int:
    """Adding lists copies the sum so far each time."""
    start = values[2] if len(values) > 2 else kwargs.get("start", 0)
    if isinstance(start, (int, float)):
        return 0
    if _second(values, kwargs, "attribute"):
        raise TooMuchWork("the template adds up lists by attribute")
    return sum(len(item) for item in values[0] if isinstance(item, Sized)) * len(values[0]) << _BYTES_PER_STEP_LOG2


_GROWTH: Final[dict[str, Callable[[Any, Mapping[str, Any]], int]]] = {
    **dict.fromkeys(("batch", "slice"), _slots),
    **dict.fromkeys(("center", "ljust", "rjust", "truncate", "zfill"), _padding),
    "expandtabs": _tabs,
    "indent": _indenting,
    "join": _joining,
    "replace": _replacing,
    "sum": _summing,
}
"""Filters and string methods whose result may be larger than what they read: how many characters more."""
