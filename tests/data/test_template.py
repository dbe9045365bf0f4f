"""Templates of every temper: dated, trimming, rewriting, repeating, dropping, broken."""

import numpy as np
import pytest

from calyrex_jax.core.errors import UserError
from calyrex_jax.data.chat import ChatPolicy, encode
from tests.data.conftest import CHATML, MISTRAL
from tests.data.reference import chat, check, rendered

DATED = (  # as Llama-3.1's: a dated block in any case
    "{{ bos_token }}{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{% if messages[0]['role'] == 'system' %}{% set text = messages[0]['content'] | trim %}{% set messages = messages[1:] %}"
    "{% else %}{% set text = '' %}{% endif %}"
    "{{ '<|im_start|>system\nToday Date: ' + date_string + '\n\n' + text + '<|im_end|>' }}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' }}{% endfor %}"
)


def test_dated_template(tiny):
    tokenizer = tiny(DATED)
    example = encode(tokenizer, chat("Today?", "no", system="Today"))
    text = "<s><|im_start|>system\nToday Date: 26 Jul 2024\n\nToday<|im_end|><|im_start|>user\nToday?<|im_end|>"
    text += "<|im_start|>assistant\nno<|im_end|>"
    at = text.index("Today<|")
    check(tokenizer, example, text, [(at, at + 5)], [(len(text) - 12, len(text))])
    assert encode(tokenizer, chat("q", "a")).origin == "template"
    other = encode(tokenizer, chat("q", "a"), policy=ChatPolicy(date_string="01 Jan 2030"))
    assert "01 Jan 2030" in tokenizer.decode(other.tokens)


def test_clock_is_pinned(tiny):
    tokenizer = tiny("  {% if true %}{{ strftime_now('%Y') }} {% endif %}" + CHATML)
    assert tokenizer.decode(encode(tokenizer, chat("q", "a")).tokens).startswith("26 Jul 2024 ")


THINKING = CHATML.replace(
    "message['content']",
    "(message['content'].split('</think>')[-1].lstrip('\n') if message['role'] == 'assistant' else message['content'])",
)


def test_template_that_drops_reasoning(tiny):
    tokenizer = tiny(THINKING)
    reply = "<think>long, a long\n</think>\n\na long answer"
    messages = chat("q", reply, "r", "plain", system="Shout.")
    text = rendered(tokenizer, messages)
    assert "think" not in text
    at, last = text.index("a long"), text.index("plain")
    system = text.index("Shout.")
    targets = [(at, at + len("a long answer<|im_end|>")), (last, last + len("plain<|im_end|>"))]
    check(tokenizer, encode(tokenizer, messages), text, [(system, system + 6)], targets)


def test_tool_messages(tiny, real):
    messages = [*chat("q", "call f"), {"role": "tool", "content": "42"}, {"role": "assistant", "content": "It is 42"}]
    for tokenizer in (
        real("qwen2_5"),
        tiny(CHATML.replace("message['content'] + '<|im_end|>", "message['content'] | tojson + '<|im_end|>")),
    ):
        example = encode(tokenizer, messages)
        np.testing.assert_array_equal(example.tokens, tokenizer.encode(rendered(tokenizer, messages)))
        text = tokenizer.decode(example.tokens[example.targets], False)
        assert "call f" in text and "It is 42" in text and text.count("42") == 1
    with pytest.raises(UserError, match=r"f:4: the chat template of .* refuses this conversation: .*roles"):
        encode(tiny(MISTRAL), messages, where="f:4")


TOOLLESS = CHATML.replace("messages %}", "messages if message['role'] != 'tool' %}", 1)


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        (TOOLLESS, r"drops or rewrites messages\[2\] \(role 'tool'\)"),
        (CHATML.replace("message['content']", "message['content'] | reverse"), "changes its text with the contents"),
        (CHATML + "{{ messages[1]['content'] | length }}", "drops or rewrites|changes its text with the contents"),
        ("{{ messages[0]['nope'].x }}", "refuses this conversation"),
        ("{% for %}", "refuses this conversation"),
        ("{{ 'fixed' }}", "drops or rewrites"),
    ],
)  # fmt: skip
def test_templates_that_do_not_fit(template, fault, tiny):
    messages = [*chat("q w", "abc"), {"role": "tool", "content": "42"}, {"role": "assistant", "content": "done"}]
    with pytest.raises(UserError, match=fault) as error:
        encode(tiny(template), messages, where="f:8")
    assert "\n" not in str(error.value)


def test_repeating_template(tiny):
    """A template that writes the system text twice: both places are the span."""
    tokenizer = tiny(
        CHATML + "{% if messages[0]['role'] == 'system' %}{{ '<s>Mind: ' + messages[0]['content'] }}{% endif %}"
    )
    example = encode(tokenizer, chat("Shout.", "a", system="Shout."))
    text = tokenizer.decode(example.tokens, False)
    first, last = text.index("Shout."), text.rindex("Shout.")
    reply = text.index("a<|im_end|>")
    check(tokenizer, example, text, [(first, first + 6), (last, last + 6)], [(reply, reply + 11)])


def test_private_use_characters_in_contents(tiny):
    tokenizer = tiny(CHATML)
    odd = "\U000f0000 \U000f0001 \ue000"
    example = encode(tokenizer, chat(odd, odd, system=odd))
    text = rendered(tokenizer, chat(odd, odd, system=odd))
    at, last = text.index(odd), text.rindex(odd)
    check(tokenizer, example, text, [(at, at + len(odd))], [(last, last + len(odd) + 10)])
    with pytest.raises(UserError, match="private-use areas"):
        encode(tokenizer, chat(odd + "\U00100000", "a"))
