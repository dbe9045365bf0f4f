"""--mode=analyze on a tiny model: report, arrays, what is kept, and what a user can get wrong."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from calyrex_jax import analyze, build, checkpoint
from calyrex_jax.analysis.findings import ARRAYS
from calyrex_jax.config import as_dict
from calyrex_jax.core.errors import UserError
from tests import tiny, tiny_runs
from tests.tiny_runs import make_config

SHORT = {"analyze__pairs": 4, "analyze__folds": 2, "analyze__permutations": 5, "analyze__distances": "0,60"}
SHORT |= {"analyze__attention_pairs": 2, "analyze__batch_size": 8}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """model/, and trained/ with a checkpoint and a report."""
    root = tmp_path_factory.mktemp("analyze")
    tiny_runs.write_model(root / "model", max_position_embeddings=2048)
    config = make_config(root / "model")
    saved = checkpoint.Checkpoints(root / "trained" / "checkpoints", keep=1, config=as_dict(config))
    moved = tiny.perturbed(build.fresh_adapters(build.open_run(config)))
    saved.save(3, moved, {"nothing": jnp.zeros(1)}, {})
    saved.close()
    (root / "trained" / "report.json").write_text('{"steps": 7, "analysis": "old"}')
    return root


def run(place, workdir, **changes):
    assert analyze.analyze(make_config(place / "model", **(SHORT | changes)), str(place / workdir)) == 0
    report = tiny_runs.report(place / workdir)
    with np.load(place / workdir / "analysis" / "arrays.npz") as arrays:
        return report, dict(arrays), (place / workdir / "report.html").read_text()


@pytest.mark.slow
def test_a_trained_cal(place, capsys):
    report, arrays, page = run(place, "trained")
    said = capsys.readouterr()
    assert "checkpoint of step 3" in said.err and "MiB for states" in said.err
    assert report["steps"] == 7, "what training wrote stays"
    found = report["analysis"]
    assert [layer["point"] for layer in found["layers"]] == ["0", "1", "1+", "2", "2+"] == arrays["points"].tolist()
    assert found["pairs"] == 4 and found["rules"] == ["begin", "end"] and found["adapter"] == "cal"
    assert set(found["arrays"]) == set(arrays) == set(ARRAYS), "every array is documented"
    first, last = found["layers"][0], found["layers"][-1]
    assert first["distance"]["answer"] == {"n": 4, "value": 0.0, "low": 0.0, "high": 0.0}
    assert last["distance"]["answer"]["value"] > 0 and first["probe"]["answer"]["value"] == 0.5
    # the figures are those of the arrays
    fall = arrays["logprob_own"] - arrays["logprob_patched"][0, 3]
    np.testing.assert_allclose(found["layers"][3]["patch"]["question"]["nats"]["value"], fall.mean(), rtol=1e-6)
    np.testing.assert_allclose(found["layers"][3]["cosine"]["answer"]["value"], arrays["cosine"][3, :, 1].mean(), rtol=1e-6)
    np.testing.assert_allclose(arrays["attention_mass"].sum(2), 1, atol=1e-4)
    assert arrays["attention_mass"].shape == (2, 4, 3, 2, 2) and set(found["attention"]) == {"1", "2", "share"}
    assert "".join(arrays["attention_tokens_0"]) in page.replace("&quot;", '"').replace("&#x27;", "'")
    assert page.count("<svg") >= 8 and "http" not in page.replace("http://www.w3.org", "")
    assert "At the positions of the answer" in said.out


def test_the_frozen_model_has_no_attention_maps(place, capsys):
    report, arrays, page = run(place, "bare", adapter__name="prompt_only", analyze__rules="upper,lower")
    assert "attention" not in report["analysis"] and report["analysis"]["adapter"] == "none"
    assert not any(name.startswith("attention") for name in arrays)
    assert arrays["points"].tolist() == ["0", "1", "2"]
    assert "Attention" not in page


def test_as_initialised_is_said_in_one_line(place, monkeypatch, capsys):
    monkeypatch.setattr(analyze, "_run", lambda *arguments: None)
    assert analyze.analyze(make_config(place / "model", **SHORT), str(place / "fresh")) == 0
    assert "no checkpoint in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"analyze__rules": "begin,shout"}, "config.analyze.rules is 'begin,shout'; expected two of begin, end"),
        ({"analyze__pairs": 3}, "config.analyze.pairs is 3; expected at least 4"),
        ({"analyze__batch_size": 5}, "config.analyze.batch_size is 5; expected an even number"),
        ({"analyze__distances": "near"}, "config.analyze.distances is 'near'; expected numbers of tokens"),
        ({"analyze__distances": "0,5000"}, "but the backbone has 2048 positions; lower the largest"),
        ({"adapter__name": "cal+lora"}, "config.adapter.name: lora changes the layers themselves"),
        ({"adapter__placement": "2"}, "does not fit the adapter of this config"),
    ],
)
def test_one_clear_line(place, changes, said):
    with pytest.raises(UserError) as caught:
        analyze.analyze(make_config(place / "model", **(SHORT | changes)), str(place / "trained"))
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert json.loads((place / "trained" / "report.json").read_text())["steps"] == 7
