"""An engine driven by a command."""

from __future__ import annotations

from contextlib import closing

from onnxport.cli.session import deltas
from onnxport.providers.null import NullModel
from onnxport.serving.config import EngineConfig
from onnxport.serving.engine import Engine
from onnxport.serving.params import SamplingParams
from onnxport.serving.request import Request


def prepare(engine: Engine, count: int) -> list[Request]:
    params = SamplingParams(max_tokens=3)
    return [engine.prepare(str(number), [number + 1], params) for number in range(count)]


def test_more_prompts_than_the_queue_holds() -> None:
    config = EngineConfig(max_num_seqs=1, max_num_batched_tokens=8, max_queued_requests=2)
    with closing(Engine(NullModel(), config=config)) as engine:
        tokens = dict.fromkeys("01234", 0)
        for delta in deltas(engine, prepare(engine, 5)):
            tokens[delta.request_id] += len(delta.token_ids)
    assert tokens == dict.fromkeys("01234", 3)


def test_requests_that_nobody_waits_for_end() -> None:
    config = EngineConfig(max_num_seqs=1, max_num_batched_tokens=8, max_queued_requests=2)
    with closing(Engine(NullModel(), config=config)) as engine:
        with closing(deltas(engine, prepare(engine, 5))) as some:
            next(some)
        assert not engine.has_work
        assert engine.stats().num_free_blocks == engine.stats().num_blocks
