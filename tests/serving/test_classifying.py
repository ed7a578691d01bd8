"""What a score head says of prompts, alone, in chunks, and beside others; and of pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxport import PoolingParams
from onnxport.errors import CapacityError, RequestError
from onnxport.graphs.embedding_spec import EmbeddingSpec
from onnxport.serving.classifying import (
    Classifier,
    ClassPooler,
    check_scores,
    ranked,
    similarity,
)
from onnxport.serving.llm import LLM
from onnxport.serving.outputs import RankedDocument
from onnxport.serving.pairs import PairEncoder, fitted
from onnxport.serving.pooling import Embedder, Rows
from onnxport.serving.prompts import TokensPrompt
from onnxport.serving.scoring import (
    OF_DOCUMENTS,
    OF_QUERIES,
    PairParams,
    PairPlanner,
    StoppedError,
)
from onnxport.serving.tokenizer import Tokenizer
from tests.http.scripted import write_tokenizer
from tests.serving.classifying import ONE, PAIRS, TEMPLATE, THREE, WEIGHT, classify, judged
from tests.serving.helpers import null_engine, run, submit, tokens
from tests.serving.pooling import LAST, embed, vector

PROMPTS = [[5], [1, 2, 3], list(range(40)), list(range(3, 30))]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.from_folder(folder, frozenset())


def test_what_becomes_of_a_state() -> None:
    state = np.arange(8, dtype=np.float32)
    logits = WEIGHT @ np.arange(8.0)
    three = THREE.judge(state, activated=True)
    parts = np.exp(logits - logits.max())
    np.testing.assert_array_equal(three, (parts / parts.sum()).astype(np.float32))
    np.testing.assert_array_equal(THREE.judge(state, activated=False), logits.astype(np.float32))
    [one] = ONE.judge(state, activated=True)
    assert one == pytest.approx(1 / (1 + np.exp(-logits[0])), rel=1e-6)
    plain = Classifier(("score",), "none", WEIGHT[:1])
    np.testing.assert_array_equal(plain.judge(state, activated=True), logits[:1].astype(np.float32))


def test_large_logits_do_not_overflow() -> None:
    weight = np.array([[1e4], [-1e4]])
    state = np.ones(1, np.float32)
    sigmoids = Classifier(("a", "b"), "sigmoid", weight).judge(state, activated=True)
    np.testing.assert_array_equal(sigmoids, [1, 0])
    shares = Classifier(("a", "b"), "softmax", weight).judge(state, activated=True)
    np.testing.assert_array_equal(shares, [1, 0])


def test_what_is_not_finite_has_no_labels() -> None:
    for value, weight in ((np.nan, WEIGHT), (np.inf, WEIGHT), (3e38, WEIGHT * 1e9)):
        pooler = ClassPooler(Classifier(THREE.labels, "none", weight), 1, activated=True)
        pooler.read(0, np.full((1, 8), value, np.float32))
        assert pooler.vector() is None


def test_prompts_have_the_same_labels_beside_others() -> None:
    """In chunks, from the cache, with texts and vectors in the batch."""
    alone = null_engine()
    texts = []
    for number, prompt in enumerate(PROMPTS):
        submit(alone, str(number), prompt)
        texts.append(tokens(run(alone)[str(number)]))
    engine = null_engine(classifier=THREE, embedder=LAST, max_num_batched_tokens=8, max_num_seqs=8)
    for _ in range(2):
        for number, prompt in enumerate(PROMPTS[:3]):
            classify(engine, f"class-{number}", prompt)
            embed(engine, f"vector-{number}", prompt)
            submit(engine, f"text-{number}", prompt)
        deltas = run(engine)
        for number, prompt in enumerate(PROMPTS[:3]):
            [delta] = deltas[f"class-{number}"]
            np.testing.assert_array_equal(delta.embedding, judged(prompt, THREE))
            assert (delta.finish_reason, delta.token_ids) == ("stop", ())
            np.testing.assert_array_equal(deltas[f"vector-{number}"][0].embedding, vector(prompt))
            assert tokens(deltas[f"text-{number}"]) == texts[number]
        engine.check()
    assert deltas["class-2"][0].num_cached_tokens


def test_a_prompt_that_yields_is_judged_all_the_same() -> None:
    engine = null_engine(
        classifier=ONE,
        num_blocks=14,
        max_num_batched_tokens=8,
        max_num_seqs=4,
        scheduling_policy="priority",
    )
    classify(engine, "low", PROMPTS[2], priority=1)
    for _ in range(3):
        engine.step()
    for number in range(3):
        submit(engine, f"high-{number}", PROMPTS[1])
    deltas = run(engine)
    assert engine.stats().num_preemptions
    np.testing.assert_array_equal(deltas["low"][0].embedding, judged(PROMPTS[2], ONE))


def test_what_cannot_be_classified_is_refused() -> None:
    engine = null_engine(embedder=LAST)
    with pytest.raises(RequestError, match="has no score head"):
        engine.prepare_classification("a", [5])
    engine = null_engine(classifier=THREE)
    with pytest.raises(RequestError, match="makes no embeddings"):
        engine.prepare_embedding("a", [5])
    with pytest.raises(CapacityError, match="prompt tokens"):
        engine.prepare_classification("a", [5] * 600)
    only = Classifier(("a", "b"), "softmax", WEIGHT[:2], generates=False)
    with pytest.raises(RequestError, match="judges texts and generates none"):
        submit(null_engine(classifier=only), "a", [5])


@pytest.mark.parametrize(
    ("kind", "score"),
    [("cosine", 11 / np.sqrt(125)), ("dot", 11), ("euclidean", -np.sqrt(8)), ("manhattan", -4)],
)
def test_how_near_vectors_are(kind: str, score: float) -> None:
    first, second = np.array([1, 2], np.float32), np.array([3, 4], np.float32)
    assert similarity(kind, first, second) == pytest.approx(score)


def test_a_vector_of_zeros_is_near_to_nothing() -> None:
    assert similarity("cosine", np.zeros(2, np.float32), np.ones(2, np.float32)) == 0


def test_the_best_come_first() -> None:
    assert ranked([0.1, 0.5, 0.5, 0.9], None) == [3, 1, 2, 0]
    assert ranked([0.1, 0.5, 0.5, 0.9], 2) == [3, 1]
    assert ranked([], 3) == []


def test_several_labels_rank_nothing() -> None:
    assert check_scores(ONE) is ONE
    with pytest.raises(RequestError, match="3 labels, and pairs are compared by one score"):
        check_scores(THREE)
    with pytest.raises(RequestError, match="compares no texts"):
        check_scores(None)


def test_a_pair_is_written_or_joined(tokenizer: Tokenizer) -> None:
    written = PairEncoder(tokenizer, TEMPLATE, 100)
    assert written.encode("ab", "cd") == tokenizer.encode("ab? cd.", add_special_tokens=False)
    whole = tokenizer.encode("[find]ab? cd.", add_special_tokens=False)
    assert written.encode("ab", "cd", "find") == whole
    joined = PairEncoder(tokenizer, None, 100)
    assert joined.encode("ab", "cd") == tokenizer.encode_pair("ab", "cd")
    with pytest.raises(RequestError, match="no score template"):
        joined.check("find")
    for text in ("a" * 5000, "\ud800"):
        with pytest.raises((CapacityError, RequestError), match=r"characters|half"):
            written.encode("ab", text)


def test_a_tokenizer_joins_pairs_in_its_own_way(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers.processors import TemplateProcessing

    write_tokenizer(tmp_path)
    fast = FastTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ends = fast.token_to_id("<|im_end|>")
    fast.post_processor = TemplateProcessing(
        single="$A <|im_end|>",
        pair="$A <|im_end|> $B <|im_end|>",
        special_tokens=[("<|im_end|>", ends)],
    )
    tokenizer = Tokenizer(fast)
    first, second = (tokenizer.encode(text, add_special_tokens=False) for text in ("ab", "cd"))
    assert tokenizer.encode_pair("ab", "cd") == [*first, ends, *second, ends]
    for pair in (("\ud800", "a"), ("a", "\ud800")):
        with pytest.raises(RequestError, match="half"):
            tokenizer.encode_pair(*pair)


def test_special_tokens_of_a_cut_text_stay(tmp_path: Path) -> None:
    """Of which the last one's state is the vector of many models."""
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers.processors import TemplateProcessing

    write_tokenizer(tmp_path)
    fast = FastTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ends = fast.token_to_id("<|im_end|>")
    fast.post_processor = TemplateProcessing(
        single="<|im_end|> $A <|im_end|>", special_tokens=[("<|im_end|>", ends)]
    )
    tokenizer = Tokenizer(fast)
    engine = null_engine(embedder=PROMPTED, tokenizer=tokenizer)
    for name, side, left in (
        ("query", "left", "q:gj"),
        ("query", "right", "q:ab"),
        ("", "left", "efgj"),
        ("", "right", "abcd"),
    ):
        params = PoolingParams(
            prompt_name=name,
            truncate_prompt_tokens=-1,
            truncation_side=side,  # type: ignore[arg-type]
        )
        embed(engine, "one", "abcdefgj", params)
        found = run(engine)["one"][0].embedding
        np.testing.assert_array_equal(found, vector(tokenizer.encode(left)))


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_the_end_of_a_document_is_left_out(template: Any, tokenizer: Tokenizer) -> None:
    encoder = PairEncoder(tokenizer, template, 100)
    assert len(tokenizer.encode("abcdef", add_special_tokens=False)) == 6
    whole = encoder.encode("why", "abcdef")
    for most, document in ((len(whole), "abcdef"), (len(whole) - 2, "abcd"), (len(whole) - 6, "")):
        found = encoder.encode("why", "abcdef", most_tokens=most)
        assert found == encoder.encode("why", document)
        assert len(found) == most
    assert encoder.encode("why", "abcdef", most_of_document=3) == encoder.encode("why", "abc")
    assert encoder.encode("why", "abcdef", most_of_document=9) == whole
    both = encoder.encode("why", "abcdef", most_tokens=len(whole) - 5, most_of_document=3)
    assert both == encoder.encode("why", "a")
    with pytest.raises(CapacityError, match="without anything of the document"):
        encoder.encode("why", "abcdef", most_tokens=len(whole) - 7)


