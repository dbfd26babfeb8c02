"""Chat templates: what transformers renders, hostile templates kept in their sandbox."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lmpack.errors import LmpackError, UsageError
from runtime.chat_template import encode_chat, render_chat
from runtime.tokenizer import open_tokenizer
from tests.tiny_vocabularies import bpe_keys, golden, write_gguf

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from runtime.tokenizer import Tokenizer

CHAT = [
    {"role": "system", "content": "You are brief. <b>"},
    {"role": "user", "content": "  Größe?\n"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "'Why' & \"how\" {{ 1 }}"},
]
TOOLS = [
    {"type": "function", "function": {"name": "größe", "parameters": {"a": [1, None, True], "b": "<x>"}}}
]

# templates in the styles that are met: written for these tests, each with constructs of its kind
STYLES = {
    "chatml": """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
Default<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "header": """{{- bos_token }}
{%- for message in messages %}
    {%- set content = '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' %}
    {{- content }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "inst": """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("roles must alternate") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- endif %}
{%- endfor %}
""",
    "tools": """{%- if tools %}
# Tools
{%- for tool in tools %}

{{ tool | tojson }}
{{ tool.function | tojson(indent=2) }}
{%- endfor %}
{%- endif %}
{% macro say(message) -%}
{%- if message.content is string -%}{{ message.content }}{%- elif message.content is none -%}(none){%- endif -%}
{%- endmacro %}
{%- for message in messages[::-1] %}
    {%- if message.role not in ['user', 'assistant'] %}{% continue %}{% endif %}
    {%- if loop.index0 > 2 %}{% break %}{% endif %}
{{ loop.index }}/{{ loop.length }} {{ say(message) ~ '|' ~ message['role'].title() }}
    {%- if not loop.last %},{% endif %}
{%- endfor %}
{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(' + ') }}
{{ (messages | last).content.split(' ')[0].strip("'") }}
{{ 'é\\n<' | tojson }} {{ {'b': 1, 'a': 2} | tojson(sort_keys=True, separators=(',', ':')) }}
{{ messages[0].get('name', 'nobody') }} {{ 'a' if enable_thinking is defined and enable_thinking else 'b' }}
{{ 'x-y' | replace('-', '+') }} {{ 'a\\nb' | indent(2) }} {{ 7 // 2 }} {{ 2 ** 5 }} {{ '%s!' % 'z' }}
""",
    "generation": """{% for message in messages %}
{% if message.role == 'assistant' %}
{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
{% else %}
{{ message.content }}
{% endif %}
{% endfor %}""",
}


class FixedTokenizer:
    """The parts of a tokenizer that a template sees."""

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template
        self.special_texts = {"bos_token": "<s>", "eos_token": "</s>"}


def render(template: str | None, messages: Sequence[dict[str, Any]] = CHAT, **options: Any) -> str:
    """Render with a template of one's own."""
    tokenizer: Any = FixedTokenizer(template)
    return render_chat(tokenizer, messages, **options)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """A transformers tokenizer with the same special tokens; its vocabulary does not matter."""
    folder = tmp_path_factory.mktemp("theirs")
    model = {"type": "BPE", "vocab": {"a": 0, "<s>": 1, "</s>": 2}, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )


@pytest.mark.parametrize("style", sorted(STYLES))
@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_templates_render_as_transformers_renders_them(
    style: str, add_generation_prompt: bool, tools: Any, theirs: PreTrainedTokenizerFast
) -> None:
    for messages in (CHAT, CHAT[1:]):
        expected = theirs.apply_chat_template(
            messages,
            chat_template=STYLES[style],
            tools=tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=True,
        )
        assert (
            render(
                STYLES[style],
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                enable_thinking=True,
            )
            == expected
        )


def test_the_tiny_models_chats_are_those_of_transformers(models_dir: Path) -> None:
    folder = models_dir / "tiny" / "hf"
    ours, reference = open_tokenizer(folder), AutoTokenizer.from_pretrained(folder)

    text = reference.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    ids = reference.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)["input_ids"]

    assert render_chat(ours, CHAT) == text
    assert encode_chat(ours, CHAT) == ids
    assert encode_chat(open_tokenizer(models_dir / "tiny" / "tiny-Q4_K_M.gguf"), CHAT) == ids


def test_a_model_without_a_template_gets_chatml() -> None:
    assert render(None, CHAT[1:3]) == (
        "<|im_start|>user\n  Größe?\n<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(None, CHAT[1:2], add_generation_prompt=False) == "<|im_start|>user\n  Größe?\n<|im_end|>\n"


def with_template(path: Path, template: str, **others: Any) -> Tokenizer:
    """A tokenizer whose GGUF has that template."""
    tokenizer: Any = open_tokenizer(write_gguf(path, bpe_keys(golden()["merges"], "llama-bpe", **others)))
    tokenizer.chat_template = template
    found: Tokenizer = tokenizer
    return found


def test_the_start_token_is_there_once_whether_the_template_writes_it_or_not(tmp_path: Path) -> None:
    writes = with_template(tmp_path / "a.gguf", "{{ bos_token }}{{ messages[0].content }}")
    leaves_out = with_template(tmp_path / "b.gguf", "{{ messages[0].content }}")
    message = [{"role": "user", "content": "Hi"}]

    assert encode_chat(writes, message) == encode_chat(leaves_out, message) == writes.encode("Hi")


def test_the_clock_is_the_callers() -> None:
    template = "{{ strftime_now('%d %b %Y') }}"

    assert render(template, now=lambda: datetime(2026, 2, 3)) == "03 Feb 2026"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only two roles') }}", "chat template: refuses these messages: only two roles"),
        ("a\n{% if %}", r"chat template, line 2: Expected an expression"),
        ("{{ 1 / 0 }}", "chat template: ZeroDivisionError"),
        ("{{ messages[9].content.x }}", "chat template: list object has no element 9"),
        ("{{ 'a' + 1 }}", "chat template: TypeError"),
        ("{% for x in 5 %}{% endfor %}", "chat template: TypeError: 'int' object is not iterable"),
        ("{% include 'secrets' %}", "chat template: TypeError: no loader"),
        ("x" * (1 << 20) + "x", "chat template: 1048577 characters, at most 1048576"),
    ],
)
def test_whatever_goes_wrong_in_a_template_is_one_clear_error(template: str, message: str) -> None:
    with pytest.raises(LmpackError, match=message) as caught:
        render(template)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ render.__globals__ }}{{ raise_exception.__globals__.json }}",
        "{{ strftime_now.__closure__[0] }}",
        "{{ namespace.__init__.__globals__['__builtins__'] }}",
        "{{ (messages|attr('__class__')).mro() }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages.append({'role': 'user'}) }}",
        "{{ messages[0].update({'role': 'user'}) }}",
        "{% set x = messages.pop() %}",
        "{{ joiner.__call__.__globals__ }}",
    ],
)
def test_a_template_cannot_reach_python_or_change_the_messages(template: str) -> None:
    before = json.dumps(CHAT)

    with pytest.raises(LmpackError, match="chat template"):
        render(template)

    assert json.dumps(CHAT) == before


