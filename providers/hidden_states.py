"""Hidden states that go into a graph and come out of it, beside tokens and logits.

Models that a draft head reads tell theirs; a head takes them, and tells its own
(`graphs.contract`, `StepInputs.hidden_states`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import ProviderError
from onnxport.graphs import contract
from onnxport.graphs.artifact import Artifact
from onnxport.providers.base import LoadOptions, StepInputs

Floats = NDArray[np.float32]
# An output -> the field that it is told in.
_OUTPUTS: Final = {
    contract.HIDDEN_STATES: "hidden_states",
    contract.LAST_HIDDEN_STATES: "last_hidden_states",
}


def check_hidden_layers(artifact: Artifact, options: LoadOptions) -> int:
    """Return how many numbers of each token the model is to tell.

    Raises ProviderError for a layer that it has not.
    """
    spec = artifact.manifest.model
    if any(layer >= spec.num_layers for layer in options.hidden_layers):
        raise ProviderError(
            f"hidden_layers are {list(options.hidden_layers)}; {artifact.path.name} has "
            f"{spec.num_layers} layers, numbered from 0"
        )
    return len(options.hidden_layers) * spec.hidden_size + final_features(artifact, options)


def final_features(artifact: Artifact, options: LoadOptions) -> int:
    """Return how many of these the final norm makes."""
    return artifact.manifest.model.hidden_size if options.final_states else 0


def refuse_hidden_states(artifact: Artifact, options: LoadOptions, provider: str) -> None:
    """Raise ProviderError where a provider that knows none is asked for them."""
    tells = bool(options.hidden_layers) or options.final_states
    if tells or artifact.manifest.model.draft is not None:
        what = "run draft heads" if artifact.manifest.model.draft else "tell hidden states"
        instead = ""
        if options.final_states:
            what = (
                "tell hidden states, by which multi-token prediction guesses and of which "
                "embeddings are made"
            )
            if instead := without_embeddings(artifact):
                instead += " and, where mtp guesses, another method"
        raise ProviderError(
            f"the {provider} provider does not {what}; cpu, cuda, webgpu, migraphx and directml do"
            f"{instead}"
        )


def without_embeddings(artifact: Artifact) -> str:
    """Return what else can be done where a model that embeds unasked cannot; "" if nothing can.

    Or one that judges texts.
    """
    specs = (artifact.manifest.embedding, artifact.manifest.classification)
    if not any(specs) or any(spec is not None and spec.only for spec in specs):
        return ""
    return ". To generate alone, give --no-embeddings (LLM(embeddings=False))"


@dataclass(slots=True)
class _Output:
    """What is bound for an output: a step's own array, or `room` where that has other rows."""

    field: str  # of StepInputs
    width: int
    room: Floats
    bound: Floats

    def rows(self, inputs: StepInputs) -> int:
        """How many rows a step has, padding included."""
        per_token = self.field == "hidden_states"
        return len(inputs.input_ids if per_token else inputs.logits_indices)


class HiddenStates:
    """The hidden states of one session."""

    def __init__(self, session: Any) -> None:
        """Look for them among inputs and outputs."""
        names = {node.name for node in session.get_inputs()}
        self._takes = contract.TARGET_HIDDEN_STATES in names
        # TELLS_STATES as it is bound; None: the graph tells of each step.
        self._asked = np.zeros(1, np.int32) if contract.TELLS_STATES in names else None
        self._asks: bool | None = None  # what that says; None: it is not bound yet
        none = np.empty((0, 0), np.float32)
        self._outputs = {
            node.name: _Output(_OUTPUTS[node.name], node.shape[1], none, none)
            for node in session.get_outputs()
            if node.name in _OUTPUTS
        }

    @property
    def are_none(self) -> bool:
        """Whether the session neither takes nor tells any."""
        return not self._takes and not self._outputs

    def bind(
        self, binding: Any, inputs: StepInputs, bind_input: Callable[[str, NDArray[Any]], None]
    ) -> None:
        """Let the next run read what a step brings, and write what it tells."""
        if self._takes:
            given, own = inputs.target_hidden_states, inputs.draft_hidden_states
            assert given is not None, "a draft head needs its model's states"
            assert own is not None, "a draft head needs its own states"
            bind_input(contract.TARGET_HIDDEN_STATES, given)
            bind_input(contract.DRAFT_HIDDEN_STATES, own)
        if self._asked is not None:
            asks = inputs.hidden_states is not None
            if asks is not self._asks:
                self._asked[0] = self._asks = asks
                bind_input(contract.TELLS_STATES, self._asked)
            if not asks:  # what is bound stays as it is
                return
        for name, output in self._outputs.items():
            rows = output.rows(inputs)
            into = getattr(inputs, output.field)
            if into is None or len(into) != rows or not into.flags.c_contiguous:
                if len(output.room) != rows:
                    output.room = np.empty((rows, output.width), np.float32)
                into = output.room
            if into is not output.bound:
                output.bound = into
                binding.bind_output(name, "cpu", 0, np.float32, into.shape, into.ctypes.data)

    def deliver(self, inputs: StepInputs) -> None:
        """Give a step what the run told, without the rows that padded it."""
        if inputs.hidden_states is None and inputs.last_hidden_states is None:
            return
        for output in self._outputs.values():
            wanted = getattr(inputs, output.field)
            if wanted is not None and wanted is not output.bound:
                wanted[:] = output.bound[: len(wanted)]


def slice_states(
    inputs: StepInputs, part: StepInputs, tokens: slice, logits: NDArray[np.intp]
) -> StepInputs:
    """A part of a step with the part's states; see `join_states`.

    Args:
        inputs: the whole step.
        part: of it, without states.
        tokens: of the part.
        logits: rows of logits that are the part's own.
    """
    told, given, own, last = (
        inputs.hidden_states,
        inputs.target_hidden_states,
        inputs.draft_hidden_states,
        inputs.last_hidden_states,
    )
    return replace(
        part,
        hidden_states=None if told is None else told[tokens],
        target_hidden_states=None if given is None else given[tokens],
        draft_hidden_states=None if own is None else own[tokens],
        last_hidden_states=None if last is None else last[logits],
    )


def join_states(inputs: StepInputs, part: StepInputs, logits: NDArray[np.intp]) -> None:
    """Bring what a part of a step has told of rows of logits to the whole."""
    if inputs.last_hidden_states is not None:
        assert part.last_hidden_states is not None
        inputs.last_hidden_states[logits] = part.last_hidden_states


def padded_states(inputs: StepInputs, padded: StepInputs) -> StepInputs:
    """A padded step with the states that the step brings, zeros behind them."""
    given, own = inputs.target_hidden_states, inputs.draft_hidden_states
    if given is None or own is None:
        return padded
    rows = len(padded.input_ids)
    return replace(
        padded, target_hidden_states=_taller(given, rows), draft_hidden_states=_taller(own, rows)
    )


def _taller(states: Floats, rows: int) -> Floats:
    tall = np.zeros((rows, states.shape[1]), np.float32)
    tall[: len(states)] = states
    return tall
