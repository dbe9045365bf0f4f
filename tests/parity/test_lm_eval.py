"""lm-eval over this package against lm-eval's own hf backend on torch: the same figures for the same tiny checkpoint."""

import jax
import numpy as np
import pytest

from calyrex_jax import build
from calyrex_jax.evals.ask import ChatReader, ModelAsk
from tests import tiny, tiny_runs
from tests.tiny_runs import make_config

torch = pytest.importorskip("torch", reason="the reference is lm-eval's hf backend, which needs torch")
Instance = pytest.importorskip("lm_eval.api.instance", reason="lm-eval is not installed (pip install '.[eval]')").Instance
JaxLM = pytest.importorskip("calyrex_jax.evals.lm_eval_model").JaxLM

POSITIONS = 96


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """lm-eval's hf backend and ours on one random checkpoint; our adapter far from its first state."""
    from lm_eval.models.huggingface import HFLM

    tiny_runs.keep_compilations(tmp_path_factory.mktemp("compiled"))
    directory = tiny_runs.write_model(tmp_path_factory.mktemp("lm_eval") / "model", max_position_embeddings=POSITIONS)
    theirs = HFLM(pretrained=str(directory), device="cpu", dtype="float32", batch_size=3)
    opened = build.open_run(make_config(directory))
    adapters = tiny.perturbed(build.fresh_adapters(opened), size=0.3)
    params = {"backbone": build.load_weights(opened), "adapters": adapters}
    reader = ChatReader(opened.tokenizer, opened.policy, POSITIONS)
    yield theirs, JaxLM(ModelAsk(reader, opened.model, params, opened.stop_ids, 4, 512))
    tiny_runs.forget_compilations()


def instances(kind, arguments):
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


PAIRS = [
    ("The sky is", " blue"),
    ("The sky is ", "green"),  # the blank goes to the continuation
    ("", "Once upon a time"),
    ("Q: 1 + 1\nA:", "2"),
    ("Q: 1 + 1\nA:", "3"),
    ("Q: 1 + 1\nA:", "4"),
    ("x" * 200, "yz"),  # too long: cut on the left
    ("x" * 200, "y"),
    ("Löwe 🦁", " da"),
    ("<|im_start|>user\nHi<|im_end|>\n", "there"),
]


def test_loglikelihoods(pair):
    theirs, ours = pair
    expected = theirs.loglikelihood(instances("loglikelihood", PAIRS))
    found = ours.loglikelihood(instances("loglikelihood", PAIRS))
    np.testing.assert_allclose([x for x, _ in found], [x for x, _ in expected], atol=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_the_greedy_flag_is_true_where_it_should_be(pair):
    theirs, ours = pair
    context = "The sky is"
    tokens = theirs.tok_encode(context)
    for count in (1, 3):
        out = theirs.model.generate(torch.tensor([tokens]), max_new_tokens=count, do_sample=False, eos_token_id=None)
        best = out[0, len(tokens) :].tolist()
        request = (("", ""), tokens, best)
        worst = (("", ""), tokens, [*best[:-1], (best[-1] + 1) % 256])
        for lm in (theirs, ours):
            assert [greedy for _, greedy in lm._loglikelihood_tokens([request, worst])] == [True, False]


def test_rolling(pair):
    theirs, ours = pair
    texts = [("A short text.",), ("A text far longer than the positions. " * 9,), ("b",)]
    expected = theirs.loglikelihood_rolling(instances("loglikelihood_rolling", texts))
    found = ours.loglikelihood_rolling(instances("loglikelihood_rolling", texts))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


def test_greedy_replies_with_stop_strings(pair):
    theirs, ours = pair
    texts = ["The sky", "Q: 1\nA:", "", "Löwe", "x" * 200, "Hello there, my friend"]
    first = theirs.generate_until(instances("generate_until", [(t, {"until": [], "max_gen_toks": 12}) for t in texts if t]))
    stop = next(text[2:4] for text in first if len(text) > 6)  # something that does occur
    for until in ([], [stop], ["e", stop], "a"):
        asked = [(t, {"until": until, "max_gen_toks": 12}) for t in texts if t]
        expected = theirs.generate_until(instances("generate_until", asked))
        assert ours.generate_until(instances("generate_until", asked)) == expected
        assert until != [stop] or any(len(a) < len(b) for a, b in zip(expected, first))


def test_chat_templates_and_the_system_text(pair):
    theirs, ours = pair
    for history in (
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}, {"role": "user", "content": "So?"}],
    ):
        assert ours.apply_chat_template(history) == theirs.apply_chat_template(history)
    begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The answer is"}]
    assert ours.apply_chat_template(begun, add_generation_prompt=False) == theirs.apply_chat_template(begun, False)

    # with a system text the adapter has something to read, and only then
    system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = ours.apply_chat_template(system)
    prompt = ours._prompt(text + " and more", ours.tok_encode(text + " and more"))
    assert ours.tokenizer.decode(prompt.tokens[prompt.system]) == "Be brief."
    asked = [(text, " Yes.")]
    with_adapter = ours.loglikelihood(instances("loglikelihood", asked))[0][0]
    frozen = theirs.loglikelihood(instances("loglikelihood", asked))[0][0]
    assert abs(with_adapter - frozen) > 1e-3
    at_rest = jax.tree.map(np.zeros_like, ours.ask.params["adapters"])
    quiet = JaxLM(ModelAsk(**{**vars(ours.ask), "params": {**ours.ask.params, "adapters": at_rest}}))
    quiet.apply_chat_template(system)
    np.testing.assert_allclose(quiet.loglikelihood(instances("loglikelihood", asked))[0][0], frozen, atol=1e-4)


def test_a_raw_system_instruction_is_the_system_text_too(pair):
    _, ours = pair
    lm = JaxLM(ours.ask, system_instruction="Be brief.")
    prompt = lm._prompt("Be brief.\n\nHi", lm.tok_encode("Be brief.\n\nHi"))
    assert lm.tokenizer.decode(prompt.tokens[prompt.system]) == "Be brief."
    assert not lm._prompt("Hi. Be brief.", lm.tok_encode("Hi. Be brief.")).system.any()
