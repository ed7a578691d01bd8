"""Errors that a user can act on.

Every message says what was found, what is allowed and what to do next, in one paragraph. The CLI
prints them without a traceback and exits with `exit_code`; the server maps them to HTTP.
"""

from __future__ import annotations


class OnnxportError(Exception):
    """The base of every error that is caused by input or environment, not by a bug of ours."""

    exit_code = 1


class CheckpointError(OnnxportError):
    """A checkpoint cannot be read: missing file, corrupt shard, missing or misshapen tensor."""


class UnsupportedModelError(OnnxportError):
    """The architecture, or a configuration key that would change the result, is not supported."""


class ExportError(OnnxportError):
    """The artifact could not be written: no space, destination exists, value out of range."""


class ArtifactError(OnnxportError):
    """An artifact folder is not valid: bad manifest, wrong checksum, file outside the folder."""


class ProviderError(OnnxportError):
    """A provider is missing, cannot start, or cannot run this artifact."""


class OptionError(ProviderError):
    """A provider, its device or another option has not what an option asks for."""


class DeviceLostError(ProviderError):
    """The device is gone: removed, reset, or its driver crashed. Its model can do nothing more."""


class DeviceMemoryError(ProviderError):
    """The device had no memory left for a step or a transfer; a smaller one may fit."""


class CapacityError(OnnxportError):
    """A model or request does not fit the memory or context length that is available.

    Attributes:
        num_prompt, num_context: tokens of a prompt, and of the context that it does not fit; None:
            it was something else, or was not counted.
    """

    def __init__(
        self, message: str, num_prompt: int | None = None, num_context: int | None = None
    ) -> None:
        super().__init__(message)
        self.num_prompt, self.num_context = num_prompt, num_context


class AdapterError(OnnxportError):
    """A LoRA adapter cannot be read, does not fit the model, or its name is taken. HTTP 400."""


class RequestError(OnnxportError):
    """A request is not valid; nothing was scheduled. HTTP 400."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownAdapterError(RequestError):
    """No LoRA adapter of that name is loaded (any more). HTTP 404."""


class PlacesTakenError(CapacityError):
    """As many LoRA adapters are loaded as may be. HTTP 400."""


class OverloadedError(OnnxportError):
    """The queue is full and the request was not accepted; it can be sent again. HTTP 429."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[type[OverloadedError], tuple[str, float]]:
        """Return how it is made again, in another process, say."""
        return type(self), (str(self), self.retry_after_s)
