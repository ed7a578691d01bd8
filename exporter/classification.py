"""Score heads: of a model that was made to classify, or two rows of one that generates text.

Qwen3-Reranker, and others like it, answer "yes" or "no" to whether a document fits a query. What
decides is the difference of two logits, which is one product with the difference of two rows of the
head: a score head, as models that were made to classify have one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import CheckpointError, ExportError, UnsupportedModelError
from onnxport.exporter.checkpoint import Checkpoint, to_float32
from onnxport.exporter.config import Config
from onnxport.exporter.embedding import (
    LOGIT_SCORE,
    PROMPTS_FILE,
    makes_no_vectors,
    max_texts,
    module_folder,
    read_prompts,
)
from onnxport.exporter.families.base import TensorNames
from onnxport.exporter.score_templates import QWEN3_RERANKER, TEMPLATES
from onnxport.exporter.source import PAIRS, TEMPLATE_FOLDER, TOKENIZER_FILES, read_json
from onnxport.exporter.target import to_dtype
from onnxport.graphs.classification_spec import Activation, ClassificationSpec
from onnxport.graphs.spec import ArchSpec

SCORE_TENSOR: Final = "score.weight"
CLASS_END: Final = "ForSequenceClassification"
_DIFFERENCE, _AS_THEY_ARE = "from_2_way_softmax", "no_post_processing"  # vLLM's names
_PROBLEMS: Final[Mapping[str, Activation]] = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_FUNCTIONS: Final[Mapping[str, Activation]] = {
    "Identity": "none",
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
}
_NO_YES: Final = ("no", "yes")  # between which Qwen3-Reranker chooses
_OF_PAIRS: Final = (re.compile("""["']query["']"""), re.compile("""["']document["']"""))

logger = logging.getLogger(__name__)

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """Where a score head comes from.

    Attributes:
        spec: what it tells.
        template: how pairs of texts are written, in Jinja; None: one text behind the other, as the
            tokenizer joins them.
        token_ids: the tokens of which it has rows of the model's head; None: it is a tensor of its
            own.
        is_difference: it has one row, that of the second token less that of the first.
    """

    spec: ClassificationSpec
    template: str | None
    token_ids: tuple[int, ...] | None = None
    is_difference: bool = False

    @property
    def generates(self) -> bool:
        """Whether the model has a head besides."""
        return self.token_ids is not None

    def read(self, checkpoint: Checkpoint, names: TensorNames, spec: ArchSpec) -> Floats:
        """Read it, float32 [labels, hidden].

        Raises:
            CheckpointError: it is not there, or of another shape, or not finite.
        """
        if self.token_ids is None:
            checkpoint.require({SCORE_TENSOR: (len(self.spec.labels), spec.hidden_size)})
            rows = to_float32(checkpoint.read(SCORE_TENSOR))
            return to_dtype(SCORE_TENSOR, rows, np.dtype(np.float32))
        tensor = names.embedding if spec.tie_word_embeddings else names.head
        rows = np.concatenate(
            [to_float32(checkpoint.read_rows(tensor, one, one + 1)) for one in self.token_ids]
        )
        if self.is_difference:
            rows = rows[1:] - rows[:1]
        if spec.logits_scale is not None:
            rows = rows * np.float32(spec.logits_scale)
        return to_dtype(tensor, rows, np.dtype(np.float32))


def is_classifier(config: Config) -> bool:
    """Whether the configuration names the class of a model with a score head."""
    return any(name.endswith(CLASS_END) for name in config.architectures)


def read_score_head(
    config: Config,
    folder: Path,
    files: Path,
    spec: ArchSpec,
    asked: tuple[str, ...] | None,
    template: str | None,
) -> ScoreHead | None:
    """Read how a checkpoint judges texts; None: it does not.

    Args:
        config: Its configuration.
        folder: Where it is, or a GGUF file.
        files: The folder of its tokenizer.
        spec: The model.
        asked: The tokens whose logits judge, as a caller names them; None: what the checkpoint
            says.
        template: How pairs are written: a file, or a name in `TEMPLATES`; None: as the checkpoint
            says, if it does.

    Raises:
        CheckpointError: A file cannot be read, or contradicts the model.
        UnsupportedModelError: Texts are judged in a way that is not supported.
        ExportError: What was asked for does not go with the checkpoint.
    """
    head = _by_tokens(config, folder, files, spec, asked)
    if head is None and is_classifier(config):
        labels = _labels(config)
        found = ClassificationSpec(
            labels=labels, activation=_activation(config, folder, len(labels)), only=True
        )
        head = ScoreHead(found, None)
    if head is None:
        if template is not None:
            raise ExportError(
                f"the score template {template} was given, and {config.path} names no score head; "
                "name the tokens that judge with --classifier-from-token, or leave it out."
            )
        return None
    _check_head(config, spec, head)
    written = _template(config, files, head, template)
    if head.generates and written is None:
        logger.warning(
            "%s: nothing says how a pair of texts is written, so the tokenizer joins the two. A "
            "model that answers with a token mostly wants a prompt, without which its scores mean "
            "little: name a file with --score-template, or one of %s",
            *(config.path, ", ".join(TEMPLATES)),
        )
    _check_pairs(folder, written or "", spec.context_length)
    return replace(head, template=written)


