"""Score heads: those of models that classify, and rows of the head of one that generates."""

from __future__ import annotations

import io
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from onnxport import LLM
from onnxport.errors import (
    ArtifactError,
    CheckpointError,
    ExportError,
    OnnxportError,
    OptionError,
    RequestError,
    UnsupportedModelError,
)
from onnxport.exporter.draft_head import export_head
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.classification_spec import (
    SCORE_FILE,
    SCORE_TEMPLATE_FILE,
    ClassificationSpec,
    dump_score_head,
    read_score_head,
)
from onnxport.providers.cpu.library import find_library
from onnxport.serving.chat import ChatTemplate
from onnxport.serving.config import EngineConfig
from onnxport.serving.loading import choose_classifier
from onnxport.serving.pairs import PairTemplate
from onnxport.serving.prompts import TokensPrompt
from tests.exporter import checkpoints, ggufs
from tests.exporter.heads import Head
from tests.http.scripted import write_tokenizer

IDS = checkpoints.tokens(count=20)
THREE = {"0": "bad", "1": "fair", "2": "good"}
FP32 = ExportOptions(precision="fp32")
Edit = Callable[[Path], object]


def make(family: str, folder: Path, labels: int = 3, **config: Any) -> None:
    """Write a random model that classifies."""
    made = checkpoints.configuration(checkpoints.CASES[family])
    made.num_labels = labels
    made.pad_token_id = 0
    torch.manual_seed(7)
    model = AutoModelForSequenceClassification.from_config(made).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn_like(value) * 0.3)
    model.save_pretrained(folder)
    checkpoints.edit_config(folder, **config)


def logits(checkpoint: Path) -> Any:
    """What transformers' score head makes of IDS."""
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(torch.tensor(IDS)[None]).logits[0].numpy().astype(np.float64)


def classify(artifact: Path, **options: Any) -> Any:
    with LLM(artifact, provider="cpu", threads=2, kv_cache_tokens=256) as llm:
        [found] = llm.classify(TokensPrompt(prompt_token_ids=IDS.tolist()), **options)
    assert found.outputs.error is None
    return found.outputs


