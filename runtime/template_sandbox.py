"""TemplateSandbox: runs a Jinja template that nobody has vouched for.

Jinja's own sandbox keeps it from Python's insides. It does not bound work: a loop in a loop runs for days, and forty
doublings of a string fill the memory. So every loop round, call and output is counted here, and operations that
multiply text are checked before they run. A list that holds one list twice, and so on twenty times, is a million items
to whatever prints it: sizes count what is inside, as often as it is there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sized
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import nodes, pass_context, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent, do_join, do_replace
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from jinja2 import Template
    from jinja2.nodes import EvalContext
    from jinja2.parser import Parser
    from jinja2.runtime import Context

MAX_STEPS = 200_000  # loop rounds and calls of one rendering; a chat of 1,000 messages takes some 20,000
MAX_LENGTH = 16 << 20  # characters, of all that one rendering puts out and of any text or list in it
_ITEM_LENGTH = 64  # characters that an item of a list counts as, about what it takes in memory

# filters that make long texts from short ones, or show Python's objects; no known chat template uses them
_LEFT_OUT_FILTERS = (
    "batch",
    "center",
    "filesizeformat",
    "format",
    "pprint",
    "slice",
    "urlize",
    "wordwrap",
    "xmlattr",
)
_WIDE_FORMAT = re.compile(r"\*|[0-9]{5,}")  # %99999999d and {:>99999999}


@dataclass(slots=True)
class _Spent:
    """What a rendering has used of its bounds."""

    steps: int = 0
    length: int = 0


_spent: ContextVar[_Spent] = ContextVar("spent")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """A Jinja environment with chat templates' white-space rules, loop controls and {% generation %} blocks."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock])
        for name in _LEFT_OUT_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters |= {"_rounds": _rounds, "_output": _output, "_bounded": _bounded}
        self.filters["_bounded_namespace"] = _bounded_namespace
        self.filters |= {"join": _join, "replace": _replace, "indent": _indent}

    def render(self, template: Template, variables: Mapping[str, Any]) -> str:
        """Render within the bounds; raises whatever the template raises, SecurityError for a broken bound."""
        token = _spent.set(_Spent())
        try:
            return template.render(variables)
        finally:
            _spent.reset(token)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = _filtered(_as_expression(loop.iter), "_rounds")
        for output in list(tree.find_all(nodes.Output)):
            output.nodes = [_filtered(_as_expression(part), "_output") for part in output.nodes]
        for assignment in list(tree.find_all(nodes.Assign)):
            if isinstance(assignment.target, nodes.NSRef):
                assignment.node = _filtered(_as_expression(assignment.node), "_bounded_namespace")
        _bound_values(tree)
        return tree

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Count a call, and check those of str's methods that can make a text long."""
        _step()
        method = getattr(function, "__wrapped__", function)  # Jinja wraps str.format
        receiver = getattr(method, "__self__", None)
        if isinstance(receiver, str):
            args = _checked_method_arguments(receiver, method.__name__, args)
        return _bounded(context, super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Check an operation on texts, lists and powers before it runs."""
        if operator == "+":
            _check_length(_size(left) + _size(right))
        elif operator == "*":
            _check_length(max(_size(left) * _count(right), _size(right) * _count(left)))
        elif operator == "**":
            _check_length(_count(left).bit_length() * _count(right))
        elif operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise SecurityError("a format that pads to a great width")
        return super().call_binop(context, operator, left, right)


class GenerationBlock(Extension):
    """{% generation %}…{% endgeneration %} marks what a model wrote, for training; it renders its content."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block's content in a scope of its own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _as_expression(part: nodes.Node) -> nodes.Expr:
    """A template's own text as a constant, which a filter can take."""
    if isinstance(part, nodes.TemplateData):
        return nodes.Const(part.data, lineno=part.lineno)
    assert isinstance(part, nodes.Expr), "an output holds expressions"
    return part


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _bound_values(node: nodes.Node) -> None:
    """Put a check around each `a ~ b`, each list or dictionary and what a namespace gets, innermost first."""
    for field, value in node.iter_fields():
        children = value if isinstance(value, list) else [value]
        for child in children:
            if isinstance(child, nodes.Node):
                _bound_values(child)
        bounded = [_filtered(child, "_bounded") if _makes_a_value(child) else child for child in children]
        setattr(node, field, bounded if isinstance(value, list) else bounded[0])


def _makes_a_value(node: Any) -> bool:
    return isinstance(node, nodes.Concat | nodes.List | nodes.Dict) or (
        isinstance(node, nodes.Tuple) and node.ctx == "load"
    )


def _step() -> None:
    spent = _spent.get()
    spent.steps += 1
    if spent.steps > MAX_STEPS:
        raise SecurityError(f"more than {MAX_STEPS} loop rounds and calls")


@pass_context
def _rounds(_context: Context, items: Iterable[Any]) -> Iterator[Any]:
    """Hand a loop its items one by one, each counted."""
    for item in items:
        _step()
        yield item


@pass_context
def _output(_context: Context, value: Any) -> str:
    text = str(value)
    spent = _spent.get()
    spent.length += len(text)
    _check_length(spent.length)
    return text


@pass_context
def _bounded(_context: Context, value: Any) -> Any:
    _check_length(_size(value))
    return value


@pass_eval_context
def _join(context: EvalContext, items: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    """Jinja's join, bounded."""
    items = list(items)
    _check_length(sum(map(_length, items)) + len(str(d)) * len(items))
    return str(do_join(context, items, d, attribute))


@pass_eval_context
def _replace(context: EvalContext, s: Any, old: str, new: str, count: int | None = None) -> str:
    """Jinja's replace, bounded."""
    _checked_method_arguments(str(s), "replace", (old, new))
    return str(do_replace(context, str(s), old, new, count))


def _indent(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Jinja's indent, bounded."""
    text = str(s)
    _check_length(len(text) + (len(text.splitlines()) + 1) * (_count(width) + _length(width)))
    return str(do_indent(text, width, first, blank))


def _checked_method_arguments(text: str, method: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Check what a str method could make of its arguments; join gets a list, as iterating is checked too."""
    if method in ("ljust", "rjust", "center", "zfill", "expandtabs"):
        _check_length(
            max([_count(arg) for arg in args], default=0) * (len(text) if method == "expandtabs" else 1)
        )
    elif method == "replace" and len(args) > 1:
        _check_length(len(text) + (len(text) // max(_length(args[0]), 1) + 1) * _length(args[1]))
    elif method == "join" and args:
        items = list(args[0])
        _check_length(sum(map(_length, items)) + len(text) * len(items))
        return (items, *args[1:])
    elif method in ("format", "format_map") and _WIDE_FORMAT.search(text):
        raise SecurityError("a format that pads to a great width")
    return args


def _check_length(length: int) -> None:
    if length > MAX_LENGTH:
        raise SecurityError(f"a text or list of more than {MAX_LENGTH} characters")


@pass_context
def _bounded_namespace(context: Context, value: Any) -> Any:
    """Check what a namespace gets where it is another one; anything else was checked when it was made."""
    return _bounded(context, value) if isinstance(value, Namespace) else value


def _size(value: Any, known: dict[int, int] | None = None) -> int:
    """Characters of a text; _ITEM_LENGTH for each item of a list or dictionary, and what is in it; 0 for all else."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        items: list[Any] | tuple[Any, ...] = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple):
        items = value
    elif isinstance(value, Namespace):
        items = [*value._Namespace__attrs.values()]  # no other way in: Namespace answers for every name
    else:
        return 0
    known = {} if known is None else known
    if id(value) not in known:
        known[id(value)] = 0  # where it holds itself
        inside = [len(item) if type(item) is str else _size(item, known) for item in items]
        known[id(value)] = len(items) * _ITEM_LENGTH + sum(inside)
    return known[id(value)]


def _length(value: Any) -> int:
    return len(value) if isinstance(value, Sized) else 0


def _count(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 0
