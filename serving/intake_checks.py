"""What of a request is refused before its prompt is read."""

from __future__ import annotations

from collections.abc import Sequence

from onnxport.errors import RequestError
from onnxport.serving.classifying import Classifier
from onnxport.serving.config import LogprobsMode, SchedulingPolicy
from onnxport.serving.logprob_modes import LOGITS
from onnxport.serving.params import RequestOptions, SamplingParams
from onnxport.serving.pooling import Embedder


def check_generates(embedder: Embedder | None, classifier: Classifier | None) -> None:
    """Raise RequestError where the model generates no texts.

    Args:
        embedder: how prompts are embedded; None: none are.
        classifier: how prompts are classified; None: none are.
    """
    if embedder is not None and not embedder.generates:
        raise RequestError(
            "this model embeds texts and generates none, for it has no head; send the text to "
            "/v1/embeddings (LLM.embed)"
        )
    if classifier is not None and not classifier.generates:
        raise RequestError(
            "this model judges texts and generates none, for it has a score head in place of "
            "another; send the text to /classify (LLM.classify), or pairs to /rerank or /score "
            "(LLM.score)"
        )


def check_without_tokenizer(prompt: str | Sequence[int], params: SamplingParams) -> None:
    """Raise RequestError for what needs a tokenizer, where there is none."""
    if isinstance(prompt, str) or params.stop:
        what = "a text prompt" if isinstance(prompt, str) else "a stop string"
        param = "prompt" if isinstance(prompt, str) else "stop"
        raise RequestError(f"{what} needs a tokenizer and this engine has none", param)


def check_completions(params: SamplingParams, mode: LogprobsMode, max_num_seqs: int) -> None:
    """Raise RequestError for more completions than run at once, or that cannot be compared.

    Args:
        params: of the request.
        mode: what log probabilities are of, as the engine has it.
        max_num_seqs: most sequences that run at once.
    """
    name = "n" if params.num_sequences == params.n else "best_of"
    if params.num_sequences > max_num_seqs:
        raise RequestError(
            f"{name} is {params.num_sequences}, and the engine runs {max_num_seqs} sequences "
            "at once; ask for fewer completions, or raise max_num_seqs",
            name,
        )
    is_ranked = params.num_sequences > params.n and not params.use_beam_search
    if mode in LOGITS and is_ranked:
        raise RequestError(
            f"best_of is {params.best_of} and n is {params.n}, and completions are compared by "
            f"log probabilities, of which this engine has none (logprobs_mode {mode}); leave "
            "best_of out",
            "best_of",
        )


def check_priority(options: RequestOptions, policy: SchedulingPolicy) -> None:
    """Raise RequestError for a priority where there are none."""
    if options.priority and policy == "fcfs":
        raise RequestError(
            f"priority is {options.priority}, but this engine serves by arrival "
            "(scheduling_policy fcfs); leave it out, or start the engine with the policy "
            "priority or fair",
            "priority",
        )