def told(artifact: Path) -> ClassificationSpec:
    spec = Artifact.read(artifact).manifest.classification
    assert spec is not None
    return spec


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints: one that classifies, and one that generates, which the tokenizer belongs to."""
    folder = tmp_path_factory.mktemp("made")
    make("llama", folder / "classes", id2label=THREE)
    case = checkpoints.Case("qwen3", {"vocab_size": 320, "tie_word_embeddings": True})
    checkpoints.make(case, folder / "causal")
    write_tokenizer(folder / "causal")
    return {name: folder / name for name in ("classes", "causal")}


@pytest.fixture
def classes(made: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made["classes"], tmp_path / "checkpoint"))


@pytest.fixture
def causal(made: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made["causal"], tmp_path / "causal"))


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral", "phi", "phi3", "glm", "gptj"],
)
def test_labels_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    make(family, tmp_path / "checkpoint")
    artifact = export_model(tmp_path / "checkpoint", tmp_path / "artifact", FP32)
    want = logits(tmp_path / "checkpoint")
    found = classify(artifact, use_activation=False)
    np.testing.assert_allclose(found.probs, want, rtol=1e-3, atol=1e-4)
    parts = np.exp(want - want.max())
    found = classify(artifact)
    np.testing.assert_allclose(found.probs, parts / parts.sum(), rtol=1e-3, atol=1e-4)
    assert found.label == f"LABEL_{want.argmax()}"
    assert found.num_classes == 3


def test_such_an_artifact_judges_and_generates_nothing(
    classes: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    artifact = export_model(classes, tmp_path / "artifact", ExportOptions(group_size=32))
    assert "judges texts and generates none" in caplog.text
    spec = ClassificationSpec(labels=("bad", "fair", "good"), activation="softmax", only=True)
    assert told(artifact) == spec
    head = read_score_head(artifact, spec, 64)
    from safetensors.torch import load_file

    stored = load_file(classes / "model.safetensors")["score.weight"].numpy()
    np.testing.assert_array_equal(head, stored)  # whatever else is in four bits
    with LLM(artifact, provider="cpu", threads=2, kv_cache_tokens=256) as llm:
        with pytest.raises(RequestError, match="judges texts and generates none"):
            llm.generate(TokensPrompt(prompt_token_ids=[5]))
        with pytest.raises(RequestError, match="makes no embeddings"):
            llm.embed(TokensPrompt(prompt_token_ids=[5]))
    with pytest.raises(OptionError, match="use onnxport rerank"):
        LLM(artifact, provider="cpu", embeddings=False)
    with LLM(artifact, provider="cpu", threads=2, kv_cache_tokens=256, embeddings=True) as llm:
        [one] = llm.embed(TokensPrompt(prompt_token_ids=[5]))
        assert len(one.outputs.embedding) == 64


@pytest.mark.parametrize(
    ("labels", "config", "activation"),
    [
        (1, {}, "sigmoid"),
        (3, {}, "softmax"),
        (3, {"problem_type": "multi_label_classification"}, "sigmoid"),
        (3, {"problem_type": "single_label_classification"}, "softmax"),
        (1, {"problem_type": "single_label_classification"}, "sigmoid"),
        (1, {"problem_type": "regression"}, "none"),
        (1, {"sentence_transformers": {"activation_fn": "torch.nn.Identity"}}, "none"),
        (
            *(1, {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}),
            "sigmoid",
        ),
    ],
)
def test_what_makes_probabilities(
    labels: int, config: dict[str, Any], activation: str, tmp_path: Path
) -> None:
    make("llama", tmp_path / "checkpoint", labels, **config)
    artifact = export_model(tmp_path / "checkpoint", tmp_path / "artifact", FP32)
    assert told(artifact).activation == activation
    assert told(artifact).labels == tuple(f"LABEL_{one}" for one in range(labels))


def test_two_labels_are_transformers_default(tmp_path: Path) -> None:
    make("llama", tmp_path / "checkpoint", 2, id2label=None)
    assert told(export_model(tmp_path / "checkpoint", tmp_path / "artifact", FP32)).labels == (
        *("LABEL_0", "LABEL_1"),
    )


@pytest.mark.parametrize(
    ("edit", "kind", "words"),
    [
        ({"id2label": {"0": "a", "2": "b"}}, CheckpointError, "a label for each number from 0"),
        ({"id2label": {"x": "a"}}, CheckpointError, "a label for each number from 0"),
        ({"num_labels": 2}, CheckpointError, "num_labels is 2, and id2label has 3"),
        ({"id2label": {"0": "a"}}, CheckpointError, "expected \\[1, 64\\]"),
        ({"problem_type": "ranking"}, UnsupportedModelError, "problem_type is 'ranking'"),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}},
            UnsupportedModelError,
            "go through torch.nn.Tanh",
        ),
        (
            {"sentence_transformers": {"activation_fn": 3}},
            CheckpointError,
            "activation_fn is 3",
        ),
        ({"architectures": ["BertForSequenceClassification"]}, UnsupportedModelError, "causal"),
        (
            {"architectures": ["Qwen3ForSequenceClassification"]},
            UnsupportedModelError,
            "another model's",
        ),
    ],
)
def test_what_is_wrong_with_labels_is_refused(
    edit: dict[str, Any], kind: type[OnnxportError], words: str, classes: Path, tmp_path: Path
) -> None:
    checkpoints.edit_config(classes, **edit)
    with pytest.raises(kind, match=words):
        export_model(classes, tmp_path / "artifact", FP32)


def causal_logits(checkpoint: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor(IDS)[None]).logits[0, -1].numpy().astype(np.float64)


def with_tokens(folder: Path, *tokens: str) -> list[int]:
    """Add tokens to a tokenizer; return their ids."""
    from tokenizers import AddedToken, Tokenizer

    path = folder / "tokenizer.json"
    fast = Tokenizer.from_file(str(path))
    fast.add_tokens([AddedToken(one, normalized=False) for one in tokens])
    fast.save(str(path))
    ids = [fast.token_to_id(one) for one in tokens]
    assert None not in ids
    return ids


@pytest.mark.parametrize("by", ["option", "config", "original", "modules"])
def test_yes_and_no_are_a_score(by: str, causal: Path, tmp_path: Path) -> None:
    """The score is the share of "yes" of the two; the model goes on generating."""
    no, yes = with_tokens(causal, "no", "yes")
    options = FP32
    if by == "option":
        options = ExportOptions(precision="fp32", classifier_from_token=("no", "yes"))
    elif by == "config":
        checkpoints.edit_config(
            causal, classifier_from_token=["no", "yes"], method="from_2_way_softmax"
        )
    elif by == "original":
        checkpoints.edit_config(
            *(causal,),
            architectures=["Qwen3ForSequenceClassification"],  # as vLLM's overrides have it
            classifier_from_token=["no", "yes"],
            is_original_qwen3_reranker=True,
            use_pad_token=False,
        )
    else:
        logit_score(causal, {"true_token_id": yes, "false_token_id": no})
    artifact = export_model(causal, tmp_path / "artifact", options)
    checkpoints.edit_config(causal, architectures=["Qwen3ForCausalLM"])
    label = f"token {yes}" if by == "modules" else "yes"
    assert told(artifact) == ClassificationSpec(labels=(label,), activation="sigmoid")
    found = causal_logits(causal)
    difference = found[yes] - found[no]
    judged = classify(artifact, use_activation=False).probs
    np.testing.assert_allclose(judged, [difference], rtol=1e-3, atol=1e-4)
    share = np.exp(found[yes]) / (np.exp(found[yes]) + np.exp(found[no]))
    np.testing.assert_allclose(classify(artifact).probs, [share], rtol=1e-3, atol=1e-5)
    with LLM(artifact, provider="cpu", threads=2, kv_cache_tokens=256) as llm:
        assert llm.generate(TokensPrompt(prompt_token_ids=[5]))[0].outputs[0].token_ids
    has_template = (artifact / SCORE_TEMPLATE_FILE).is_file()
    assert has_template
    with (
        LLM(artifact, provider="cpu", embeddings=False, kv_cache_tokens=256) as llm,
        pytest.raises(RequestError, match="has no score head"),
    ):
        llm.classify("a")


def logit_score(folder: Path, values: dict[str, Any], **further: Any) -> None:
    """Write the files of sentence-transformers 5.4."""
    kinds = ("base.modules.transformer.Transformer", "cross_encoder.modules.logit_score.LogitScore")
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.{kind}"}
        for at, (kind, path) in enumerate(zip(kinds, ("", "1_LogitScore"), strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir()
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(values))
    settings = {"model_type": "CrossEncoder", "prompts": {}, **further}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))


def test_one_token_is_a_score(causal: Path, tmp_path: Path) -> None:
    """As zerank has it; what it gives is the answer."""
    logit_score(
        causal,
        {"true_token_id": 9, "false_token_id": None, "module_input_name": "causal_logits"},
        activation_fn="torch.nn.modules.linear.Identity",
    )
    artifact = export_model(causal, tmp_path / "artifact", FP32)
    assert told(artifact) == ClassificationSpec(labels=("token 9",), activation="none")
    found = classify(artifact).probs
    np.testing.assert_allclose(found, causal_logits(causal)[[9]], rtol=1e-3, atol=1e-4)


def test_several_tokens_are_labels(causal: Path, tmp_path: Path) -> None:
    ids = with_tokens(causal, "no", "yes")
    checkpoints.edit_config(
        causal, classifier_from_token=["no", "yes"], method="no_post_processing"
    )
    artifact = export_model(causal, tmp_path / "artifact", FP32)
    assert told(artifact) == ClassificationSpec(labels=("no", "yes"), activation="softmax")
    found = classify(artifact, use_activation=False).probs
    np.testing.assert_allclose(found, causal_logits(causal)[ids], rtol=1e-3, atol=1e-4)


def test_scaled_logits_are_scaled(tmp_path: Path) -> None:
    """Cohere multiplies what its head, which is tied, gives."""
    checkpoints.make(checkpoints.CASES["cohere"], tmp_path / "checkpoint")
    logit_score(tmp_path / "checkpoint", {"true_token_id": 9, "false_token_id": 4})
    artifact = export_model(tmp_path / "checkpoint", tmp_path / "artifact", FP32)
    want = causal_logits(tmp_path / "checkpoint")
    found = classify(artifact, use_activation=False).probs
    np.testing.assert_allclose(found, [want[9] - want[4]], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("tokens", "config", "kind", "words"),
    [
        (("nein", "ja"), {}, ExportError, "'nein' is to judge, and is no token"),
        (None, {"classifier_from_token": []}, CheckpointError, "expected texts of tokens"),
        (None, {"classifier_from_token": [3]}, CheckpointError, "expected texts of tokens"),
        (
            *(None, {"classifier_from_token": ["a", "b"], "method": "sum"}),
            *(UnsupportedModelError, "method is 'sum'"),
        ),
        (
            *(None, {"classifier_from_token": ["a"], "method": "from_2_way_softmax"}),
            *(CheckpointError, "which is of two tokens"),
        ),
        (None, {"method": "sum"}, UnsupportedModelError, "method"),  # as before: nothing reads it
    ],
)
def test_tokens_that_cannot_judge_are_refused(
    tokens: tuple[str, ...] | None,
    config: dict[str, Any],
    kind: type[OnnxportError],
    words: str,
    causal: Path,
    tmp_path: Path,
) -> None:
    checkpoints.edit_config(causal, **config)
    options = ExportOptions(precision="fp32", classifier_from_token=tokens)
    with pytest.raises(kind, match=words):
        export_model(causal, tmp_path / "artifact", options)


def test_heads_that_are_no_such_are_refused(classes: Path, causal: Path, tmp_path: Path) -> None:
    asked = ExportOptions(precision="fp32", classifier_from_token=("a", "b"))
    with pytest.raises(ExportError, match="has a score head of its own"):
        export_model(classes, tmp_path / "artifact", asked)
    (causal / "tokenizer.json").unlink()
    checkpoints.edit_config(causal, architectures=["Qwen3ForCausalLM"])
    with pytest.raises(ExportError, match=r"has no tokenizer.json that knows it"):
        export_model(causal, tmp_path / "artifact", asked)
    template = ExportOptions(precision="fp32", score_template="qwen3-reranker")
    with pytest.raises(ExportError, match="names no score head"):
        export_model(causal, tmp_path / "artifact", template)
    head = tmp_path / "head"
    Head().make(head)
    with pytest.raises(ExportError, match="a draft head judges no texts"):
        export_head(head, classes, tmp_path / "artifact", asked)


@pytest.mark.parametrize(
    ("values", "kind", "words"),
    [
        ({"false_token_id": 3}, CheckpointError, "expected tokens of the model"),
        ({"true_token_id": 999}, CheckpointError, "expected tokens of the model"),
        ({"true_token_id": True}, CheckpointError, "expected tokens of the model"),
        ({"true_token_id": 3, "scale": 5}, UnsupportedModelError, "has the key 'scale'"),
    ],
)
def test_modules_that_cannot_judge_are_refused(
    values: dict[str, Any],
    kind: type[OnnxportError],
    words: str,
    causal: Path,
    tmp_path: Path,
) -> None:
    logit_score(causal, values)
    with pytest.raises(kind, match=words):
        export_model(causal, tmp_path / "artifact", FP32)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("gemma2", "logits are capped"),
        ("gptj", "logits have biases"),
        ("opt-350m", "reads 48 numbers of a product behind the 64"),
    ],
)
def test_a_head_that_is_more_than_a_product_is_refused(
    case: str, words: str, tmp_path: Path
) -> None:
    checkpoints.make(checkpoints.CASES[case], tmp_path / "checkpoint")
    logit_score(tmp_path / "checkpoint", {"true_token_id": 9})
    with pytest.raises(UnsupportedModelError, match=words):
        export_model(tmp_path / "checkpoint", tmp_path / "artifact", FP32)


def test_a_score_head_behind_a_product_is_refused(tmp_path: Path) -> None:
    make("opt-350m", tmp_path / "checkpoint")
    with pytest.raises(UnsupportedModelError, match="reads 48 numbers of a product behind the 64"):
        export_model(tmp_path / "checkpoint", tmp_path / "artifact", FP32)


def test_how_pairs_are_written(causal: Path, tmp_path: Path) -> None:
    """What is asked for; else the chat template, if it is of pairs; else what is known."""
    with_tokens(causal, "no", "yes")
    asked = ExportOptions(precision="fp32", classifier_from_token=("no", "yes"))
    artifact = export_model(causal, tmp_path / "known", asked)
    pairs = PairTemplate.read(artifact / SCORE_TEMPLATE_FILE, artifact)
    plain = "Given a web search query, retrieve relevant passages that answer the query"
    for instruction in (None, "Find it."):
        # Qwen3-Reranker's prompt, as its authors put it together.
        want = (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the "
            'Query and the Instruct provided. Note that the answer can only be "yes" or "no".'
            f"<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction or plain}\n<Query>: Why?\n"
            "<Document>: {{ Because }}\n.<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )
        assert pairs.render("Why?", "{{ Because }}\n.", instruction) == want
    own = (
        "{% for m in messages if m['role'] in ['query', 'document'] %}{{ m.content }}|{% endfor %}"
    )
    (causal / "chat_template.jinja").write_text(own)
    artifact = export_model(causal, tmp_path / "own", asked)
    pairs = PairTemplate.read(artifact / SCORE_TEMPLATE_FILE, artifact)
    assert pairs.render("a", "b", None) == "a|b|"
    (causal / "chat_template.jinja").unlink()
    (causal / "tokenizer_config.json").write_text(json.dumps({"chat_template": own}))
    artifact = export_model(causal, tmp_path / "older", asked)
    assert (artifact / SCORE_TEMPLATE_FILE).read_text() == own
    file = tmp_path / "file.jinja"
    file.write_text("{{ messages[0].content }} {{ messages[1].content }}")
    named = ExportOptions(
        precision="fp32", classifier_from_token=("no", "yes"), score_template=str(file)
    )
    artifact = export_model(causal, tmp_path / "file", named)
    assert (artifact / SCORE_TEMPLATE_FILE).read_text() == file.read_text()
    lost = ExportOptions(
        precision="fp32", classifier_from_token=("no", "yes"), score_template="lost.jinja"
    )
    with pytest.raises(ExportError, match=r"lost.jinja cannot be read"):
        export_model(causal, tmp_path / "lost", lost)


def test_who_may_be_a_reranker_is_told_how(
    causal: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    export_model(causal, tmp_path / "plain", FP32)
    assert "--classifier-from-token" not in caplog.text
    export_model(causal.rename(tmp_path / "Qwen3-Reranker-tiny"), tmp_path / "artifact", FP32)
    assert "name these: --classifier-from-token no,yes" in caplog.text


def test_tokens_without_a_template_are_told_of(
    causal: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with_tokens(causal, "no", "yes", "nein", "ja")
    no_yes = ExportOptions(precision="fp32", classifier_from_token=("no", "yes"))
    export_model(causal, tmp_path / "known", no_yes)
    assert "how a pair of texts is written" not in caplog.text
    # Near misses of Qwen3-Reranker: the other order, and another word ahead of the same one.
    for number, tokens in enumerate((("yes", "no"), ("nein", "yes"), ("nein", "ja"))):
        caplog.clear()
        asked = ExportOptions(precision="fp32", classifier_from_token=tokens)
        artifact = export_model(causal, tmp_path / f"{number}", asked)
        assert not (artifact / SCORE_TEMPLATE_FILE).is_file()
        assert "nothing says how a pair of texts is written" in caplog.text
        assert "name a file with --score-template, or one of qwen3-reranker" in caplog.text
    caplog.clear()
    (causal / "tokenizer.json").unlink()
    logit_score(causal, {"true_token_id": 9, "false_token_id": 4})
    artifact = export_model(causal, tmp_path / "bare", FP32)
    assert not (artifact / SCORE_TEMPLATE_FILE).is_file()
    assert "nothing says how a pair of texts is written" in caplog.text


def test_tokens_cannot_judge_where_there_is_no_head(causal: Path, tmp_path: Path) -> None:
    with_tokens(causal, "no", "yes")
    checkpoints.edit_config(causal, architectures=["Qwen3Model"], tie_word_embeddings=False)
    asked = ExportOptions(precision="fp32", classifier_from_token=("no", "yes"))
    with pytest.raises(ExportError, match="has no head, of which a score head of tokens"):
        export_model(causal, tmp_path / "artifact", asked)
    export_model(causal, tmp_path / "artifact", FP32)  # it embeds


QWEN3_PROMPT = "Given a web search query, retrieve relevant passages that answer the query"


@pytest.mark.parametrize(
    ("settings", "length", "words"),
    [
        ({}, {}, None),
        ({"prompts": {"web": QWEN3_PROMPT}, "default_prompt_name": "web"}, {}, None),
        ({"prompts": {"query": "", "other": "Find it."}}, {}, "prompts for pairs (other; by d"),
        (
            {"prompts": {"code": "Find code."}, "default_prompt_name": "code"},
            {},
            "(code; by default code), which the artifact has not; send the text of one as instr",
        ),
        ({}, {"max_seq_length": 9}, "ask for truncate_prompt_tokens 9"),
        ({}, {"max_seq_length": 1 << 20}, None),
    ],
)
def test_what_is_done_with_pairs_besides_is_told(
    settings: dict[str, Any],
    length: dict[str, Any],
    words: str | None,
    causal: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    no, yes = with_tokens(causal, "no", "yes")
    logit_score(causal, {"true_token_id": yes, "false_token_id": no}, **settings)
    (causal / "sentence_bert_config.json").write_text(json.dumps(length))
    export_model(causal, tmp_path / "artifact", FP32)
    if words is None:
        assert "prompts for pairs" not in caplog.text
        assert "max_seq_length" not in caplog.text
    else:
        assert words in caplog.text


@pytest.mark.parametrize(
    ("settings", "length", "kind", "words"),
    [
        ({"default_prompt_name": "lost"}, {}, CheckpointError, "one of the names or null"),
        ({}, {"max_seq_length": "long"}, CheckpointError, "a whole number above 0"),
        ({}, {"do_lower_case": True}, UnsupportedModelError, "do_lower_case is set"),
    ],
)
def test_what_cannot_be_done_with_pairs_is_refused(
    settings: dict[str, Any],
    length: dict[str, Any],
    kind: type[OnnxportError],
    words: str,
    classes: Path,
    tmp_path: Path,
) -> None:
    """Of a model with a head of its own, which need not list modules."""
    told = {"model_type": "CrossEncoder", **settings}
    (classes / "config_sentence_transformers.json").write_text(json.dumps(told))
    (classes / "sentence_bert_config.json").write_text(json.dumps(length))
    with pytest.raises(kind, match=words):
        export_model(classes, tmp_path / "artifact", FP32)


def test_who_judges_nothing_says_nothing(made: dict[str, Path], tmp_path: Path) -> None:
    artifact = Artifact.read(export_model(made["causal"], tmp_path / "artifact", FP32))
    assert artifact.manifest.classification is None
    assert "classification" not in artifact.manifest.dumps()
    assert choose_classifier(artifact, EngineConfig()) is None
    with pytest.raises(OptionError, match="has no score head"):
        choose_classifier(artifact, EngineConfig(score_template=tmp_path / "any.jinja"))


def test_a_template_may_be_another_one(causal: Path, tmp_path: Path) -> None:
    with_tokens(causal, "no", "yes")
    asked = ExportOptions(precision="fp32", classifier_from_token=("no", "yes"))
    artifact = Artifact.read(export_model(causal, tmp_path / "artifact", asked))
    file = tmp_path / "file.jinja"
    for text, words in (
        ("{{ messages[0].content }}", "does not write both texts"),
        ("{{ messages[0].content", "not valid Jinja"),
        ("{{ raise_exception('no') }}", "cannot write this pair"),
        (None, "cannot be read"),
    ):
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_text(text)
        with pytest.raises(RequestError, match=words):
            choose_classifier(artifact, EngineConfig(score_template=file))
    file.write_text("{{ messages[-2].content }}~{{ messages[-1].content }}")
    by_text = EngineConfig(score_template=str(file))  # type: ignore[arg-type]
    assert by_text == EngineConfig(score_template=file)
    found = choose_classifier(artifact, by_text)
    assert found is not None
    assert found.template is not None
    assert found.template.render("a", "b", None) == "a~b"
    assert found.generates


def test_a_manifest_tells_it_again() -> None:
    spec = ClassificationSpec(labels=("a", "b"), activation="softmax", only=True)
    assert ClassificationSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    good = spec.to_json()
    for name, value in (
        ("labels", []),
        ("labels", ["a"]),  # of which a softmax is always 1
        ("labels", [1, 2]),
        ("activation", "tanh"),
        ("only", None),
    ):
        with pytest.raises(ArtifactError):
            ClassificationSpec.from_json({**good, name: value})


def test_a_score_head_that_is_damaged_is_refused(tmp_path: Path) -> None:
    spec = ClassificationSpec(labels=("a", "b"), activation="softmax")
    weight = np.arange(8, dtype=np.float32).reshape(2, 4)
    path = tmp_path / SCORE_FILE
    path.write_bytes(dump_score_head(weight))
    np.testing.assert_array_equal(read_score_head(tmp_path, spec, 4), weight)
    whole = path.read_bytes()
    other = io.BytesIO()
    np.savez(other, other=weight)
    pickled = io.BytesIO()
    np.savez(pickled, weight=np.array([{}], object), allow_pickle=True)
    for data in (
        None,
        b"",
        whole[:20],
        other.getvalue(),
        pickled.getvalue(),
        dump_score_head(weight[:1]),
        dump_score_head(weight.astype(np.float64)),  # type: ignore[arg-type]
        dump_score_head(np.full_like(weight, np.nan)),
    ):
        path.unlink(missing_ok=True)
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(ArtifactError, match="export"):
            read_score_head(tmp_path, spec, 4)


def test_a_chat_template_is_no_template_of_pairs(made: dict[str, Path]) -> None:
    """The one of the tokenizer in these tests, which knows no such roles."""
    assert ChatTemplate.read(made["causal"])


def test_a_gguf_file_may_judge_by_its_tokens(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoints.make(checkpoints.CASES["llama"], checkpoint)
    vocab = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["n", "y", "ny", "<|im_end|>"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3],
        "tokenizer.ggml.merges": ["n y"],
        "tokenizer.ggml.eos_token_id": 3,
    }
    path = ggufs.write(checkpoint, tmp_path / "model.gguf", vocab=vocab)
    asked = ExportOptions(precision="fp32", classifier_from_token=("n", "y"))
    artifact = export_model(path, tmp_path / "artifact", asked)
    want = causal_logits(checkpoint)
    found = classify(artifact, use_activation=False).probs
    np.testing.assert_allclose(found, [want[1] - want[0]], rtol=1e-3, atol=1e-4)


def test_pairs_have_transformers_scores_in_any_batch(causal: Path, tmp_path: Path) -> None:
    """Written by the template or joined by the tokenizer; with a text that is generated beside."""
    no, yes = with_tokens(causal, "nein", "ja")
    asked = ExportOptions(precision="fp32", classifier_from_token=("nein", "ja"))
    artifact = export_model(causal, tmp_path / "artifact", asked)
    model = AutoModelForCausalLM.from_pretrained(causal, dtype=torch.float32).eval()
    assert not (artifact / SCORE_TEMPLATE_FILE).is_file()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(causal / "tokenizer.json"))
    short = tmp_path / "short.jinja"
    short.write_text("{{ messages[-2].content }}? {{ messages[-1].content }}.")
    documents = ["Grass is green.", "The sea is blue.", "é"]
    for template in (short, None):
        limits: dict[str, Any] = {"score_template": template, "max_num_batched_tokens": 16}
        sizes: dict[str, Any] = {"threads": 2, "kv_cache_tokens": 512, "max_num_seqs": 8}
        with LLM(artifact, provider="cpu", **limits, **sizes) as llm:
            alone = [llm.score("Why?", document)[0] for document in documents]
            together = llm.score("Why?", documents)
            ranked = llm.rerank("Why?", documents)
        for document, one, other in zip(documents, alone, together, strict=True):
            pair = ("Why?", document)
            written = (f"{pair[0]}? {document}.",) if template else pair
            ids = tokenizer(*written).input_ids
            assert one.prompt_token_ids == tuple(ids)
            with torch.no_grad():
                found = model(torch.tensor([ids])).logits[0, -1].double().numpy()
            want = 1 / (1 + np.exp(found[no] - found[yes]))
            assert one.outputs.score == pytest.approx(want, rel=1e-3, abs=1e-5)
            if find_library() is not None:
                assert one.outputs.score == other.outputs.score
        scores = [one.outputs.score for one in together]
        assert [one.index for one in ranked] == sorted(range(3), key=lambda at: -scores[at])
