"""A server for tests: a real engine over the null provider, which says what the prompt tells it to.

Run as a script, it serves on a free loopback port and prints its address:

    python tests/http/scripted.py FOLDER '{"latency_s": 0.01, "max_num_seqs": 2}'
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from onnxport.graphs.spec import ArchSpec
from onnxport.providers.base import StepInputs
from onnxport.providers.null import NullModel, NullOptions
from onnxport.serving.chat import ChatTemplate
from onnxport.serving.config import EngineConfig
from onnxport.serving.engine import Engine
from onnxport.serving.fallback import Fallback, Standby
from onnxport.serving.http.app import AppOptions, create_app
from onnxport.serving.http.server import ServerOptions, serve
from onnxport.serving.http.sockets import bound, unix_socket, url
from onnxport.serving.http.tls import TlsFiles
from onnxport.serving.tokenizer import Tokenizer as ServingTokenizer
from onnxport.serving.worker import AsyncEngine

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|say|>", "<|over|>")
CHAT_TEMPLATE = """{% for t in tools or [] %}{{ t | tojson }}
{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MODEL = "null"
BEGINS = ("<|im_start|>", "assistant\n")  # how the template begins an answer
FAR_AHEAD_S = 1e6


def say(text: str) -> str:
    """Return a prompt that makes the model answer `text`."""
    return f"<|say|>{text}<|over|>"


def write_tokenizer(folder: Path, template: str = CHAT_TEMPLATE, tags: Sequence[str] = ()) -> None:
    """Write a byte-level tokenizer of single bytes and special tags, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    vocab["hi"] = len(vocab)
    fast = Tokenizer(models.BPE(vocab, [("h", "i")]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(text, special=True) for text in (*tags, *SPECIAL)])
    fast.save(str(folder / "tokenizer.json"))
    config = {"chat_template": template, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


class ScriptedModel(NullModel):
    """A null model that repeats what stands between `<|say|>` and `<|over|>`, then ends.

    Without these it says what the null model says.
    """

    def __init__(
        self,
        options: NullOptions,
        tokenizer: ServingTokenizer,
        begins: Sequence[str] = BEGINS,
        end: str = SPECIAL[1],
    ) -> None:
        super().__init__(options)
        ids = [tokenizer.token_to_id(text) for text in (begins[0], end, *SPECIAL[2:])]
        self._start, self._end, self._say, self._over = ids
        self._header = tokenizer.encode(begins[1])

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        logits = super().run(inputs)
        bounds = inputs.cumulative_sequence_lengths
        for index, at in enumerate(inputs.logits_indices):
            row = int(np.searchsorted(bounds, at, side="right")) - 1
            length = int(inputs.past_sequence_lengths[row] + at - bounds[row]) + 1
            tokens = self._tokens[inputs.block_table[row]].reshape(-1)[:length].tolist()
            if self._say in tokens and self._over in tokens[tokens.index(self._say) :]:
                logits[index] = 0
                logits[index, self._next(tokens)] = 20
        return logits

    def _next(self, tokens: list[int]) -> int:
        """Return the token that follows `tokens`."""
        start = tokens.index(self._say) + 1
        over = tokens.index(self._over, start)
        script = tokens[start:over]
        answer = tokens[over + 1 :]
        if self._start in answer:
            answer = answer[answer.index(self._start) + 1 + len(self._header) :]
        return script[len(answer)] if len(answer) < len(script) else self._end


def _taken(settings: dict[str, Any], options: Any) -> dict[str, Any]:
    """Take the settings that are fields of a dataclass; JSON's lists become tuples."""
    names = [each.name for each in fields(options) if each.name in settings]
    found = {name: settings.pop(name) for name in names}
    return {n: tuple(value) if isinstance(value, list) else value for n, value in found.items()}


def _faults(settings: dict[str, Any]) -> dict[str, Callable[[int], bool]]:
    """Take the settings that say when steps fail, wait, or lose the device.

    fail_after is the first run that fails. While the file hold is there, runs wait, from number
    held_from on, by default the second. lost_at is an operation, or a file: from when it is there.
    """
    fail_after, hold = settings.pop("fail_after", None), settings.pop("hold", None)
    held_from, lost_at = settings.pop("held_from", 1), settings.pop("lost_at", None)

    def fails(run: int) -> bool:
        while hold is not None and run >= held_from and Path(hold).exists():
            time.sleep(0.005)
        return fail_after is not None and run >= fail_after

    def is_lost(operation: int) -> bool:
        return Path(lost_at).exists() if isinstance(lost_at, str) else operation == lost_at

    return {"fails": fails, "lost_at": is_lost}


def _late(path: Path) -> Callable[[], float]:
    """Return a clock that is far ahead of the time from when a file is there."""
    return lambda: time.monotonic() + (FAR_AHEAD_S if path.exists() else 0.0)


def main(folder: Path, settings: dict[str, Any]) -> None:
    """Serve until a signal."""
    files = settings.pop("tls", None)  # the fields of TlsFiles
    uds = settings.pop("uds", None)
    hosts = settings.pop("hosts", ["127.0.0.1"])
    server = _taken(settings, ServerOptions)
    if files is not None:
        paths = {name: Path(one) if isinstance(one, str) else one for name, one in files.items()}
        server["tls"] = TlsFiles(**paths).context()
    if server.get("access_log"):
        logging.basicConfig(format="%(message)s", level=logging.INFO)
    app_options = _taken(settings, AppOptions)
    config = {"seed": 1} | _taken(settings, EngineConfig)
    faults = _faults(settings)
    late = settings.pop("late", None)  # a file; once it is there, all deadlines have passed
    clock = time.monotonic if late is None else _late(Path(late))
    begins, ends = settings.pop("begins", BEGINS), settings.pop("ends", SPECIAL[1:2])
    tokenizer = ServingTokenizer.from_folder(folder, frozenset(), settings.pop("texts", ()))
    ids = map(tokenizer.token_to_id, ends)
    tokenizer.eos_token_ids = frozenset(one for one in ids if one is not None)
    base = settings.pop("base", None)  # what adapters have to fit, an ArchSpec
    fallback = settings.pop("fallback", None)
    given = {"vocab_size": tokenizer.vocab_size, "num_blocks": 512}
    model = ScriptedModel(NullOptions(**given | faults | settings), tokenizer, begins, ends[0])
    standby = Standby()
    if fallback is not None:
        spare = ScriptedModel(NullOptions(**given | fallback), tokenizer)
        standby = Standby((Fallback("spare", lambda: spare),))
    spec = None if base is None else ArchSpec.from_json(base)
    settled = EngineConfig(**config)
    started = Engine(model, tokenizer, settled, clock=clock, standby=standby, base=spec)
    engine = AsyncEngine(started)
    app = create_app(engine, MODEL, ChatTemplate.read(folder), AppOptions(**app_options))
    with bound(hosts, 0) if uds is None else unix_socket(uds) as sockets:
        address = url(hosts[0], sockets[0], is_tls=files is not None)
        ready = partial(print, address, flush=True)
        try:
            serve(app, sockets, engine.close, ready, ServerOptions(**server))
        finally:
            asyncio.run(engine.close())
    print("closed", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
