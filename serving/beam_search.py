"""The rounds of beam searches, between the steps of an engine."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from onnxport.serving.beam_candidates import Arrival
from onnxport.serving.beams import BeamGroup, Text, rows_of
from onnxport.serving.grammar import failure_of
from onnxport.serving.growth import Growth, ending, grow
from onnxport.serving.request import Request
from onnxport.serving.sampling import Drawn
from onnxport.serving.scheduler import Scheduler
from onnxport.serving.sequences import Sequences

logger = logging.getLogger(__name__)


class BeamSearches:
    """Lets beams go on, and ends searches. Belongs to the engine's thread."""

    def __init__(
        self, scheduler: Scheduler, sequences: Sequences, eos_token_ids: frozenset[int]
    ) -> None:
        """Work on the parts of an engine.

        Args:
            scheduler: holds the blocks of the beams.
            sequences: end.
            eos_token_ids: tokens that end a generation.
        """
        self._scheduler = scheduler
        self._sequences = sequences
        self._eos_token_ids = eos_token_ids

    def advance(self, arrived: Sequence[Arrival], now_s: float) -> tuple[list[Growth], list[float]]:
        """Take what a step has found, after its commit; all beams of a search go on at once.

        Returns:
            What was added to sequences, all of their output at their ends, and the times since the
            previous round of each search that had one.
        """
        growths: list[Growth] = []
        gaps: list[float] = []
        for one in arrived:
            request, beams = one.request, one.request.beams
            assert beams is not None
            if request.finish_reason is not None:  # with another beam of this step
                continue
            if one.failure is not None:
                self._scheduler.distrust(request)
                growths += self._sequences.end(request, "error", one.failure)
                continue
            beams.found[request] = one.candidates
            if not beams.has_arrived:
                continue
            growths += self._go_on(beams, now_s, gaps)
        return growths, gaps

    def _go_on(self, beams: BeamGroup, now_s: float, gaps: list[float]) -> list[Growth]:
        """Begin the next round of a search, or end it; adds to `gaps` the time since the last."""
        first, is_known = beams.slots[0], bool(beams.behind)
        try:
            children = beams.advance()
        except Exception as error:
            logger.error("request %s failed", first.request_id, exc_info=error)
            return self._sequences.end(first, "error", failure_of(error))
        if not children:
            gaps += self._sequences.note_tokens([first], now_s)
            return self._end(beams, now_s)
        seats = beams.seat(children)
        if not is_known:
            gaps += self._sequences.note_tokens([first], now_s)
            # Others are told of at their beginning and end alone: they are one text only there.
            others = [slot for slot in seats if slot is not first]
            new = [slot for slot in others if slot.times.first_token_s is None]
            self._sequences.note_tokens(new, now_s)
        parents = {slot: child.parent.slot for slot, child in seats.items()}
        self._scheduler.refork(beams, parents)
        beams.take(children, seats)
        return []

    def _end(self, beams: BeamGroup, now_s: float) -> list[Growth]:
        """Give each slot the text of its place among the best, and end them."""
        growths = []
        for slot in beams.slots:
            slot.tokens = slot.tokens[: slot.num_prompt_tokens]
            if slot.index < len(beams.finished):
                growths.append(self._told(beams, slot, beams.finished[slot.index]))
            else:
                missing = ending(slot, "stop")
                missing.cumulative_logprob = -math.inf
                growths.append(missing)
        return self._sequences.end_beams(beams, growths, now_s)

    def _told(self, beams: BeamGroup, slot: Request, text: Text) -> Growth:
        """Return a finished text as the growth of a sequence that has no output yet."""
        slot.grammar, slot.text = beams.beginning.grammar(), beams.beginning.stream()
        output = tuple(text.tokens[slot.num_prompt_tokens :])
        growth = grow(Drawn(slot, output, rows_of(text.told)), self._eos_token_ids)
        assert growth.reason is not None, "a text of a beam search has not ended"
        assert growth.reason == "error" or growth.token_ids == output, "it ended before"
        growth.cumulative_logprob = text.logprob
        return growth
