"""ArrayRecord files through a TFDS builder, without TensorFlow."""

import json
import subprocess
import sys

import pytest

from calyrex_jax.core.errors import UserError
from calyrex_jax.data import records

pytest.importorskip("array_record", reason="array_record has no wheel for this platform")


def conversation(number: int) -> dict:
    messages = [{"role": "system", "content": ""}] if number % 2 else []
    messages += [{"role": "user", "content": f"Größe {number}\n"}, {"role": "assistant", "content": "👩‍👧"}]
    return {"messages": messages, "distill": number % 3 == 0, "id": number}


def test_what_is_written_is_read_in_its_order(tmp_path):
    rows = [(f"f:{number}", conversation(number)) for number in range(700)]
    assert records.write_records(rows, tmp_path / "a" / "corpus") == 700
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["corpus"]  # nothing is left of the making
    found = list(records.read_records(tmp_path))  # found below the directory given
    assert [where for where, _ in found] == [where for where, _ in rows]
    for (_, given), (_, row) in zip(rows, found, strict=True):
        turns = row["messages"]
        assert list(zip(turns["role"], turns["content"])) == [(m["role"], m["content"]) for m in given["messages"]]
        assert row["distill"] is given["distill"] and set(row) == {"messages", "distill"}


def test_without_tensorflow(tmp_path):
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from calyrex_jax.data import records\n"
        "records.write_records([('f:1', {'messages': [{'role': 'user', 'content': 'x'}]})], Path(sys.argv[1]))\n"
        "assert len(list(records.read_records(sys.argv[1]))) == 1\n"
        "assert not {'tensorflow', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "corpus")], check=True)


def test_a_fault_in_the_stream_passes_through_and_leaves_nothing(tmp_path):
    def rows():
        yield "f:1", conversation(1)
        yield "f:2", conversation(2)
        raise UserError("f:3: broken")

    with pytest.raises(UserError, match=r"^f:3: broken$"):
        records.write_records(rows(), tmp_path / "corpus")
    assert list(tmp_path.iterdir()) == []
    assert records.write_records([], tmp_path / "corpus") == 0 and list(tmp_path.iterdir()) == []


def test_an_existing_directory_is_refused(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "mine").write_text("x")
    with pytest.raises(UserError, match="exists already"):
        records.write_records([("f:1", conversation(1))], tmp_path / "corpus")
    assert (tmp_path / "corpus" / "mine").read_text() == "x"


def test_what_cannot_be_read_is_told(tmp_path):
    with pytest.raises(UserError, match=r"no dataset_info.json in it; python -m calyrex_jax\.prepare"):
        list(records.read_records(tmp_path))
    for name in "ab":
        records.write_records([("f:1", conversation(1))], tmp_path / name)
    with pytest.raises(UserError, match="2 data sets below it"):
        list(records.read_records(tmp_path))
    info = tmp_path / "a" / "dataset_info.json"
    info.write_text(json.dumps(json.loads(info.read_text()) | {"fileFormat": "tfrecord"}))
    with pytest.raises(UserError, match="as array_record") as error:
        list(records.read_records(tmp_path / "a"))
    assert "\n" not in str(error.value)