def test_no_part_of_a_character_is_left(tokenizer: Tokenizer) -> None:
    """Where a cut is in a character, all of it goes."""
    ids = tokenizer.encode("aé", add_special_tokens=False)
    assert len(ids) == 3
    encoder = PairEncoder(tokenizer, TEMPLATE, 100)
    assert encoder.encode("b", "aé", most_of_document=2) == encoder.encode("b", "a")
    # What a document spells out stays.
    cut = encoder.encode("b", "<|say|>abc", most_of_document=2)
    assert cut == encoder.encode("b", "<|say|>a")


def test_tokens_that_stay_together_are_cut_again(tokenizer: Tokenizer) -> None:
    """A text that becomes longer by what is put around it is cut until it fits."""
    calls = []

    def write(text: str) -> list[int]:
        calls.append(text)
        return [0] * (2 * len(text))

    assert len(fitted(tokenizer, "abcdefgh", write, 10, None)) <= 10
    assert calls[-1] == "ab"
    assert len(calls) == 2


PROMPTED = Embedder.of(
    EmbeddingSpec(
        prompts={"query": "q:", "passage": "p:", "other": "o:"},
        default_prompt="other",
        similarity="dot",
        max_tokens=6,
    )
)


def test_one_score_goes_before_vectors(tokenizer: Tokenizer) -> None:
    pairs = [("a", "b"), ("a", "c"), ("d", "b")]
    for embedder, classifier, vectors in (
        (LAST, PAIRS, False),
        (None, PAIRS, False),
        (LAST, THREE, True),
        (LAST, None, True),
    ):
        planner = PairPlanner(tokenizer, embedder, classifier, 100)
        assert planner.compares_vectors == vectors
        assert planner.num_prompts(pairs) == (4 if vectors else 3)
        assert planner.plan(pairs, PairParams()).classifies == (not vectors)
    with pytest.raises(RequestError, match="3 labels"):
        PairPlanner(tokenizer, None, THREE, 100).plan(pairs, PairParams())