def _by_tokens(
    config: Config, folder: Path, files: Path, spec: ArchSpec, asked: tuple[str, ...] | None
) -> ScoreHead | None:
    """A head of rows of the model's own; None: no tokens are named."""
    named = config.get("classifier_from_token", list, None)
    method = None
    if named is not None:
        method = config.get("method", str, None)
        if config.get("is_original_qwen3_reranker", bool, False):
            method = _DIFFERENCE
        config.get("use_pad_token", bool, False)  # of batches that are padded, and none is
    if asked is not None and is_classifier(config) and named is None:
        raise ExportError(
            f"--classifier-from-token was given, and {config.path} names "
            f"{config.architectures[0]}, which has a score head of its own; leave it out."
        )
    ids = _of_modules(folder, spec) if asked is None and named is None else None
    tokens = asked if asked is not None else named
    if ids is None:
        if tokens is None:
            return None
        if not tokens or not all(isinstance(one, str) and one for one in tokens):
            raise CheckpointError(
                f"{config.path}: classifier_from_token is {tokens!r}, expected texts of tokens."
            )
        ids = tuple(_token_id(files, one, spec) for one in tokens)
        labels = tuple(tokens)
    else:
        labels = tuple(f"token {one}" for one in ids)
    if method not in (None, _DIFFERENCE, _AS_THEY_ARE):
        raise UnsupportedModelError(
            f"{config.path}: method is {method!r}; supported are {_DIFFERENCE} and {_AS_THEY_ARE}."
        )
    is_difference = len(ids) == 2 and method != _AS_THEY_ARE
    if method == _DIFFERENCE and not is_difference:
        raise CheckpointError(
            f"{config.path}: method is {method}, which is of two tokens, and "
            f"classifier_from_token names {len(ids)}."
        )
    labels = labels[-1:] if is_difference else labels
    found = ClassificationSpec(
        labels=labels, activation=_activation(config, folder, len(labels), of_tokens=True)
    )
    return ScoreHead(found, None, ids, is_difference)


def _check_head(config: Config, spec: ArchSpec, head: ScoreHead) -> None:
    """Raise UnsupportedModelError where a product of the last states is not what judges."""
    if spec.embedding_size is not None:
        raise UnsupportedModelError(
            f"{config.path}: the model's head reads {spec.embedding_size} numbers of a product "
            f"behind the {spec.hidden_size} of its layers, and a score head would read the latter; "
            "supported are models without that product."
        )
    if not head.generates:
        return
    for found, what in (
        (spec.logits_softcap is not None, "are capped"),
        (bool(spec.head_bias), "have biases"),
    ):
        if found:
            raise UnsupportedModelError(
                f"{config.path}: the model's logits {what}, and a score head of rows of its head "
                "would not make them; supported are models whose logits are a product alone."
            )


def _of_modules(folder: Path, spec: ArchSpec) -> tuple[int, ...] | None:
    """The tokens that sentence-transformers' LogitScore names; None: there is none."""
    place = module_folder(folder, LOGIT_SCORE)
    if place is None:
        return None
    path = place / "config.json"
    values = read_json(path)
    ids = [values.pop(name, None) for name in ("false_token_id", "true_token_id")]
    values.pop("module_input_name", None)
    if values:
        raise UnsupportedModelError(
            f"{path} has the key {next(iter(values))!r}, which the exporter does not understand."
        )
    found = tuple(one for one in ids if one is not None)
    if ids[1] is None or not all(type(one) is int and 0 <= one < spec.vocab_size for one in found):
        raise CheckpointError(
            f"{path}: false_token_id and true_token_id are {ids}, expected tokens of the model, of "
            "which the first may be null."
        )
    return found


def _token_id(files: Path, token: str, spec: ArchSpec) -> int:
    """The id of a token. Raises ExportError for what is none."""
    from tokenizers import Tokenizer

    path = files / TOKENIZER_FILES[0]
    if not path.is_file():
        raise ExportError(
            f"the token {token!r} is to judge, and {files} has no {TOKENIZER_FILES[0]} that knows "
            "it; name a folder with one with --tokenizer."
        )
    found: int | None = Tokenizer.from_file(str(path)).token_to_id(token)
    if found is None or found >= spec.vocab_size:
        raise ExportError(
            f"{token!r} is to judge, and is no token of {path}; give tokens as the vocabulary "
            "spells them, such as no,yes."
        )
    return found


def _labels(config: Config) -> tuple[str, ...]:
    """The labels of a head, by number. Transformers' default is two, which are not written."""
    count = config.get("num_labels", int, None)
    named = config.get("id2label", dict, None)
    if named is None:
        return tuple(f"LABEL_{number}" for number in range(2 if count is None else max(count, 1)))
    try:
        by_number = {int(number): str(label) for number, label in named.items()}
    except ValueError:
        by_number = {}
    if not by_number or sorted(by_number) != list(range(len(by_number))):
        raise CheckpointError(
            f"{config.path}: id2label is {named!r}, expected a label for each number from 0 on."
        )
    if count is not None and count != len(by_number):
        raise CheckpointError(
            f"{config.path}: num_labels is {count}, and id2label has {len(by_number)}."
        )
    return tuple(by_number[number] for number in range(len(by_number)))