NESTED = "{% set ns = namespace(x=[1, 1]) %}{% for i in range(60) %}"  # doubled each time


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for x in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{{ 'a' * 10000000000 }}",
        "{{ [1] * 10000000000 }}",
        "{{ 7 ** 1000000000 }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{{ 'a'.ljust(10000000000) }}",
        "{{ 'aaaa' | indent(10000000000, true) }}",
        "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
        "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
        "{{ ('b' * 1000000).join('a' * 1000000) }}",
        "{{ ('a' * 1000000) | join('b' * 1000000) }}",
        "{% set s = namespace(x='aaaa') %}{% for i in range(99) %}{% set s.x = s.x ~ s.x %}{% endfor %}",
        "{% set s = namespace(x='aaaa') %}{% for i in range(99) %}{% set s.x = s.x + s.x %}{% endfor %}",
        "{% set s = namespace(x='aa') %}{% for i in range(99) %}{% set s.x %}{{ s.x }}{{ s.x }}{% endset %}{% endfor %}",
        "{% for i in range(99999) %}" + "a" * 1000 + "{% endfor %}",
        "{{ 'a' | center(10000000000) }}",
        "{{ lipsum(n=100000) }}",
        "{{ messages | tojson(indent=1000000000) }}",
        "{{ messages | tojson(separators=('a' * 1000000, 'b')) }}",
        f"{NESTED}{{% set ns.x = [ns.x, ns.x] %}}{{% endfor %}}{{{{ ns.x }}}}",
        f"{NESTED}{{% set ns.x = (ns.x, ns.x) %}}{{% endfor %}}{{{{ ns.x | string }}}}",
        f"{NESTED}{{% set ns.x = {{'a': ns.x, 'b': ns.x}} %}}{{% endfor %}}{{{{ ns.x | tojson }}}}",
        f"{NESTED}{{% set ns.x = ns.x + ns.x %}}{{% endfor %}}{{{{ ns.x == ns.x }}}}",
        f"{NESTED}{{% set ns.x = [ns.x] * 2 %}}{{% endfor %}}{{{{ ns.x ~ '' }}}}",
        f"{NESTED}{{% set ns.x = dict(a=ns.x, b=ns.x) %}}{{% endfor %}}{{{{ '%s' % ns.x }}}}",
        f"{NESTED}{{% set ns.x = dict.fromkeys(range(99), ns.x) %}}{{% endfor %}}{{{{ ns.x }}}}",
        f"{NESTED}{{% set ns.x = namespace(a=ns.x, b=ns.x) %}}{{% endfor %}}{{{{ ns.x }}}}",
        f"{NESTED}{{% set n = namespace() %}}{{% set n.a = ns.x %}}{{% set n.b = ns.x %}}{{% set ns.x = n %}}{{% endfor %}}{{{{ ns.x }}}}",
        "{% set ns = namespace(x=1) %}{% for i in range(9999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
    ],
)
def test_a_template_cannot_run_for_long_or_fill_the_memory(template: str) -> None:
    with pytest.raises(LmpackError, match="chat template"):
        render(template)


def test_bounds_are_per_rendering() -> None:
    template = "{% for i in range(99999) %}{{ i }}{% endfor %}"

    assert len({render(template) for _ in range(3)}) == 1


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages: there are none"),
        (["Hi"], r"messages\[0\]: is 'Hi', expected"),
        ([{"role": "user"}, {"content": "x"}], r"messages\[1\]: is .*, expected"),
    ],
)
def test_messages_of_another_form_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        render(None, messages)