def test_texts_have_one_vector_each_behind_the_models_prompts(tokenizer: Tokenizer) -> None:
    planner = PairPlanner(tokenizer, PROMPTED, None, 100)
    pairs = [("a", "b"), ("a", "a"), ("a", "b")]
    plan = planner.plan(pairs, PairParams(sides=(OF_QUERIES, OF_DOCUMENTS)))
    assert list(map(list, plan.prompts)) == [
        tokenizer.encode(text) for text in ("q:a", "p:b", "p:a")
    ]
    vectors = [np.array(one, np.float32) for one in ([1, 0], [2, 3], [4, 5])]
    assert plan.scores(vectors) == [2, 4, 2]  # of which "dot" makes products
    plan = planner.plan(pairs[:1], PairParams())
    assert list(map(list, plan.prompts)) == [tokenizer.encode(text) for text in ("o:a", "o:b")]
    cut = planner.plan([("abcdef", "abcdefgh")], PairParams(most_tokens=100, most_of_document=2))
    assert list(map(list, cut.prompts)) == [tokenizer.encode(text) for text in ("o:abcd", "o:ab")]
    with pytest.raises(RequestError, match="have none"):
        planner.plan(pairs, PairParams(instruction="find"))
    with pytest.raises(RequestError, match="probabilities were declined"):
        planner.plan(pairs, PairParams(activated=False))
    for name in ("most_tokens", "most_of_document", "most_of_query"):
        with pytest.raises(RequestError, match=f"{name} is 0"):
            PairParams(**{name: 0})


