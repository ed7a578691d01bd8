"""From which token of a request on its adapter acts, and what its K/V are called therefore."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from onnxport.kv.prefix import Branch, KeyChain, root_key
from onnxport.serving.adapters.adapter import Adapter


@dataclass(frozen=True, slots=True)
class Use:
    """What a request uses. What is before the token that it acts from is the model's own."""

    adapter: Adapter | None  # None: the model alone
    start: int  # the number of that token in the prompt

    @classmethod
    def of(cls, adapter: Adapter | None, prompt: array[int]) -> Use:
        """Return the use of an adapter that was picked; it is none where it acts on no token."""
        start = None if adapter is None else adapter.start_in(prompt)
        return cls(None, 0) if start is None else cls(adapter, start)

    @property
    def content(self) -> tuple[str | None, int]:
        """What K/V depend on beside the tokens: where it is the same, they are."""
        return (None if self.adapter is None else self.adapter.fingerprint), self.start

    def keys(self, cache_salt: str | None, block_size: int) -> KeyChain:
        """Return the keys of a sequence that is empty so far."""
        fingerprint, start = self.content
        if fingerprint is not None and start:
            branch = Branch.of(fingerprint, start)
            return KeyChain(root_key(None, cache_salt), block_size, branch)
        return KeyChain(root_key(fingerprint, cache_salt), block_size)
