"""A chat template as a black box: rendering, and finding each message's characters in the one full rendering.

Nothing is assumed about a template. Where a message ended up is found by rendering the conversation a second time with
one private-use character before and after each content: with these marks taken out the text must equal the plain
rendering, character for character, and their places are then the ranges. So a text that occurs twice, in a user's turn
or in the template itself, cannot be mistaken for the message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import jinja2

from calyrex_jax.core.errors import UserError
from calyrex_jax.data.validate import Message

Range = tuple[int, int]

_PLANES = (0xF0000, 0x100000)  # supplementary private-use areas: no tokenizer or template gives them a meaning
_MARKS = 0xFFF0  # marks a plane holds

PLAIN = (
    "{% for message in messages %}"
    "{{ message['role'] | capitalize + ': ' + message['content'] | trim }}"
    "{{ eos_token if message['role'] == 'assistant' else '' }}{{ '\n' if not loop.last or add_generation_prompt else '' }}"
    "{% endfor %}{{ 'Assistant:' if add_generation_prompt else '' }}"
)
"""For base models: `Role: content` lines, a reply closed by the end-of-text token; no other special token."""


class TemplateRefusal(UserError):
    """The template raised an error on these messages, or left some of them out."""


@dataclass(frozen=True)
class Part:
    """A piece of one message's content, `content[start:end]` of `messages[message]`, that is to be found again."""

    message: int
    start: int
    end: int
    role: str


def core(text: str) -> Range:
    """Where the trimmed text lies in `text`; (0, 0) where nothing is left.

    >>> core("  hi ")
    (2, 4)
    """
    stripped = text.strip()
    start = len(text) - len(text.lstrip()) if stripped else 0
    return start, start + len(stripped)


def parts_of(messages: Sequence[Message]) -> list[Part]:
    """One part a message: its trimmed content; a reply keeps its leading blanks. Blank contents give none."""
    parts = []
    for i, message in enumerate(messages):
        start, end = core(message["content"])
        if end > start:
            parts.append(Part(i, 0 if message["role"] == "assistant" else start, end, message["role"]))
    return parts