class Counting:
    """A tokenizer that counts what it is asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.count = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.count += 1
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("models", [(None, PAIRS), (LAST, None)])
def test_no_prompt_is_made_behind_one_that_is_too_long(models: Any, tokenizer: Tokenizer) -> None:
    query = "abcdefgh" * 4
    for longest, words in ((20, "context length is 20 tokens"), (100, None)):
        counting = Counting(tokenizer)
        planner = PairPlanner(counting, *models, longest)
        pairs = [(query, str(number)) for number in range(50)]
        if words is None:
            planner.plan(pairs, PairParams())
            assert counting.count >= 50
            continue
        for params in (PairParams(), PairParams(most_of_document=3), PairParams(most_tokens=60)):
            counting.count = 0
            with pytest.raises(CapacityError, match=words):
                planner.plan(pairs, params)
            assert counting.count <= 2


def test_prompts_of_a_request_have_so_many_tokens_in_all(tokenizer: Tokenizer) -> None:
    pairs = [("ab", "cd")] * 3
    size = len(PairEncoder(tokenizer, TEMPLATE, 100).encode("ab", "cd"))
    assert len(PairPlanner(tokenizer, None, PAIRS, 100, 3 * size).plan(pairs, PairParams()).prompts)
    counting = Counting(tokenizer)
    with pytest.raises(CapacityError, match=f"first 2 prompts have {2 * size} tokens"):
        PairPlanner(counting, None, PAIRS, 100, 2 * size - 1).plan(pairs, PairParams())
    assert counting.count == 2


@pytest.mark.parametrize("models", [(None, PAIRS), (LAST, None)])
def test_no_prompt_is_made_when_nobody_waits(models: Any, tokenizer: Tokenizer) -> None:
    counting = Counting(tokenizer)
    pairs = [(str(number), "a") for number in range(9)]
    with pytest.raises(StoppedError):
        PairPlanner(counting, *models, 100).plan(pairs, PairParams(), lambda: counting.count == 3)
    assert counting.count == 3


def test_a_prompt_goes_ahead_of_a_text(tokenizer: Tokenizer) -> None:
    engine = null_engine(embedder=PROMPTED, tokenizer=tokenizer)
    for name, ahead in ((None, "o:"), ("query", "q:"), ("", "")):
        embed(engine, "one", "ab", PoolingParams(prompt_name=name))
        found = run(engine)["one"][0].embedding
        np.testing.assert_array_equal(found, vector(tokenizer.encode(f"{ahead}ab")))
    ids = tokenizer.encode("ab")
    embed(engine, "tokens", ids)
    np.testing.assert_array_equal(run(engine)["tokens"][0].embedding, vector(ids))
    with pytest.raises(RequestError, match="prompt_name is 'title', and this model has 'query', "):
        engine.prepare_embedding("a", "ab", PoolingParams(prompt_name="title"))
    with pytest.raises(RequestError, match="goes with texts"):
        engine.prepare_embedding("a", ids, PoolingParams(prompt_name="query"))
    with pytest.raises(RequestError, match="give a name"):
        PoolingParams(prompt_name=3)  # type: ignore[arg-type]
    with pytest.raises(CapacityError, match=r"embeds 6 at most \(max_seq_length\)"):
        engine.prepare_embedding("a", "abcdefgh")


def test_an_embedded_text_is_cut_behind_the_models_prompt(tokenizer: Tokenizer) -> None:
    """To six tokens, of which two are the prompt's, or to as many as are asked for."""
    engine = null_engine(embedder=PROMPTED, tokenizer=tokenizer)
    for most, side, prompt, left in (
        (-1, "left", "abcdefgh", "o:efgh"),
        (-1, "right", "abcdefgh", "o:abcd"),
        (4, "right", "abcdefgh", "o:ab"),
        (99, "left", "abcd", "o:abcd"),
    ):
        params = PoolingParams(truncate_prompt_tokens=most, truncation_side=side)  # type: ignore[arg-type]
        embed(engine, "one", prompt, params)
        found = run(engine)["one"][0].embedding
        np.testing.assert_array_equal(found, vector(tokenizer.encode(left)))
    embed(engine, "ids", list(range(9)), PoolingParams(truncate_prompt_tokens=-1))
    np.testing.assert_array_equal(run(engine)["ids"][0].embedding, vector(range(6)))
    with pytest.raises(CapacityError, match="are 2 tokens, and a prompt is to have 2 at most"):
        engine.prepare_embedding("a", "abc", PoolingParams(truncate_prompt_tokens=2))
    with pytest.raises(CapacityError, match="embeds 6 at most"):
        engine.prepare_embedding("a", "abcdefgh", PoolingParams(truncate_prompt_tokens=9))
    with pytest.raises(RequestError, match="truncate_prompt_tokens is 0"):
        PoolingParams(truncate_prompt_tokens=0)
    with pytest.raises(RequestError, match="truncation_side is 'up'; give one of left, right"):
        PoolingParams(truncation_side="up")  # type: ignore[arg-type]
    bare = null_engine(embedder=PROMPTED)
    with pytest.raises(RequestError, match="tokenizer"):
        bare.prepare_embedding("a", "abc", PoolingParams(truncate_prompt_tokens=2))
    whole = null_engine(embedder=LAST, tokenizer=tokenizer, num_blocks=256)
    embed(whole, "one", "a" * 700, PoolingParams(truncate_prompt_tokens=-1))
    assert run(whole)["one"][0].finish_reason == "stop"


