"""The command that prepares a corpus: what it keeps, drops and tells; and a run that trains on it."""

import json

import pytest

from calyrex_jax import prepare, train
from tests import tiny_runs

pytest.importorskip("array_record", reason="array_record has no wheel for this platform")


def run(*args) -> int:
    return prepare.main([str(arg) for arg in args])


def test_kept_dropped_and_why(tmp_path, capsys):
    rows = [tiny_runs.conversation(f"q{i}", f"a{i}", "Shout.") for i in range(5)]
    rows += [tiny_runs.conversation("no reply"), {"text": "x"}, tiny_runs.conversation("q", " ")]
    chats = tiny_runs.write_jsonl(tmp_path / "chats.jsonl", rows)
    assert run(f"--source={chats}", f"--output={tmp_path / 'out'}") == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["read"], report["kept"]) == (8, 5)
    assert report["dropped"] == {"without a reply to learn": 2, 'without "messages" or "conversations"': 1}
    assert report["places"]["without a reply to learn"] == [f"{chats}:6", f"{chats}:8"]
    said = capsys.readouterr()
    assert said.out.startswith("kept 5 of 8 conversations; dropped 2 without a reply to learn (")
    assert f"--config.data.source=tfds:{tmp_path / 'out'}" in said.out and said.err == ""


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("foo:bar", "--source: 'foo:bar' is no source"),
        ("{0}/absent.jsonl", "absent.jsonl: cannot be read"),
        ("{0}/broken.jsonl", "broken.jsonl:1: malformed JSON"),
        ("{0}/silent.jsonl", "kept 0 of 1 conversations; dropped 1 without a reply to learn"),
        ("{0}/silent.jsonl*2", "weights cannot be prepared"),
        ("rules", "config.data.size is 0"),
        ("tfds:{0}", "no dataset_info.json in it"),
        ("hf:{0}/none", "cannot be fetched|is not understood"),
        ("hf:{0}/broken.parquet", "not readable as Parquet"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(source, fault, tmp_path, capsys):
    (tmp_path / "broken.jsonl").write_text("{")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and nothing else PAR1")
    tiny_runs.write_jsonl(tmp_path / "silent.jsonl", [tiny_runs.conversation("q")])
    if "parquet" in source:
        pytest.importorskip("pyarrow", reason="the extra parquet")
    before = sorted(tmp_path.iterdir())
    assert run(f"--source={source.format(tmp_path)}", f"--output={tmp_path / 'out'}") == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")
    assert any(part in lines[0] for part in fault.split("|")), lines[0]
    assert sorted(tmp_path.iterdir()) == before


def test_command_line_mistakes(tmp_path, capsys):
    assert run("--source=x.jsonl") == 2
    assert run("--source=x.jsonl", f"--output={tmp_path}", "--more=1") == 2
    (tmp_path / "mine").write_text("x")
    tiny_runs.write_jsonl(tmp_path / "x.jsonl", [tiny_runs.conversation("q", "a")])
    assert run(f"--source={tmp_path / 'x.jsonl'}", f"--output={tmp_path}") == 2
    said = capsys.readouterr().err
    assert said.count("error: ") == 3 and "exists already; choose another --output" in said


@pytest.mark.slow
def test_a_run_on_a_prepared_corpus_equals_one_on_its_json_lines(tmp_path, own_signals, capsys):
    tiny_runs.furnish(tmp_path)
    assert run(f"--source={tmp_path / 'chats.jsonl'}", f"--output={tmp_path / 'corpus'}") == 0
    runs = {}
    for name, source in (("jsonl", tmp_path / "chats.jsonl"), ("tfds", f"tfds:{tmp_path / 'corpus'}")):
        runs[name] = tmp_path / name
        config = tiny_runs.make_config(tmp_path / "model", source, train__steps=3, data__packing=True)
        assert train.train(config, str(runs[name])) == 0
    losses = [[line["loss"] for line in tiny_runs.metrics(directory)] for directory in runs.values()]
    assert losses[0] == losses[1] and len(losses[0]) == 3
    assert "corpus: kept 13 of 13 conversations" in capsys.readouterr().err
