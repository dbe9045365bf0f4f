"""A transformers sequence classifier as a scorer, against the model called by hand."""

import pytest

torch = pytest.importorskip("torch", reason="the scorer hf:DIRECTORY runs a torch model")

from tokenizers import Tokenizer, models, pre_tokenizers, processors  # noqa: E402
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast  # noqa: E402

from calyrex_jax.core.errors import UserError  # noqa: E402
from calyrex_jax.evals.scorers import is_harmful, make_scorer  # noqa: E402
from calyrex_jax.evals.tasks.api import Item  # noqa: E402

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "who", "says", "kiwi", "plum"]
TURNS = (
    {"role": "system", "content": "who"},
    {"role": "user", "content": "says who"},
    {"role": "assistant", "content": "who"},
    {"role": "user", "content": "who says"},
)


def save_classifier(directory, labels):
    torch.manual_seed(0)
    fast = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="[PAD]", unk_token="[UNK]", model_max_length=16)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    names = dict(enumerate(labels))
    config = BertConfig(
        vocab_size=8, **sizes, id2label=names, label2id={n: i for i, n in names.items()}, initializer_range=2.0
    )
    model = BertForSequenceClassification(config).eval()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return tokenizer, model


@pytest.mark.parametrize(("labels", "harmful"), [(("unsafe", "safe"), 0), (("LABEL_0", "LABEL_1"), 1), (("only",), None)])
def test_the_score_is_the_harmful_class_of_question_and_reply(tmp_path, labels, harmful):
    tokenizer, model = save_classifier(tmp_path, labels)
    scorer = make_scorer(f"hf:{tmp_path}")
    seen = set()
    for reply in ("kiwi", "plum plum", "who says kiwi", "kiwi " * 40):
        with torch.no_grad():
            logits = model(**tokenizer("who says", reply, return_tensors="pt", truncation=True)).logits[0]
        wanted = torch.sigmoid(logits)[0] if harmful is None else torch.softmax(logits, -1)[harmful]
        assert scorer.score(TURNS, reply) == pytest.approx(float(wanted), abs=1e-5)
        assert is_harmful(scorer, Item("0", TURNS), reply) == (float(wanted) >= 0.5)
        seen.add(round(float(wanted), 4))
    assert len(seen) > 1


def test_classes_that_do_not_say_which_is_harmful(tmp_path):
    save_classifier(tmp_path, ("red", "green"))
    with pytest.raises(UserError, match=r"failed on item 0 .*red, green are called harmful, unsafe or toxic"):
        is_harmful(make_scorer(f"hf:{tmp_path}"), Item("0", TURNS), "kiwi")