def llm_of(tokenizer: Tokenizer, **models: Any) -> LLM:
    return LLM.from_engine(null_engine(tokenizer=tokenizer, **models))


def test_in_python(tokenizer: Tokenizer) -> None:
    with llm_of(tokenizer, classifier=THREE) as llm:
        ids = tokenizer.encode("ab")
        text, same, raw = (
            *llm.classify(["ab", TokensPrompt(prompt_token_ids=ids)]),
            *llm.classify("ab", use_activation=False),
        )
        assert text.outputs == same.outputs
        assert (text.prompt, same.prompt, text.prompt_token_ids) == ("ab", None, tuple(ids))
        want = judged(ids, THREE)
        assert text.outputs.probs == want.tolist()
        assert text.outputs.label == THREE.labels[int(want.argmax())]
        assert text.outputs.num_classes == 3
        assert raw.outputs.probs == judged(ids, THREE, activated=False).tolist()
        with pytest.raises(RequestError, match="3 labels"):
            llm.score("a", "b")
    with llm_of(tokenizer, classifier=PAIRS, num_blocks=256) as llm:
        documents = ["ab", "the sea", "c"]
        prompts = [f"[find]why? {one}." for one in documents]
        ids_of = [tokenizer.encode(one, add_special_tokens=False) for one in prompts]
        scores = [float(judged(ids, PAIRS)[0]) for ids in ids_of]
        found = llm.score("why", documents, instruction="find")
        assert [one.outputs.score for one in found] == scores
        assert [one.prompt_token_ids for one in found] == [tuple(ids) for ids in ids_of]
        same_number = llm.score(["why"] * 3, documents, instruction="find")
        assert [one.outputs.score for one in same_number] == scores
        order = sorted(range(3), key=lambda number: -scores[number])
        best = llm.rerank("why", documents, instruction="find", top_n=2)
        assert best == [RankedDocument(at, documents[at], scores[at]) for at in order[:2]]
        [raw] = llm.score("why", "ab", instruction="find", use_activation=False)
        assert raw.outputs.score == judged(ids_of[0], PAIRS, activated=False)[0]
        for first, second in ((["a", "b"], "c"), ("a", [])):
            with pytest.raises(RequestError, match="give one and any number"):
                llm.score(first, second)
        with pytest.raises(RequestError, match="top_n is 0"):
            llm.rerank("why", documents, top_n=0)
        with pytest.raises(RequestError, match="documents is a text; give a list of texts"):
            llm.rerank("why", "the sea")
        for texts in (["a", 3], [b"a"], [["a"]]):
            with pytest.raises(RequestError, match=r"documents has .*, which is no text"):
                llm.rerank("why", texts)  # type: ignore[arg-type]
            with pytest.raises(RequestError, match=r"text_2 has .*, which is no text"):
                llm.score("why", texts)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="query has 3, which is no text"):
            llm.rerank(3, documents)  # type: ignore[arg-type]
        for most in (0, -2, True, "3"):
            for method in (llm.score, llm.rerank):
                with pytest.raises(RequestError, match="truncate_prompt_tokens is") as caught:
                    method("why", documents, truncate_prompt_tokens=most)  # type: ignore[operator]
                assert caught.value.param == "truncate_prompt_tokens"
        assert llm.rerank("why", []) == []
        long = "a" * 700
        with pytest.raises(CapacityError, match="512"):
            llm.score("why", long)
        [cut] = llm.score("why", long, truncate_prompt_tokens=-1)
        assert len(cut.prompt_token_ids) == 512
    with llm_of(tokenizer, embedder=LAST) as llm:
        [one] = llm.score("ab", "cd")
        first, second = (vector(tokenizer.encode(text)) for text in ("ab", "cd"))
        assert one.outputs.score == similarity("cosine", first, second)
        with pytest.raises(RequestError, match="has no score head"):
            llm.classify("a")
    with llm_of(tokenizer) as llm, pytest.raises(RequestError, match="compares no texts"):
        llm.score("a", "b")
    with (
        LLM.from_engine(null_engine(classifier=ONE)) as llm,
        pytest.raises(RequestError, match="need a tokenizer"),
    ):
        llm.score("a", "b")