def _activation(
    config: Config, folder: Path, num_labels: int, *, of_tokens: bool = False
) -> Activation:
    """What makes probabilities: as sentence-transformers, or else transformers, has it."""
    if (named := _function(config, folder)) is not None:
        function = named.rpartition(".")[2]
        if function not in _FUNCTIONS or (function == "Softmax" and num_labels == 1):
            raise UnsupportedModelError(
                f"{config.path}: scores of {num_labels} label(s) go through {named}; supported are "
                f"{', '.join(_FUNCTIONS)}, the last of several labels."
            )
        return _FUNCTIONS[function]
    problem = None if of_tokens else config.get("problem_type", str, None)
    if problem is None:
        return "softmax" if num_labels > 1 else "sigmoid"
    if problem not in _PROBLEMS:
        raise UnsupportedModelError(
            f"{config.path}: problem_type is {problem!r}; supported are {', '.join(_PROBLEMS)}."
        )
    found = _PROBLEMS[problem]
    return "sigmoid" if found == "softmax" and num_labels == 1 else found


def _function(config: Config, folder: Path) -> str | None:
    """The activation that sentence-transformers' files name; None: they do not."""
    own = config.get("sentence_transformers", dict, {}).get("activation_fn")
    older = config.get("sbert_ce_default_activation_function", str, None)
    values = read_json(folder / PROMPTS_FILE) if folder.is_dir() else {}
    other = values.get("activation_fn") if values.get("model_type") == "CrossEncoder" else None
    found = own or other or older
    if found is not None and not isinstance(found, str):
        raise CheckpointError(f"{config.path}: the activation_fn is {found!r}, expected a name.")
    return found


def _template(config: Config, files: Path, head: ScoreHead, asked: str | None) -> str | None:
    """How pairs are written, in Jinja; None: nothing says so."""
    if asked is not None:
        if asked in TEMPLATES:
            return TEMPLATES[asked]
        try:
            return Path(asked).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ExportError(
                f"the score template {asked} cannot be read ({error}); give a file in Jinja, or "
                f"one of {', '.join(TEMPLATES)}."
            ) from error
    for own in (_chat_template(files), _named_template(files)):
        if all(word.search(own) for word in _OF_PAIRS):
            logger.info("the chat template writes pairs of a query and a document")
            return own
    is_qwen3 = any(name.startswith("Qwen3For") for name in config.architectures)
    if is_qwen3 and head.is_difference and head.token_ids == _ids_of(files, _NO_YES):
        logger.info("pairs are written as Qwen3-Reranker has them")
        return TEMPLATES[QWEN3_RERANKER]
    return None


def _ids_of(files: Path, tokens: tuple[str, ...]) -> tuple[int | None, ...] | None:
    """The ids of tokens, for a checkpoint may name either; None: no tokenizer tells."""
    from tokenizers import Tokenizer

    path = files / TOKENIZER_FILES[0]
    if not path.is_file():
        return None
    tokenizer = Tokenizer.from_file(str(path))
    return tuple(tokenizer.token_to_id(one) for one in tokens)


def _check_pairs(folder: Path, template: str, context_length: int) -> None:
    """Refuse, or tell, what sentence-transformers does with pairs besides, which is not done here.

    Args:
        folder: of the checkpoint, or a GGUF file.
        template: how pairs are written.
        context_length: of the model.

    Raises:
        CheckpointError: a file cannot be read.
        UnsupportedModelError: texts are changed.
    """
    settings = read_json(folder / PROMPTS_FILE) if folder.is_dir() else {}
    if settings.get("model_type") != "CrossEncoder" and not makes_no_vectors(folder):
        return  # what there is belongs to vectors
    most = max_texts(folder)
    if most is not None and most < context_length:
        logger.warning(
            "%s reads %s tokens of a pair (max_seq_length), and the artifact as many as its "
            "context has; ask for truncate_prompt_tokens %s to get the same scores",
            *(folder, most, most),
        )
    prompts, default = read_prompts(folder / PROMPTS_FILE, settings)
    unknown = [name for name, text in prompts.items() if text and text not in template]
    if unknown:
        logger.warning(
            "%s has prompts for pairs (%s; by default %s), which the artifact has not; send the "
            "text of one as instruction, if the score template takes that",
            *(folder, ", ".join(unknown), default or "none"),
        )


def _named_template(files: Path) -> str:
    """The template for pairs, among those that have names; "" where there is none."""
    path = files / TEMPLATE_FOLDER / f"{PAIRS}.jinja"
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _chat_template(files: Path) -> str:
    """The chat template that a checkpoint has; "" where it has none, or several."""
    path = files / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found: Any = read_json(files / "tokenizer_config.json").get("chat_template")
    return found if isinstance(found, str) else ""
