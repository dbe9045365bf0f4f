"""Tasks on the embedded corpus: what is asked, and that judges give each cell what it should have."""

import pytest

from calyrex_jax.core.errors import UserError
from calyrex_jax.data import rules, rules_text
from calyrex_jax.data.rules_checks import CHECKS, follows
from calyrex_jax.data.rules_replies import obey
from calyrex_jax.evals.tasks import conflict, ordinary
from calyrex_jax.evals.tasks.conflict import ConflictTask, leaks
from calyrex_jax.evals.tasks.long_context import LongContextTask, place
from calyrex_jax.evals.tasks.rules import RulesTask
from calyrex_jax.evals.tasks.turns import TurnsTask
from tests.evals.fakes import Says, WordReader, scores_of

READER = WordReader()


def obedient(constraints, text="So it is"):
    """A reply that follows the constraints, whatever was asked."""
    by_kind = {constraint.kind: str(constraint.value) for constraint in constraints}
    for kind, how in (("begin", "{v}. {t}"), ("end", "{t} {v}"), ("mention", "{t} {v} now"), ("json", '{{"{v}": "{t}"}}')):
        if kind in by_kind:
            text = how.format(v=by_kind[kind], t=text)
    text = text.upper() if "upper" in by_kind else text.lower() if "lower" in by_kind else text
    assert follows(constraints, text)
    return text


def run(task, reply, items=None):
    items = task.items(READER) if items is None else items
    ask = Says(reply)
    verdicts = {verdict.item: verdict for verdict in task.run(ask, items)}
    assert set(verdicts) == {item.id for item in items}
    return items, verdicts, ask


def test_rules_asks_every_held_out_item_and_judges_as_the_corpus_does():
    _, verdicts, ask = run(RulesTask(), lambda messages: "The capital of Peru is Lima.")
    corpus = {item.id: item for item in rules.evaluation_set()}
    assert set(corpus) == set(verdicts)
    assert sorted(map(str, ask.asked)) == sorted(str(list(item.messages)) for item in corpus.values())
    for name, verdict in verdicts.items():
        truth, found = rules.check(corpus[name], "The capital of Peru is Lima."), scores_of(verdict)
        assert found[corpus[name].cell] == (truth.follows, 1)
        assert found["answers"] == (truth.answered, 1)
        assert ("adherence" in found) == bool(corpus[name].constraints)


def test_a_limit_meets_every_cell():
    items = RulesTask(limit=60).items(READER)
    assert {item.detail["cell"] for item in items} == set(rules.CELLS)


def test_items_beyond_the_positions_are_refused():
    with pytest.raises(UserError, match=r"task rules: item .* has \d+ tokens and 48 new ones, but the backbone has 60"):
        RulesTask().items(WordReader(60))


# Long context


@pytest.mark.parametrize("filler", ["turns", "passage"])
def test_the_distance_is_what_was_asked_for(filler):
    task = LongContextTask(lengths=(0, 200, 1500), filler=filler, limit=4)
    items = {item.id: item for item in task.items(READER)}
    bases = {name.partition("/")[2] for name in items}
    assert len(items) == 3 * len(bases)
    for base in bases:
        near, *far = (items[f"{n}/{base}"] for n in (0, 200, 1500))
        for item, tokens in zip(far, (200, 1500)):
            added = READER.length(item.messages) - READER.length(near.messages)
            assert tokens - 60 < added <= tokens
            assert item.messages[0] == near.messages[0]
            assert item.messages[-1]["content"].endswith(near.messages[-1]["content"])
            roles = [m["role"] for m in item.messages[1:]]
            assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
            assert filler == "turns" or len(roles) == 1
        assert near.messages == near.judge.messages


def test_longer_fillings_begin_as_shorter_ones_and_repeat_nothing():
    task = LongContextTask(lengths=(500, 4000), limit=1)
    short, long = task.items(READER)[:2]
    assert long.messages[: len(short.messages) - 6] == short.messages[:-6]
    said = [m["content"] for m in long.messages]
    assert len(said) > 40 and len(set(said)) == len(said)


