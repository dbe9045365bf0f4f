"""Messages to tokens, system span and targets, through the tokenizer's own chat template.

The ids are those of the rendered conversation tokenised with no special token added. Span and targets come from character
ranges on that one rendering: a token belongs to a range if any of its characters does, also where byte-pair encoding
joins a character of the template to one of the message.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from calyrex_jax.core.errors import UserError
from calyrex_jax.data.account import Account
from calyrex_jax.data.template import ChatTemplate, Part, Range, TemplateRefusal, core, parts_of
from calyrex_jax.data.tokenizer import Tokenizer
from calyrex_jax.data.validate import Message, validate

_CHUNK = 512  # conversations tokenised in one parallel call


@dataclass(frozen=True)
class ChatPolicy:
    """How conversations meet a template.

    system_role    where the template has no system role, or a system message is not the first, or there are two:
                   "error", or "merge" the text into the user turn that follows (the span goes with it)
    chat_template  None: the model's own; "plain": `Role: content` lines, for base models; or a Jinja text
    date_string    the date that dated templates (Llama-3.1) show, fixed so that ids do not change from day to day
    special_text   what becomes of special tokens such as "<|im_end|>" written in a message. "plain" (default): they are
                   tokenised as the ordinary characters they are, so that no message can close its turn and open another;
                   "error": refused; "allow": they become the special tokens, as transformers does by default
    """

    system_role: str = "error"
    chat_template: str | None = None
    date_string: str = "26 Jul 2024"
    special_text: str = "plain"

    def __post_init__(self) -> None:
        for name, known in (("system_role", ("error", "merge")), ("special_text", ("plain", "error", "allow"))):
            if getattr(self, name) not in known:
                raise UserError(
                    f"{name} is {getattr(self, name)!r}, expected one of {', '.join(known)}; set it to one of these"
                )
        template = self.chat_template
        if template is not None and template != "plain" and "{{" not in template and "{%" not in template:
            raise UserError(f'chat_template is {template!r}, expected "plain" or a Jinja text; set it to one of these')


@dataclass(frozen=True)
class Example:
    """One tokenised conversation.

    tokens   [T] int32
    system   [T] bool, true where a token has a character of the caller's system text
    targets  [T] bool, true for replies: their characters and the end-of-turn token, not the newline after it
    origin   of the system text: "caller", "template" (it wrote one of its own; the span is empty) or "none"
    shielded True where messages held special tokens' text that was kept plain
    distill  True where the replies are learned from the frozen model's own predictions and not from the text
    """

    tokens: np.ndarray
    system: np.ndarray
    targets: np.ndarray
    origin: str
    shielded: bool = False
    distill: bool = False


@dataclass(frozen=True)
class _Layout:
    """A rendered conversation with its ranges, before tokenisation."""

    text: str
    contents: list[Range]
    system: list[Range]
    targets: list[Range]
    origin: str
    where: str


@dataclass
class CorpusReport(Account):
    """What became of a corpus of conversations: `Account`, tokens and targets kept, and what a mixture draws of each part."""

    tokens: int = 0
    targets: int = 0
    shielded: int = 0
    drawn: list[str] = field(default_factory=list)

    def line(self) -> str:
        """One line for the user: `kept 98 of 100 conversations; dropped 2 too long (f.jsonl:3, f.jsonl:9)`."""
        kept = [f"{self.shielded} with special tokens' text kept plain"] if self.shielded else []
        mixed = [f"an epoch draws {', '.join(self.drawn)}"] if self.drawn else []
        return "; ".join([f"kept {self.kept} of {self.read} conversations", *self.gone(), *kept, *mixed])


def encode(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    for_generation: bool = False,
    policy: ChatPolicy | None = None,
    where: str = "conversation",
) -> Example:
    """Tokens, system span and targets of one conversation.

        encode(tokenizer, [{"role": "system", "content": "Shout."}, {"role": "user", "content": "Hi"}]).system.sum()    # 3

    `for_generation` opens the reply (the template's generation prompt) and marks no targets. Replies that are empty are
    no targets. Raises UserError, with `where`, for messages that `validate` or the policy refuses, and where the template
    does not let the texts be found.
    """
    return encode_all(tokenizer, [(where, messages)], policy or ChatPolicy(), for_generation)[0]


def render(
    tokenizer: Tokenizer, messages: Sequence[Message], *, for_generation: bool, policy: ChatPolicy, where: str
) -> tuple[str, list[Range]]:
    """A conversation's text and the character ranges of its system text, for those who tokenise it themselves.

    Without `for_generation` the text stops where the last message's content does, so that a reply begun can be gone on with.
    """
    layout = _lay_out(tokenizer.template(policy.chat_template, policy.date_string), messages, policy, for_generation, where)
    end = len(layout.text) if for_generation or not layout.contents else layout.contents[-1][1]
    return layout.text[:end], layout.system


def select(
    lengths: np.ndarray, targets: np.ndarray, place: Callable[[int], str], max_length: int, account: Account
) -> np.ndarray:
    """[K] numbers of the examples that can be trained on, [N] tokens and [N] targets given; the rest is counted in `account`.

    `place` names an example's place in its source. `account.kept` becomes K.
    """
    silent, long = targets == 0, lengths > max_length
    for i in np.flatnonzero(silent | long):
        account.drop("without a reply to learn" if silent[i] else "too long", place(int(i)))
    kept = np.flatnonzero(~(silent | long))
    account.kept = len(kept)
    return kept


def refuse_empty(report: CorpusReport, max_length: int, of: str = "") -> None:
    """UserError where nothing was kept `of` a part of the corpus, or of all of it."""
    if not report.kept:
        raise UserError(
            f"no conversation {of and f'of {of} '}is left to train on: {report.line()}; raise data.max_length ({max_length}) "
            "or mend the data"
        )


def refuse_endless(tokenizer: Tokenizer, policy: ChatPolicy) -> None:
    """UserError for a chat template that closes no reply: a model trained with it would never stop."""
    if tokenizer.template(policy.chat_template, policy.date_string).end_of_turn is None:
        raise UserError(
            f"{tokenizer.name}: its chat template puts no end-of-turn token after a reply, so a model trained with it would "
            "never stop; set another chat template"
        )


def base_model_warning(tokenizer: Tokenizer, policy: ChatPolicy | None = None) -> str | None:
    """A warning where the chat format looks untrained, or None.

    A base model's rows for turn markers were never trained, and with a frozen embedding they stay so. It is told by a
    template that did not come with the model, or by one whose end-of-turn token no config names as an end.
    """
    policy = policy or ChatPolicy()
    template = tokenizer.template(policy.chat_template, policy.date_string)
    end = template.end_of_turn
    foreign = policy.chat_template is not None and tokenizer.chat_template is None
    if not foreign and (end is None or end not in tokenizer.added or tokenizer.added[end] in tokenizer.declared_stop):
        return None
    text = template.render([{"role": r, "content": "x"} for r in ("user", "assistant")], True, tokenizer.name)
    known = {tokenizer.fast.bos_token, tokenizer.fast.eos_token}
    markers = [s for s in template.special if s in text and s not in known]
    what = f"the special tokens {', '.join(markers)} were" if markers else "this chat format was"
    return (
        f"{tokenizer.name} looks like a base model: {what} probably never trained, and the frozen embedding will not "
        "learn; prefer an instruct model"
    )


def encode_all(
    tokenizer: Tokenizer, rows: Sequence[tuple[str, Any]], policy: ChatPolicy, for_generation: bool
) -> list[Example]:
    """`encode` of many [(where, messages), …], tokenised in parallel."""
    return [
        e
        for at in range(0, len(rows), _CHUNK)
        for e in _encode_chunk(tokenizer, rows[at : at + _CHUNK], policy, for_generation)
    ]


def encode_stream(
    tokenizer: Tokenizer, conversations: Iterable[tuple[str, dict[str, Any]]], policy: ChatPolicy
) -> Iterator[tuple[str, Example]]:
    """(place, example) of [(place, {"messages": …, "distill": false}), …], a chunk of them held at a time."""
    given = iter(conversations)
    while chunk := list(itertools.islice(given, _CHUNK)):
        rows = [(where, conversation.get("messages")) for where, conversation in chunk]
        for (where, conversation), example in zip(chunk, _encode_chunk(tokenizer, rows, policy, False)):
            yield where, replace(example, distill=conversation.get("distill", False))


def _encode_chunk(tokenizer: Tokenizer, rows, policy: ChatPolicy, for_generation: bool) -> list[Example]:
    template = tokenizer.template(policy.chat_template, policy.date_string)
    layouts = [_lay_out(template, messages, policy, for_generation, where) for where, messages in rows]
    encoded = tokenizer.encode_offsets([layout.text for layout in layouts])
    return [_example(tokenizer, template, *pair, policy) for pair in zip(layouts, encoded)]


def _lay_out(template: ChatTemplate, messages: Any, policy: ChatPolicy, for_generation: bool, where: str) -> _Layout:
    given = validate({"messages": messages}, where, for_generation)
    arranged, parts = _arrange(given, template, policy, where)
    text, ranges = template.locate(arranged, parts, for_generation, where)
    contents = sorted(r for several in ranges for r in several)
    system, targets = [], []
    for part, several in zip(parts, ranges):
        if part.role == "system":
            system += several
        elif part.role == "assistant" and not for_generation:
            targets += [(start, _turn_end(template, text, end)) for start, end in several]
    caller = any(message["role"] == "system" for message in given)
    origin = "caller" if caller else "template" if template.adds_system_text else "none"
    return _Layout(text, contents, system, targets, origin, where)


def _turn_end(template: ChatTemplate, text: str, end: int) -> int:
    """Where the end-of-turn token ends that closes a reply whose content ends at `end`; blanks may stand between."""
    token = template.end_of_turn
    if token is None:
        return end
    at = text.find(token, end)
    return at + len(token) if at >= 0 and not text[end:at].strip() else end


def _arrange(
    messages: list[Message], template: ChatTemplate, policy: ChatPolicy, where: str
) -> tuple[list[Message], list[Part]]:
    """The messages as the template gets them, system texts merged where need be, and the parts to find in its rendering."""
    misplaced = [i for i, message in enumerate(messages) if message["role"] == "system" and i > 0]
    leads = messages[0]["role"] == "system"
    if not misplaced and (not leads or template.system_role):
        return messages, parts_of(messages)
    if policy.system_role == "error":
        fault = (
            f"messages[{misplaced[0]}] is a {'second ' if leads else ''}system message that is not the first message"
            if misplaced
            else f"the chat template of {template.name} has no system role"
        )
        raise UserError(f'{where}: {fault}; move it, or merge it into the user turn with system_role "merge"')
    out: list[Message] = []
    parts: list[Part] = []
    pending: list[str] = []
    for i, message in enumerate(messages):
        if message["role"] == "system":
            pending += [message["content"].strip()] if message["content"].strip() else []
            follows = messages[i + 1]["role"] if i + 1 < len(messages) else None
            if not out and template.system_role and follows != "system" and pending:
                _join(out, parts, "system", pending, "")
                pending = []
        elif message["role"] == "user":
            _join(out, parts, "user", pending, message["content"])
            pending = []
        else:
            _join(out, parts, message["role"], [], message["content"])
    if pending:
        raise UserError(f"{where}: the last system message has no user turn after it to be merged into; move it")
    return out, parts


def _join(out: list[Message], parts: list[Part], role: str, system: list[str], content: str) -> None:
    """Appends a message of system texts and content, a blank line between, and its parts."""
    pieces = [(text, "system") for text in system] + ([(content, role)] if content or not system else [])
    at = 0
    for text, kind in pieces:
        start, end = core(text)
        if end > start:
            parts.append(Part(len(out), at + (0 if kind == "assistant" else start), at + end, kind))
        at += len(text) + 2
    out.append({"role": role, "content": "\n\n".join(text for text, _ in pieces)})


def _example(
    tokenizer: Tokenizer, template: ChatTemplate, layout: _Layout, encoded: tuple[np.ndarray, np.ndarray], policy: ChatPolicy
) -> Example:
    ids, offsets = encoded
    shielded = False
    if policy.special_text != "allow":
        genuine = template.gaps_special(layout.text, layout.contents)
        expected = [tokenizer.added[token] for _, token in genuine]
        if _intrudes(tokenizer, template, ids, expected):
            if policy.special_text == "error":
                raise UserError(
                    f'{layout.where}: a message holds the text of a special token; take it out or set special_text "plain"'
                )
            ids, offsets = tokenizer.encode_shielded(layout.text, [(at, at + len(token)) for at, token in genuine], template)
            shielded = True
            if _intrudes(tokenizer, template, ids, expected):
                raise UserError(
                    f"{layout.where}: a message holds the text of a special token that this tokenizer cannot keep plain; "
                    "take it out"
                )
    if tokenizer.rows is not None and len(ids) and ids.max() >= tokenizer.rows:
        raise UserError(
            f"{layout.where}: token id {ids.max()} is beyond the model's embedding of {tokenizer.rows} rows; "
            f"the tokenizer of {tokenizer.name} is another model's, use the one that belongs to it"
        )
    system, targets = _mask(offsets, layout.system), _mask(offsets, layout.targets)
    if layout.targets and (targets.all() or not targets.any()):
        raise TemplateRefusal(
            f"{layout.where}: {'every' if targets.any() else 'no'} token is a target; "
            f"the chat template of {template.name} does not fit"
        )
    return Example(ids, system, targets, layout.origin, shielded)


def _intrudes(tokenizer: Tokenizer, template: ChatTemplate, ids: np.ndarray, expected: list[int]) -> bool:
    """Whether the ids hold other special tokens than those that the template wrote."""
    return not np.array_equal(ids[np.isin(ids, tokenizer.ids_of(template))], expected)


def _mask(offsets: np.ndarray, ranges: Sequence[Range]) -> np.ndarray:
    """[T] bool, true for tokens of which some character lies in one of the ranges; tokens without characters never are."""
    inside = np.zeros(len(offsets), bool)
    for start, end in ranges:
        inside |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
    return inside & (offsets[:, 1] > offsets[:, 0])
