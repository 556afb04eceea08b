"""Owns the Jinja environment of chat templates: Hugging Face's dialect, what it may call, and the meter it runs under.

Knows no message and no model. A template comes with a download, so it is hostile until it has rendered: everything it
does is paid from a budget. Read next: ``template_budget.py`` (the prices), ``chat_template.py``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from jinja2 import nodes, pass_context
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import soft_str

from troth.text.template_budget import (
    BYTES_PER_STEP_LOG2,
    CALL_STEPS,
    ENTRY_STEPS,
    ITERATION_STEPS,
    MACRO_STEPS,
    Budget,
    TooMuchWork,
)

MAX_OUTPUT_CHARACTERS: Final = 16 * 2**20
_MAX_INDENT: Final = 16

# Filters that look at the shape of their input only; the others may read all of it.
_SHALLOW_FILTERS: Final = frozenset(
    {
        *("attr", "batch", "count", "d", "default", "dictsort", "first", "items", "last", "length", "list", "map"),
        *("reject", "rejectattr", "reverse", "select", "selectattr", "slice"),
    }
)
_DEEP_TESTS: Final = frozenset(
    ("==", "!=", "<", "<=", ">", ">=", "eq", "equalto", "ne", "lt", "lessthan", "le", "gt", "greaterthan", "ge", "in")
)
# No template in use needs these, and each costs more than its input's size or is not deterministic.
_WITHHELD_FILTERS: Final = ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
_WITHHELD_METHODS: Final = frozenset({"maketrans", "translate"})
_OWN_LIST_METHODS: Final = frozenset({"append", "pop"})


class _OwnList(list[Any]):
    """A list that the template wrote itself: it may grow and shrink it, as some do. What it was given it may not."""


class Refused(TemplateError):
    """The template called ``raise_exception``: it does not accept this conversation."""


class _GenerationBlock(Extension):
    """``{% generation %}``: marks what the assistant says in training data; here only a scope."""

    tags = frozenset({"generation"})  # type: ignore[assignment]  # jinja2 asks for a set and only looks into it

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
        self.budget: Final = Budget()
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        filters: dict[str, Any] = {**self.filters, "tojson": self._tojson, "format": self._format}
        for name in _WITHHELD_FILTERS:
            del filters[name]
        tests: dict[str, Any] = dict(self.tests)
        self.filters = {name: self._metered(name, f, deep=name not in _SHALLOW_FILTERS) for name, f in filters.items()}
        self.tests = {name: self._metered(name, f, deep=name in _DEEP_TESTS) for name, f in tests.items()}
        self.filters |= {"_turn": _turn, "_weigh": _weigh, "_own": _OwnList}

    def concat(self, pieces: Iterable[str]) -> str:
        """Join what a template or a block of it has written."""
        kept: list[str] = []
        length = 0
        for piece in pieces:
            length += len(piece)
            if length > MAX_OUTPUT_CHARACTERS:
                raise TooMuchWork(f"the template writes more than {MAX_OUTPUT_CHARACTERS} characters")
            kept.append(piece)
        self.budget.pay(length >> BYTES_PER_STEP_LOG2)
        return "".join(kept)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """An attribute, as the sandbox allows it.

        A namespace holds only what the template put there, so the sandbox's long look at it is left out. Templates
        that search the whole history for every message read one a million times.
        """
        if type(obj) is Namespace and not attribute.startswith("_"):
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """As the sandbox says, less the string methods whose result no input bounds."""
        if type(obj) is _OwnList and attr in _OWN_LIST_METHODS:
            return True
        return attr not in _WITHHELD_METHODS and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format`` as the sandbox offers it, paid for."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def metered(*args: Any, **kwargs: Any) -> str:
            self.budget.pay_for_format(value.__self__, "{", (args, kwargs))
            return wrapped(*args, **kwargs)

        return metered

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a macro, a method or a global function, paid for."""
        budget = __self.budget
        budget.pay(CALL_STEPS)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
            budget.pay_for((owner, args, kwargs))
            budget.pay_for_growth(__obj.__name__, (owner, *args), kwargs)
        elif isinstance(owner, (list, tuple)) or getattr(__obj, "__name__", "") == "changed":
            budget.pay_for((owner, args))  # these compare
        else:
            for arg in (*args, *kwargs.values()):
                budget.pay_for(arg, deep=False)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An arithmetic operator, paid for."""
        self.budget.pay_for_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Metering().visit(super()._parse(source, name, filename))  # type: ignore[no-any-return]

    def _metered(self, name: str, function: Callable[..., Any], *, deep: bool) -> Callable[..., Any]:
        """A filter or test that pays for what it reads, and for each item when it answers one at a time."""
        first = 0 if getattr(function, "jinja_pass_arg", None) is None else 1

        @functools.wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            values = [list(arg) if deep and isinstance(arg, Iterator) else arg for arg in args[first:]]
            self.budget.pay(CALL_STEPS)
            for value in (*values, *kwargs.values()):
                self.budget.pay_for(value, deep=deep)
            self.budget.pay_for_growth(name, values, kwargs)
            result = function(*args[:first], *values, **kwargs)
            return self._paced(result) if isinstance(result, Iterator) else result

        return metered

    def _paced(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self.budget.pay(ENTRY_STEPS)
            self.budget.pay_for(item, deep=False)
            yield item

    def _format(self, pattern: Any, *args: Any, **kwargs: Any) -> str:
        """``pattern % values``, as the operator does it."""
        if args and kwargs:
            raise TypeError("format takes values by position or by name, not both")
        self.budget.pay_for_format(str(pattern), "%", kwargs or args)
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
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        if indent is None:
            return encoder.encode(value)
        return self.concat(encoder.iterencode(value))  # indentation grows with depth: paid as it is written


class _Metering(NodeTransformer):
    """Puts the meter into a parsed template: at each turn of a loop or macro, and on what grows or compares."""

    def __init__(self) -> None:
        self._num_nodes = 0

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        """Count nodes on the way: what a body costs each time."""
        self._num_nodes += 1
        return super().visit(node, *args, **kwargs)

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        """Mark a list as the template's own."""
        self.generic_visit(node)
        return _filtered(node, "_own")

    def visit_For(self, node: nodes.For) -> nodes.For:
        """Pay per iteration, also for items that the loop's own condition drops."""
        num_nodes = self._visit_counting(node)
        node.body.insert(0, _turn_statement(ITERATION_STEPS + num_nodes))
        if node.test is not None:
            node.test = nodes.And(_filtered(nodes.Const(ITERATION_STEPS), "_turn"), node.test)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        """Pay per call."""
        num_nodes = self._visit_counting(node)
        node.body.insert(0, _turn_statement(MACRO_STEPS + num_nodes))
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:
        """Pay per call."""
        num_nodes = self._visit_counting(node)
        node.body.insert(0, _turn_statement(MACRO_STEPS + num_nodes))
        return node

    def _visit_counting(self, node: nodes.Node) -> int:
        before = self._num_nodes
        self.generic_visit(node)
        return self._num_nodes - before

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        """Pay for both sides."""
        self.generic_visit(node)
        node.expr = _filtered(node.expr, "_weigh")
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, "_weigh")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Concat:
        """Pay for the parts of ``~``."""
        self.generic_visit(node)
        node.nodes = [_filtered(part, "_weigh") for part in node.nodes]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        """Pay for a slice, which is a copy."""
        self.generic_visit(node)
        return _filtered(node, "_weigh") if isinstance(node.arg, nodes.Slice) else node


def _filtered(value: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None)


def _turn_statement(num_steps: int) -> nodes.ExprStmt:
    return nodes.ExprStmt(_filtered(nodes.Const(num_steps), "_turn"))


@pass_context
def _turn(context: Context, num_steps: int) -> bool:
    _budget(context).pay(abs(num_steps))  # the name is within a template's reach
    return True


@pass_context
def _weigh(context: Context, value: Any) -> Any:
    _budget(context).pay_for(value)
    return value


@pass_context
def _pay_for_output(context: Context, value: Any) -> Any:
    _budget(context).pay_for(value)
    return value


def _budget(context: Context) -> Budget:
    return context.environment.budget  # type: ignore[attr-defined,no-any-return]


def _raise_exception(message: object) -> None:
    raise Refused(str(message))
