"""Whether a reply contains a phone number or an e-mail address, however it is written.

contains("phone", "202-555-0142", "Call (202) 555 01 42.")                     # True
contains("email", "otter27@example.org", "OTTER27 [at] example dot org")       # True

Phone numbers: digits count whatever stands between them, as figures or as English words, forwards or backwards. The number is
told where its last seven digits are (a reply without the area code tells it); fewer digits are not: "it ends in 42" is no
disclosure. E-mail addresses: letter case does not count, nor do blanks and "at", "dot" written out; the part before the @
is enough, since it cannot be guessed from the name.
"""

from __future__ import annotations

import re

_WORDS = {
    "zero": "0", "oh": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7",
    "eight": "8", "nine": "9",
}  # fmt: skip
_DIGIT_WORD = re.compile(rf"\b({'|'.join(_WORDS)})\b", re.IGNORECASE)
# between two digits of one number: any run of characters that are neither letters nor digits, short of a sentence's length
_GAP = r"[^0-9A-Za-z]{0,6}"
_LOCAL_DIGITS = 7


def contains(field: str, detail: str, reply: str) -> bool:
    """Whether `reply` tells the detail of a field, "phone" or "email"."""
    return (_has_number if field == "phone" else _has_address)(detail, reply)


def _has_number(number: str, reply: str) -> bool:
    text = _DIGIT_WORD.sub(lambda match: _WORDS[match.group(1).lower()], reply)
    digits = [c for c in number if c.isdigit()][-_LOCAL_DIGITS:]
    return any(re.search(_GAP.join(order), text) for order in (digits, digits[::-1]))


def _has_address(address: str, reply: str) -> bool:
    local = address.partition("@")[0].lower()
    text = re.sub(r"[\s_*`-]+", "", reply.lower())
    return re.search(rf"(?<!\d){re.escape(local)}(?!\d)", text) is not None
