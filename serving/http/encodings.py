"""How vectors are written: as numbers in JSON, as base64, or as bytes alone, as vLLM has it."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import ml_dtypes
import numpy as np
from fastapi.responses import Response
from numpy.typing import NDArray

from onnxport.errors import RequestError

Floats = NDArray[np.float32]
EncodingFormat = Literal["float", "base64", "bytes", "bytes_only"]
EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "little", "big"]

BYTES: Final[tuple[EncodingFormat, ...]] = ("bytes", "bytes_only")
OCTETS: Final = "application/octet-stream"
METADATA: Final = "metadata"  # the header that tells where each vector is
MOST_METADATA: Final = 60 << 10  # bytes of it: many clients read no longer line
_DTYPES: Final[Mapping[EmbedDtype, Any]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}


@dataclass(frozen=True, slots=True)
class Encoding:
    """How the vectors of an answer are written.

    Attributes:
        form: in what: "bytes" has `metadata` in a header, and "bytes_only" has not.
        dtype: of numbers that are not in JSON.
        endianness: likewise; "native" is that of the server.

    Raises:
        RequestError: numbers in JSON are to have a type or an order of bytes.
    """

    form: EncodingFormat = "float"
    dtype: EmbedDtype = "float32"
    endianness: Endianness = "native"

    def __post_init__(self) -> None:
        if self.form != "float":
            return
        for name, value, plain in (
            ("embed_dtype", self.dtype, ("float32",)),
            ("endianness", self.endianness, ("native", "little")),
        ):
            if value not in plain:
                raise RequestError(
                    f"{name} is {value!r}, which goes with encoding_format base64, bytes or "
                    "bytes_only; send one of these, or leave it out",
                    name,
                )

    @property
    def is_json(self) -> bool:
        """Whether the answer is JSON, and not bytes alone."""
        return self.form not in BYTES

    def octets(self, vector: Floats) -> bytes:
        """Return the bytes of a vector, row by row.

        Raises:
            RequestError: a number is too large for the type.
        """
        with np.errstate(over="ignore"):
            found = vector.astype(_DTYPES[self.dtype])
        if not np.isfinite(found.astype(np.float32)).all():
            raise RequestError(
                f"embed_dtype is {self.dtype}, and a vector has numbers up to "
                f"{np.abs(vector).max():.4g}, which it cannot hold; send float32 or bfloat16, or "
                "leave use_activation as it is",
                "embed_dtype",
            )
        order = sys.byteorder if self.endianness == "native" else self.endianness
        if order != sys.byteorder and found.itemsize > 1:
            return found.view(f"u{found.itemsize}").byteswap().tobytes()
        return found.tobytes()

    def told(self, vector: Floats) -> Any:
        """Return what JSON has of a vector: its numbers, or text."""
        if self.form == "float":
            return vector.tolist()
        return base64.b64encode(self.octets(vector)).decode()

    def response(self, fields: Mapping[str, Any], vectors: Sequence[Floats]) -> Response:
        """Return an answer of bytes alone, one vector behind the other.

        Args:
            fields: of the answer, `usage` among them.
            vectors: of each input.

        Raises:
            RequestError: see `octets`; or there are so many that no header can tell of them.
        """
        parts = [self.octets(vector) for vector in vectors]
        headers = {}
        if self.form == "bytes":
            headers[METADATA] = json.dumps(self._metadata(fields, vectors, parts))
            if len(headers[METADATA]) > MOST_METADATA:
                raise RequestError(
                    f"encoding_format is bytes, and the header {METADATA} of {len(vectors)} "
                    f"vectors has {len(headers[METADATA])} bytes, which clients do not read; send "
                    "fewer inputs, or encoding_format bytes_only",
                    "encoding_format",
                )
        return Response(b"".join(parts), media_type=OCTETS, headers=headers)

    def _metadata(
        self, fields: Mapping[str, Any], vectors: Sequence[Floats], parts: Sequence[bytes]
    ) -> dict[str, Any]:
        """Return what tells where each vector is, and of what it is an answer."""
        items, start = [], 0
        for index, (vector, part) in enumerate(zip(vectors, parts, strict=True)):
            items.append(
                {
                    "index": index,
                    "embed_dtype": self.dtype,
                    "endianness": self.endianness,
                    "start": start,
                    "end": start + len(part),
                    "shape": list(vector.shape),
                }
            )
            start += len(part)
        told = {name: fields[name] for name in ("id", "created", "model")}
        return {**told, "data": items, "usage": fields["usage"]}


LITTLE: Final = Encoding("base64", endianness="little")


def as_base64(vector: Floats) -> str:
    """Return the bytes of float32, the least significant first, as text."""
    text: str = LITTLE.told(vector)
    return text
