"""Turns conversations into ArrayRecord files, ready for `config.data.source=tfds:DIR`, and accounts for every row.

    python -m calyrex_jax.prepare --source=chats.jsonl --output=corpus
    python -m calyrex_jax.prepare --source=hf:OWNER/NAME --output=corpus        # Parquet needs the extra [parquet]
    python -m calyrex_jax.prepare --source="hf:downloaded/ + jsonl:own.jsonl" --output=corpus

Sources: FILE.jsonl, jsonl:FILE, tfds:DIR, hf:OWNER/NAME[@REVISION], hf:DIR (Parquet, JSON Lines, JSON, csv; files whose names
say test or validation are left out), or several joined by " + ". Turns stand in `messages` (role, content) or in
`conversations` (from, value). Rows that are no conversations, and those without a reply, are dropped and counted; a file that
cannot be read is an error. DIR must not exist; it appears once everything is in it, with the account in DIR/report.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from calyrex_jax.core.errors import Parser, UserError
from calyrex_jax.data import parts, records
from calyrex_jax.data.account import Account

_SECONDS = 10.0  # between two lines of progress


def prepare(source: str, output: Path) -> dict:
    """Writes the conversations of `source` to `output` as ArrayRecord; returns the account, as report.json has it.

    Raises UserError for a source that is unknown or cannot be read, an output that exists, and where nothing is left.
    """
    sources = parts.parse_source(source, what="--source")
    if wrong := next((part for part in sources if part.kind == "rules" or part.weight is not None), None):
        what = "weights" if wrong.weight is not None else "the embedded corpus"
        raise UserError(f"--source: {what} cannot be prepared; name them in config.data.source when training")
    records.refuse_existing(output)
    files = [parts.files_of(part) for part in sources]
    account, started = Account(), time.monotonic()
    written = records.write_records(_with_replies(_read(sources, account), account), output)
    if not written:
        raise UserError(f"--source={source}: {account.line('conversations')}; nothing is left to write; mend the data")
    report = {
        "source": source,
        "files": [str(path) for paths, _ in files for path in paths],
        "left_out": [name for _, names in files for name in names],
        "read": account.read,
        "kept": written,
        "dropped": dict(account.dropped),
        "places": account.places,
        "seconds": round(time.monotonic() - started, 1),
        "line": account.line("conversations"),
    }
    (output / "report.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return report


def _read(sources: Sequence[parts.Part], account: Account) -> Iterator[tuple[str, dict[str, Any]]]:
    """The conversations of all parts, with a line of progress now and then."""
    started = time.monotonic()
    said = started
    for part in sources:
        for row in parts.read_part(part, account, strict=False):
            yield row
            if (now := time.monotonic()) - said > _SECONDS:
                said = now
                rate = account.read / (now - started)
                print(f"{account.read:,} rows read, {rate:.0f} a second", file=sys.stderr, flush=True)


def _with_replies(rows: Iterator[tuple[str, dict[str, Any]]], account: Account) -> Iterator[tuple[str, dict[str, Any]]]:
    for where, conversation in rows:
        if any(m["role"] == "assistant" and m["content"].strip() for m in conversation["messages"]):
            yield where, conversation
        else:
            account.kept -= 1
            account.drop("without a reply to learn", where)


def main(argv: list[str]) -> int:
    """Prepares a corpus; returns the exit status."""
    parser = Parser(
        "python -m calyrex_jax.prepare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", required=True, help="what to read")
    parser.add_argument("--output", required=True, type=Path, help="directory to write; it must not exist")
    try:
        options = parser.parse_args(argv)
        report = prepare(options.source, options.output.expanduser())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    if report["left_out"]:
        print(f"left out as held-out files: {', '.join(report['left_out'])}")
    print(f"{report['line']}; {report['seconds']:.0f} s")
    print(f"train on it with --config.data.source=tfds:{options.output}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