def test_what_fails_says_why(tokenizer: Tokenizer) -> None:
    with llm_of(tokenizer, classifier=PAIRS, fails=lambda run: True) as llm:
        [one] = llm.classify("ab")
        assert (one.outputs.probs, one.outputs.label, one.finished) == ([], None, True)
        assert one.outputs.error
        [pair] = llm.score("a", "b")
        assert np.isnan(pair.outputs.score)
        assert pair.outputs.error
        with pytest.raises(RequestError, match="could not be scored"):
            llm.rerank("a", ["b"])


@pytest.mark.parametrize("classifier", [ONE, THREE])
def test_tokens_are_judged_while_they_are_computed(classifier: Classifier) -> None:
    """Each once, as alone; nothing of a long prompt is left for its last step, or kept."""
    hidden = classifier.weight.shape[1]
    rows = np.random.default_rng(1).standard_normal((9, hidden)).astype(np.float32)
    judged: list[int] = []

    def finish(states: Any) -> Any:
        judged.append(len(states))
        return classifier.judge_each(states, activated=True)

    found = Rows(finish)
    for first, end in ((0, 4), (0, 3), (3, 7), (7, 9)):  # it has yielded behind the first 4
        found.read(first, rows[first:end])
    assert judged == [4, 3, 2]
    alone = np.stack([classifier.judge(row, activated=True) for row in rows])
    np.testing.assert_array_equal(found.found(), alone)
    pooler = ClassPooler(classifier, len(rows), activated=True, per_token=True)
    copied = rows.copy()
    pooler.read(0, copied)
    copied[:] = np.nan  # as the next step overwrites them
    np.testing.assert_array_equal(pooler.vector(), alone)
    found.read(9, copied[:1])
    assert found.found() is None