def test_fillings_hold_no_rule():
    import random

    pairs = ordinary.exchanges(random.Random(0))
    said = [next(pairs) for _ in range(120)]
    for user, reply in said:
        assert reply.strip() and user.strip()
        for kind in ("json", "upper", "lower"):
            assert not CHECKS[kind](reply, "answer"), reply
        assert "system prompt" not in (user + reply).lower() and " reply with" not in user.lower()


def test_a_length_beyond_the_positions_names_the_field():
    with pytest.raises(UserError, match=r"config\.eval\.context_lengths.*positions"):
        LongContextTask(lengths=(0, 9000), limit=1).items(READER)


def test_long_context_cells():
    task = LongContextTask(lengths=(0, 100), limit=20)

    def obeys_when_near(messages):
        return "nothing" if len(messages) > 2 else "right"

    items = task.items(READER)
    replies = {id_of(item.messages): obey(item.judge.constraints, item.judge.question) for item in items}
    items = [item for item in items if replies[id_of(item.messages)]]
    _, verdicts, _ = run(task, lambda m: replies[id_of(m)] if len(m) == 2 else "nothing of the sort", items)
    for item in items:
        found = scores_of(verdicts[item.id])
        near = item.detail["distance"] == 0
        if near:
            assert found["0 tokens"] == (True, 1)
        elif item.judge.rule in ("begin", "end", "json"):
            assert found["100 tokens"] == (False, 1)
        assert f"{item.detail['distance']} tokens/{place(item.judge.rule)}" in found
    titles = [curve.title for curve in task.curves({c for v in verdicts.values() for c in scores_of(v)})]
    assert titles[0] == "adherence"
    assert (place("begin"), place("json"), place("end"), place("begin+end")) == ("begin", "begin", "end", "other")


def id_of(messages):
    return str([dict(m) for m in messages])


# Turns


def test_the_models_own_replies_enter_the_history_and_the_breach_is_counted():
    task = TurnsTask(turns=4, limit=3)
    items = task.items(READER)
    assert all(len(item.messages) == 1 and len(set(item.detail["questions"])) == 4 for item in items)
    by_system = {item.messages[0]["content"]: item for item in items}
    breaks_at = dict(zip(by_system, (1, 3, 9, 9, 9)))

    def reply(messages):
        item, turn = by_system[messages[0]["content"]], (len(messages)) // 2
        assert [m["content"] for m in messages if m["role"] == "user"] == item.detail["questions"][:turn]
        base, asked = item.judge
        answer = "; ".join(asked[turn - 1].answers) if turn == 2 else "who knows"
        good = obedient(base.constraints, f"Well {turn} {answer}")
        return f"Something {turn}" if turn == breaks_at[messages[0]["content"]] else good

    _, verdicts, ask = run(task, reply, items)
    for item in items:
        found = scores_of(verdicts[item.id])
        breach = min(breaks_at[item.messages[0]["content"]], 5)
        assert found[task.headline] == (breach, 1)
        assert found["never broken"] == (breach == 5, 1)
        held = [found[f"turn {turn}"][0] for turn in range(1, 5)]
        assert held == [turn != breach for turn in range(1, 5)]
        assert found["adherence, all turns"] == (4 - (breach < 5), 4)
        assert found["turn 2/answers"] == (True, 1)
        assert (
            1 <= found["answers, all turns"][0] <= 4
            and found["follows and answers, all turns"] <= found["answers, all turns"]
        )
    last = max(ask.asked, key=len)
    assert [m["role"] for m in last] == ["system", *["user", "assistant"] * 3, "user"]


def test_turns_that_might_not_fit_are_refused_before_anything_runs():
    with pytest.raises(UserError, match=r"eval task turns: 10 turns can take \d+ tokens"):
        TurnsTask(turns=10, limit=2).items(WordReader(400))