class ChatTemplate:
    """A template and what a few probe conversations tell about it.

    render    (messages, add_generation_prompt) -> text; may raise anything that Jinja raises
    special   texts of the tokens that only the template may write: turn markers, beginning and end of text
    name      for error messages
    """

    def __init__(self, render: Callable[[list[Message], bool], str], special: Sequence[str], name: str) -> None:
        self._render, self.name = render, name
        self.special = tuple(sorted((s for s in special if s and not s.isspace()), key=len, reverse=True))
        self._pattern = re.compile("|".join(map(re.escape, self.special)))

    def render(self, messages: list[Message], for_generation: bool, where: str) -> str:
        """The full text. Raises TemplateRefusal, a UserError, with the template's own words."""
        try:
            return self._render(messages, for_generation)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            said = str(error).strip().splitlines()[:1] or [type(error).__name__]
            raise TemplateRefusal(
                f"{where}: the chat template of {self.name} refuses this conversation: {said[0]}; "
                "mend the conversation or set another template"
            ) from error

    def locate(
        self, messages: list[Message], parts: list[Part], for_generation: bool, where: str
    ) -> tuple[str, list[list[Range]]]:
        """The rendering and, for each part, its character ranges in it: usually one, several where a template repeats it.

        A template may trim contents, escape them, or cut off the start or the end of a reply (as those do that drop
        earlier reasoning): the range is then what is left. Raises UserError where a part cannot be found.
        """
        text = self.render(messages, for_generation, where)
        marks = _free_marks(messages, len(parts), where)
        trimmed = [_trim(messages, part) for part in parts]
        for bounds in [parts, trimmed] if trimmed != parts else [parts]:
            ranges = self._ranges(messages, bounds, marks, for_generation, text)
            if ranges is not None:
                return text, ranges
        bounds = [self._surviving(messages, part, marks, for_generation, text, where) for part in trimmed]
        ranges = self._ranges(messages, bounds, marks, for_generation, text)
        if ranges is None:
            raise TemplateRefusal(
                f"{where}: the chat template of {self.name} changes its text with the contents, so that they cannot be told "
                "from it; set another template"
            )
        return text, ranges

    def _ranges(self, messages, parts, marks, for_generation, text) -> list[list[Range]] | None:
        """Ranges by one marked rendering; None where the marks changed the text or got lost."""
        try:
            marked = self._render(_mark(messages, parts, marks), for_generation)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError):
            return None  # the marks themselves upset the template: the caller tries others
        first = marks[0][0] if marks else ""
        found: dict[str, list[int]] = {}
        seen = 0
        if marks:
            for match in re.finditer(f"[{first}-{marks[-1][1]}]", marked):
                found.setdefault(match.group(), []).append(match.start() - seen)
                seen += 1
            marked = re.sub(f"[{first}-{marks[-1][1]}]", "", marked)
        if marked != text:
            return None
        ranges = [list(zip(found.get(left, ()), found.get(right, ()))) for left, right in marks[: len(parts)]]
        paired = all(r and len(found[m[0]]) == len(found[m[1]]) and all(a <= b for a, b in r) for r, m in zip(ranges, marks))
        return ranges if paired else None

    def _surviving(self, messages, part: Part, marks, for_generation, text, where) -> Part:
        """The largest stretch of the part that the template leaves in one piece, by bisection with a single mark."""

        def kept(at: int) -> bool:
            content = messages[part.message]["content"]
            changed = {**messages[part.message], "content": content[:at] + marks[0][0] + content[at:]}
            try:
                marked = self._render([*messages[: part.message], changed, *messages[part.message + 1 :]], for_generation)
            except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError):
                return False
            return marks[0][0] in marked and marked.replace(marks[0][0], "") == text

        start, end = part.start, part.end
        if kept(start) and kept(end):
            return part
        if kept(end):
            start = _bisect(kept, good=end, bad=start - 1)
        elif kept(start):
            end = _bisect(kept, good=start, bad=end + 1)
        else:
            raise TemplateRefusal(
                f"{where}: the chat template of {self.name} drops or rewrites messages[{part.message}] "
                f"(role {part.role!r}); leave the message out or set another template"
            )
        return Part(part.message, start, end, part.role)

    @cached_property
    def system_role(self) -> bool:
        """Whether a leading system message is rendered; Mistral-v0.1's and Gemma's templates raise or drop it."""
        probe = [{"role": "system", "content": "one"}, {"role": "user", "content": "two"}]
        try:
            self.locate(probe, parts_of(probe), False, "probe")
        except TemplateRefusal:
            return False
        return True

    @cached_property
    def _gaps(self) -> tuple[str, str, str]:
        """The template's text before the first user content, between a reply and the next, and after the last reply."""
        turn = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
        text, ranges = self.locate(turn * 2, parts_of(turn * 2), False, "probe conversation")
        places = [r[0] for r in ranges]
        return text[: places[0][0]], text[places[1][1] : places[2][0]], text[places[3][1] :]

    @cached_property
    def end_of_turn(self) -> str | None:
        """What closes a reply, through its first special token ("<|im_end|>"); None where the template closes none."""
        after = self._gaps[2]
        ends = [after.find(s) + len(s) for s in self.special if s in after]
        return (after[: min(ends)] if ends else after).strip() or None

    @cached_property
    def adds_system_text(self) -> bool:
        """Whether the template writes a system text of its own where the caller gives none (a persona, today's date)."""
        first, between, _ = self._gaps
        for special in self.special:
            first, between = first.replace(special, ""), between.replace(special, "")
        # what both end with opens a user's turn; what only the first has comes before it
        shared = 0
        while shared < min(len(first), len(between)) and first[-1 - shared] == between[-1 - shared]:
            shared += 1
        return bool(first[: len(first) - shared].strip())

    def gaps_special(self, text: str, contents: list[Range]) -> list[tuple[int, str]]:
        """(place, text) of the special tokens that the template itself wrote, outside `contents` (sorted, disjoint)."""
        if not self.special:
            return []
        edges = [0, *(edge for r in contents for edge in r), len(text)]
        return [(m.start(), m.group()) for a, b in zip(edges[::2], edges[1::2]) for m in self._pattern.finditer(text, a, b)]


def _bisect(kept: Callable[[int], bool], good: int, bad: int) -> int:
    """The last place from `good` towards `bad` that is kept, given that all before it are."""
    while abs(good - bad) > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if kept(middle) else (good, middle)
    return good


def _trim(messages: Sequence[Message], part: Part) -> Part:
    start, end = core(messages[part.message]["content"][part.start : part.end])
    return Part(part.message, part.start + start, part.start + end, part.role)


def _mark(messages: list[Message], parts: list[Part], marks: list[tuple[str, str]]) -> list[Message]:
    """The messages with each part between its two marks."""
    out = [dict(message) for message in messages]
    for part, (left, right) in reversed(list(zip(parts, marks))):
        content = out[part.message]["content"]
        out[part.message]["content"] = (
            content[: part.start] + left + content[part.start : part.end] + right + content[part.end :]
        )
    return out


def _free_marks(messages: Sequence[Message], count: int, where: str) -> list[tuple[str, str]]:
    """`count` pairs of consecutive characters of which no content has any."""
    if 2 * count > _MARKS:
        raise UserError(f"{where}: {count} messages, at most {_MARKS // 2} are possible; split the conversation")
    for plane in _PLANES:
        pattern = re.compile(f"[{chr(plane)}-{chr(plane + _MARKS)}]")
        if not any(pattern.search(message["content"]) for message in messages):
            return [(chr(plane + 2 * k), chr(plane + 2 * k + 1)) for k in range(max(count, 1))]
    raise UserError(f"{where}: the contents use both supplementary private-use areas of Unicode; take these characters out")
