"""How long answers are: whether a draft model's work on a prompt will come back."""

from __future__ import annotations

from onnxport.serving.request import Request

FIRST_OUTPUT = 128  # tokens that an answer is taken to have, before some have ended
MEMORY = 20  # answers: about so many count
LEAST_ANSWER = 2  # tokens: the first one comes with the prompt
LEAST_COMING = 0.25  # of the mean: what is longer than most goes on for a while


class AnswerLengths:
    """The mean length of the answers so far."""

    def __init__(self) -> None:
        self._mean = float(FIRST_OUTPUT)
        self._number = 1

    def note(self, num_tokens: int) -> None:
        """An answer of so many tokens has ended; one that no step went on with is none."""
        if num_tokens < LEAST_ANSWER:
            return
        self._number = min(self._number + 1, MEMORY)
        self._mean += (num_tokens - self._mean) / self._number

    def coming(self, request: Request) -> float:
        """Return how many tokens a request may still get."""
        left = request.max_total_tokens - len(request.tokens)
        return min(left, max(self._mean - request.num_output_tokens, LEAST_COMING * self._mean))