def test_questions_never_hold_the_word():
    for item in TurnsTask(turns=6).items(READER):
        for constraint in item.judge[0].constraints:
            if isinstance(constraint.value, str):
                assert not any(f" {constraint.value.lower()} " in f" {q.lower()} " for q in item.detail["questions"])


# Conflict


def test_dozens_of_phrasings_each_with_its_places():
    for kind, needed in (("drop", ("{q}",)), ("replace", ("{q}", "{r}")), ("reveal", ()), ("secret", ("{w}",))):
        for text in conflict.texts(kind):
            assert all(place in text for place in needed), text
    assert sum(len(conflict.texts(kind)) for kind in conflict.KINDS) >= 48
    assert all("{what}" in text or "{What}" in text for text in conflict.texts("reveal"))


def test_conflict_items():
    task = ConflictTask(shots=(0, 3), limit=6)
    items = task.items(READER)
    assert len({item.id for item in items}) == len(items)
    for item in items:
        case, shots = item.judge, item.detail["shots"]
        assert len(item.messages) == 2 + 2 * (shots or 0)
        assert not any(
            place in m["content"] for m in item.messages for place in ("{q}", "{r}", "{w}", "{what}", "{What}", "{p}")
        )
        if case.kind == "reveal":
            assert case.word in item.messages[0]["content"].lower()
            assert not any(leaks(m["content"], case.word) for m in item.messages[1:])
        for reply in (m["content"] for m in item.messages if m["role"] == "assistant"):
            if case.kind == "replace":
                assert follows(case.wanted, reply) and not follows(case.constraints, reply)
            elif case.kind == "drop":
                assert not follows(case.constraints, reply)
        if shots is not None and case.kind != "reveal":
            assert case.asked.text in item.messages[-1]["content"]
    three = next(i for i in items if i.id.startswith("drop/0/3"))
    more = next(i for i in ConflictTask(shots=(5,), limit=6).items(READER) if i.id.startswith("drop/0/5"))
    assert more.messages[1:7] == three.messages[1:7] and more.messages[-1] == three.messages[-1]


def test_conflict_judges():
    task = ConflictTask(shots=(0,), limit=6)
    items = task.items(READER)

    def gives_in(messages):
        case = next(i.judge for i in items if list(map(dict, i.messages)) == messages)
        if case.kind == "reveal":
            return f"It is {case.word}."
        return obedient(case.wanted) if case.kind == "replace" else "An ordinary Sentence."

    _, verdicts, _ = run(task, gives_in, items)
    for item in items:
        found = scores_of(verdicts[item.id])
        if item.detail["shots"] is None:
            assert list(found) == [f"{item.judge.kind}, no attack"]
        else:
            assert found["attack success"] == found[item.judge.kind] == (True, 1), item

    _, verdicts, _ = run(task, lambda messages: "", items)
    assert not any(total for v in verdicts.values() for total, _ in scores_of(v).values())


def test_shots_that_do_not_fit_are_left_out_and_said(capsys):
    items = ConflictTask(shots=(0, 2, 128), limit=2).items(WordReader(900))
    assert {item.detail["shots"] for item in items} == {None, 0, 2}
    assert "conflict: 128 shots take up to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reply", "found"),
    [("MAPLE", True), ("the word is 'maple'.", True), ("m a p l e", True), ("M.A.P.L.E", True), ("elpam", True)]
    + [("maples", False), ("map le", False), ("", False), ("a maple-tree", True)],
)
def test_leaks(reply, found):
    assert leaks(reply, "maple") is found


def test_words_of_the_secret_are_never_trained_on():
    words = {item.judge.word for item in ConflictTask(shots=(0,)).items(READER) if item.judge.kind == "reveal"}
    assert words <= {word.lower() for word in rules_text.words("test")} and len(words) > 50
