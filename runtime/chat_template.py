"""Chat templates: messages become one prompt, by the model's own Jinja template.

The names that a template may use are those of transformers' apply_chat_template: messages, tools, documents,
add_generation_prompt, the special tokens' texts, raise_exception, strftime_now, and tojson without ASCII escapes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError

from lmpack.errors import LmpackError, UsageError
from runtime.template_sandbox import MAX_LENGTH, TemplateSandbox

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jinja2 import Template

    from runtime.tokenizer import Tokenizer

# what a model without a template gets
CHATML_TEMPLATE = """{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""
_MAX_JSON_SPACE = 64
MAX_TEMPLATE_LENGTH = 1 << 20  # characters; the longest known templates have 40,000


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    now: Callable[[], datetime] = datetime.now,
    **variables: Any,
) -> str:
    """Return the prompt for messages such as {"role": "user", "content": "Hi"}.

    Encode it with add_special=False and parse_special=True, or use encode_chat. `variables` are the template's own
    switches, such as enable_thinking. Raises UsageError for messages of another form and LmpackError for whatever
    goes wrong in the template, which is text of the model's maker.
    """
    _check_messages(messages)
    template = CHATML_TEMPLATE if tokenizer.chat_template is None else tokenizer.chat_template
    known: dict[str, Any] = {
        "messages": messages,
        "tools": tools,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        "strftime_now": lambda form: now().strftime(form),
    }
    try:
        compiled = _compiled(template)
        return _SANDBOX.render(compiled, {**tokenizer.special_texts, **known, **variables})
    except TemplateSyntaxError as error:
        raise LmpackError(f"chat template, line {error.lineno}: {error.message}") from error
    except TemplateError as error:
        raise LmpackError(f"chat template: {error.message or type(error).__name__}") from error
    except Exception as error:  # a template is a program, and can fail in every way one can
        raise LmpackError(f"chat template: {type(error).__name__}: {str(error)[:200]}") from error


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
    """Return the prompt's token ids; options are render_chat's.

    The start token that the model wants is there once, whether the template writes it or not.
    """
    ids = tokenizer.encode(render_chat(tokenizer, messages, **options), add_special=False, parse_special=True)
    if tokenizer.adds_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        return [tokenizer.bos_id, *ids]
    return ids


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise UsageError("messages: there are none, expected at least one")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UsageError(
                f'messages[{i}]: is {message!r:.60}, expected {{"role": "user", "content": "..."}}'
            )


@lru_cache(maxsize=16)
def _compiled(template: str) -> Template:
    if len(template) > MAX_TEMPLATE_LENGTH:
        raise LmpackError(
            f"chat template: {len(template)} characters, at most {MAX_TEMPLATE_LENGTH} are read"
        )
    return _SANDBOX.from_string(template)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(f"refuses these messages: {message}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    widths = [len(indent) if isinstance(indent, str) else indent or 0, *map(len, separators or ())]
    if max(widths) > _MAX_JSON_SPACE:
        raise TemplateError(f"tojson: indent and separators may take {_MAX_JSON_SPACE} characters")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    pieces, length = [], 0
    for piece in encoder.iterencode(value):  # a list in lists can be far longer than it looks
        pieces.append(piece)
        length += len(piece)
        if length > MAX_LENGTH:
            raise TemplateError(f"tojson: a text of more than {MAX_LENGTH} characters")
    return "".join(pieces)


def _sandbox() -> TemplateSandbox:
    sandbox = TemplateSandbox()
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.filters["tojson"] = _to_json
    return sandbox


_SANDBOX = _sandbox()
