"""score and generate from files to files: what the lines hold, and that nothing half-written is ever left."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calyrex_jax import build, checkpoint, infer
from calyrex_jax.config import as_dict
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.types import Batch
from calyrex_jax.data import chat
from tests import tiny, tiny_runs
from tests.tiny_runs import conversation, make_config

CHATS = [
    conversation("Who?", "Nobody.", "Be brief", id=7, tags=["a", {"b": None}]),
    conversation("Wo ist der Löwe? 🦁", "Da. 你好"),
    conversation("One " * 30, "Two", "Answer in capitals", note="kept"),
    conversation("Again?", "Yes", "Be brief"),
]
PROMPTS = [row | {"messages": row["messages"][:-1]} for row in CHATS]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """model/, chats.jsonl, prompts.jsonl, and trained/: a checkpoint of an adapter far from its first state."""
    tiny_runs.keep_compilations(tmp_path_factory.mktemp("compiled"))
    root = tmp_path_factory.mktemp("infer")
    tiny_runs.write_model(root / "model")
    tiny_runs.write_jsonl(root / "chats.jsonl", CHATS)
    tiny_runs.write_jsonl(root / "prompts.jsonl", PROMPTS)
    config = make_config(root / "model")
    moved = tiny.perturbed(build.fresh_adapters(build.open_run(config)), size=0.2)
    saved = checkpoint.Checkpoints(root / "trained" / "checkpoints", keep=1, config=as_dict(config))
    saved.save(3, moved, {"nothing": jnp.zeros(1)}, {})
    saved.close()
    yield root
    tiny_runs.forget_compilations()


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(place, mode, target, workdir="trained", source=None, **changes):
    source = source or place / ("chats.jsonl" if mode == "score" else "prompts.jsonl")
    config = make_config(place / "model", **changes)
    assert infer.run(config, str(place / workdir), mode, str(source), str(target)) == 0
    return lines(target)


def logits_of(place, tokens, system, adapted=True):
    """[T, V] of one conversation, computed in one piece without padding."""
    opened = build.open_run(make_config(place / "model"))
    adapters = build.trained_adapters(opened, place / ("trained" if adapted else "untrained"))
    one = np.ones((1, len(tokens)), np.int32)
    where = np.flatnonzero(system)[None].astype(np.int32)
    positions = np.arange(len(tokens), dtype=np.int32)[None]
    flags = np.asarray(system, bool)[None]
    batch = Batch(np.array([tokens], np.int32), positions, one, flags, flags, where)
    return np.asarray(opened.model.logits({"backbone": build.load_weights(opened), "adapters": adapters}, batch))[0]


@pytest.mark.parametrize("workdir", ["trained", "untrained"])
def test_scores_equal_the_logits_of_the_checkpoint(place, tmp_path, capsys, workdir):
    found = run(place, "score", tmp_path / "out.jsonl", workdir)
    said = capsys.readouterr().err
    assert ("checkpoint of step 3" in said) == (workdir == "trained")
    assert ("no checkpoint" in said and "as initialised" in said) == (workdir == "untrained")
    assert len(found) == len(CHATS)
    opened = build.open_run(make_config(place / "model"))
    for row, line in zip(CHATS, found):
        assert list(line) == ["tokens", "logprobs", "system_mask", "target_mask"]
        example = chat.encode(opened.tokenizer, row["messages"])
        assert line["tokens"] == example.tokens.tolist()
        assert line["system_mask"] == example.system.astype(int).tolist()
        assert line["target_mask"] == example.targets.astype(int).tolist()
        assert line["logprobs"][0] is None
        logits = logits_of(place, line["tokens"], line["system_mask"], workdir == "trained")
        expected = jax.nn.log_softmax(logits[:-1])[np.arange(len(logits) - 1), line["tokens"][1:]]
        np.testing.assert_allclose(line["logprobs"][1:], expected, atol=1e-4)


def test_masks_cover_the_texts_they_stand_for(place, tmp_path):
    tokenizer = build.open_run(make_config(place / "model")).tokenizer
    for row, line in zip(CHATS, run(place, "score", tmp_path / "out.jsonl")):
        tokens = np.array(line["tokens"])
        system = next((m["content"] for m in row["messages"] if m["role"] == "system"), "")
        assert tokenizer.decode(tokens[np.array(line["system_mask"], bool)]) == system
        told = tokenizer.decode(tokens[np.array(line["target_mask"], bool)], skip_special=False)
        assert told == row["messages"][-1]["content"] + "<|im_end|>"


def test_prompt_only_is_the_backbone(place, tmp_path):
    bare = run(place, "score", tmp_path / "bare.jsonl", "bare", adapter__name="prompt_only")
    fresh = run(place, "score", tmp_path / "fresh.jsonl", "untrained")
    assert bare == fresh
    adapted = run(place, "score", tmp_path / "adapted.jsonl")
    assert adapted[0]["logprobs"] != bare[0]["logprobs"]
    assert adapted[1]["logprobs"] == bare[1]["logprobs"]  # no system text: the block is the identity


def test_generate_adds_its_fields_and_keeps_all_others(place, tmp_path):
    found = run(place, "generate", tmp_path / "out.jsonl")
    tokenizer = build.open_run(make_config(place / "model")).tokenizer
    for row, line in zip(PROMPTS, found, strict=True):
        assert {name: line[name] for name in row} == row
        assert set(line) - set(row) == {"completion", "tokens", "finish_reason"}
        if line["finish_reason"] == "length":
            assert len(line["tokens"]) == 6
            assert line["completion"] == tokenizer.decode(line["tokens"])
        else:
            assert line["finish_reason"] == "stop" and 1 <= len(line["tokens"]) <= 6
            assert line["tokens"][-1] in tokenizer.stop_ids
            assert line["completion"] == tokenizer.decode(line["tokens"][:-1])
    text = (tmp_path / "out.jsonl").read_text(encoding="utf-8")
    assert "Löwe? 🦁" in text  # not escaped


def test_greedy_tokens_are_the_largest_logits(place, tmp_path):
    opened = build.open_run(make_config(place / "model"))
    for row, line in zip(PROMPTS, run(place, "generate", tmp_path / "out.jsonl")):
        example = chat.encode(opened.tokenizer, row["messages"], for_generation=True)
        whole = [*example.tokens.tolist(), *line["tokens"]]
        system = [*example.system.tolist(), *[False] * len(line["tokens"])]
        logits = logits_of(place, whole, system)[len(example.tokens) - 1 : -1]
        chosen = np.take_along_axis(logits, np.array(line["tokens"])[:, None], 1)[:, 0]
        assert (chosen >= logits.max(-1) - 1e-3 * np.abs(logits).max()).all()


def test_every_stop_id_ends_a_reply(tmp_path):
    def favour(tree):  # the stop id's row of the head in the direction of every state
        tree["final_norm"]["scale"] = jnp.zeros_like(tree["final_norm"]["scale"]).at[0].set(1.0)
        tree["embed"]["tokens"] = tree["embed"]["tokens"].at[:, 0].set(0.0).at[stop, 0].set(50.0).at[:256, 0].set(0.1)
        return tree

    for stop in (256, 258):
        model = tiny_runs.write_model(tmp_path / f"model{stop}", change=favour)
        prompts = tiny_runs.write_jsonl(tmp_path / "prompts.jsonl", PROMPTS[:1])
        target = tmp_path / "out.jsonl"
        config = make_config(model, adapter__name="prompt_only", generate__max_new_tokens=20)
        assert infer.run(config, str(tmp_path / "run"), "generate", str(prompts), str(target)) == 0
        (line,) = lines(target)
        assert (line["finish_reason"], line["tokens"], line["completion"]) == ("stop", [stop], "")


def test_a_reply_does_not_depend_on_its_batch(place, tmp_path):
    sampled = {"generate__temperature": 0.8, "generate__top_k": 40, "generate__top_p": 0.95}
    one = run(place, "generate", tmp_path / "1.jsonl", **sampled, generate__batch_size=1)
    three = run(place, "generate", tmp_path / "3.jsonl", **sampled, generate__batch_size=3)
    assert one == three
    other = run(place, "generate", tmp_path / "s.jsonl", **sampled, generate__seed=1)
    assert [x["tokens"] for x in other] != [x["tokens"] for x in one]
    assert run(place, "generate", tmp_path / "again.jsonl", **sampled, generate__seed=1) == other


def test_the_resolved_config_is_kept(place, tmp_path):
    run(place, "score", tmp_path / "out.jsonl", "kept")
    assert json.loads((place / "kept" / "config.json").read_text()) == as_dict(make_config(place / "model"))


# What a user can get wrong


def refused(place, mode, source, target, workdir="trained", **changes):
    before = {path: path.read_bytes() for path in target.parent.iterdir() if path.is_file()}
    with pytest.raises(UserError) as caught:
        infer.run(make_config(place / "model", **changes), str(place / workdir), mode, str(source), str(target))
    assert {path: path.read_bytes() for path in target.parent.iterdir() if path.is_file()} == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


BAD_LINES = {
    "malformed": ('{"messages": [', "bad.jsonl:2: malformed JSON"),
    "not an object": ("[1, 2]", "bad.jsonl:2: list, expected an object"),
    "no messages": ('{"text": "a"}', "bad.jsonl:2:"),
    "empty messages": ('{"messages": []}', "bad.jsonl:2:"),
    "null content": ('{"messages": [{"role": "user", "content": null}]}', "null content"),
    "unknown role": ('{"messages": [{"role": "bot", "content": "a"}]}', "role 'bot'"),
    "two users": (json.dumps({"messages": [{"role": "user", "content": "a"}] * 2}), "messages[1]"),
    "bare NaN": ('{"messages": [{"role": "user", "content": "a"}], "x": NaN}', "bad.jsonl:2: NaN is not JSON"),
}


@pytest.mark.parametrize("mode", ["score", "generate"])
@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named_before_anything_is_written(place, tmp_path, mode, name):
    text, said = BAD_LINES[name]
    source = tmp_path / "bad.jsonl"
    source.write_text(json.dumps(PROMPTS[0]) + "\n" + text + "\n")
    (tmp_path / "out.jsonl").write_text("from before")
    assert said in refused(place, mode, source, tmp_path / "out.jsonl", "fresh")
    assert list((place / "fresh").iterdir()) == []


def test_a_reply_at_the_end_is_generated_anew(place, tmp_path, capsys):
    found = run(place, "generate", tmp_path / "out.jsonl", source=place / "chats.jsonl")
    assert "4 conversations end with a reply; another is generated in its place" in capsys.readouterr().err
    expected = run(place, "generate", tmp_path / "prompts.jsonl")
    assert [line["tokens"] for line in found] == [line["tokens"] for line in expected]
    assert [line["messages"] for line in found] == [row["messages"] for row in CHATS]


@pytest.mark.parametrize("mode", ["score", "generate"])
def test_a_conversation_beyond_the_positions(place, tmp_path, mode):
    rows = [PROMPTS[0], conversation("x" * (tiny_runs.POSITIONS + 1))]
    source = tiny_runs.write_jsonl(tmp_path / "long.jsonl", rows)
    said = refused(place, mode, source, tmp_path / "out.jsonl")
    assert "long.jsonl:2" in said and "512 positions" in said


def test_data_max_length_does_not_limit_generation(place, tmp_path):
    assert len(run(place, "generate", tmp_path / "out.jsonl", data__max_length=5)) == len(PROMPTS)


def test_files_that_cannot_be_used(place, tmp_path):
    prompts, target = place / "prompts.jsonl", tmp_path / "out.jsonl"
    assert "--input is missing" in refused(place, "score", "", target)
    with pytest.raises(UserError, match="--output is missing"):
        infer.run(make_config(place / "model"), str(place / "trained"), "score", str(prompts), "")
    assert "absent.jsonl: cannot be read" in refused(place, "score", tmp_path / "absent.jsonl", target)
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "empty, at least one line" in refused(place, "score", tmp_path / "empty.jsonl", target)
    (tmp_path / "folder").mkdir()
    assert "cannot be written" in refused(place, "score", prompts, tmp_path / "folder")
    with pytest.raises(UserError, match="cannot be written"):
        infer.run(make_config(place / "model"), str(place / "trained"), "score", str(prompts), str(tmp_path / "no/out"))


def test_a_full_disk_leaves_no_output(place, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(infer.os, "replace", full)
    with pytest.raises(UserError, match=r"--output=.*No space left on device"):
        infer.write_lines(tmp_path / "out.jsonl", [{"a": 1}])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"adapter__placement": "2"}, "does not fit the adapter of this config"),
        ({"adapter__placement": "0,1,2"}, "config.adapter.placement was '1,2' and is '0,1,2'"),
        ({"cal__rope": True}, "config.cal.rope was False and is True"),
        ({"cal__mlp_dim": 8}, "config.cal.mlp_dim was 16 and is 8"),
        ({"generate__temperature": -1.0}, "temperature"),
        ({"generate__top_p": 0.0}, "top_p"),
        ({"generate__batch_size": 0}, "config.generate.batch_size is 0"),
    ],
)
def test_a_config_that_does_not_fit(place, tmp_path, changes, said):
    assert said in refused(place, "generate", place / "prompts.jsonl", tmp_path / "out.jsonl", **changes)


def test_an_adapter_of_another_backbone(place, tmp_path):
    other = tiny_runs.write_model(tmp_path / "other_model", seed=1)
    with pytest.raises(UserError, match=r"config\.backbone\.source was '.*model' and is '.*other_model'"):
        infer.run(
            make_config(other), str(place / "trained"), "score", str(place / "chats.jsonl"), str(tmp_path / "out.jsonl")
        )


def test_score_with_an_adapter_brought_from_elsewhere(place, tmp_path, capsys):
    brought = run(place, "score", tmp_path / "a.jsonl", "elsewhere", adapter__init_from=f"cal={place / 'trained'}")
    assert brought == run(place, "score", tmp_path / "b.jsonl")
