"""How vectors are written: types and orders of bytes of base64, and answers of bytes alone."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from onnxport.errors import RequestError
from onnxport.serving.http.batch_file import read_lines
from onnxport.serving.http.encodings import Encoding, Floats
from onnxport.serving.pooling import Embedder
from tests.serving.pooling import vector

from .test_embeddings import Server, serving
from .test_errors import error_of

DTYPES: dict[str, Any] = {
    "float32": np.dtype("f4"),
    "float16": np.dtype("f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
NAMES = {"/v1/embeddings": "embedding", "/pooling": "data"}
TEXTS = ["ab", "the sea"]


def read(octets: bytes, dtype: str, order: str | None) -> Floats:
    """Numbers of bytes, by their first principles: each is turned round where the order is big."""
    size = DTYPES[dtype].itemsize
    each = [octets[at : at + size] for at in range(0, len(octets), size)]
    turned = b"".join(one[::-1] for one in each) if order == "big" else octets
    return np.frombuffer(turned, DTYPES[dtype]).astype(np.float32)


@pytest.mark.parametrize("path", NAMES)
@pytest.mark.parametrize("order", [None, "native", "little", "big"])
async def test_types_and_orders_of_bytes(model_folder: Path, path: str, order: str | None) -> None:
    async with serving(model_folder) as server:
        owns = [vector(server.ids(text)) for text in TEXTS]
        for dtype, kind in DTYPES.items():
            how: dict[str, Any] = {"input": TEXTS, "embed_dtype": dtype, "endianness": order}
            expected = [own.astype(kind).astype(np.float32) for own in owns]
            answer = await server.post(path, encoding_format="base64", **how)
            texts = [one[NAMES[path]] for one in answer.json()["data"]]
            found = [read(base64.b64decode(text), dtype, order) for text in texts]
            np.testing.assert_array_equal(found, expected)
            whole = await server.post(path, encoding_format="bytes_only", **how)
            assert whole.headers["content-type"] == "application/octet-stream"
            assert "metadata" not in whole.headers
            found_all = read(whole.content, dtype, order)
            np.testing.assert_array_equal(found_all, np.concatenate(expected))


async def test_bytes_tell_where_each_vector_is(model_folder: Path) -> None:
    async with serving(model_folder) as server:
        how: dict[str, Any] = {"input": TEXTS, "embed_dtype": "bfloat16", "request_id": "mine"}
        answer = await server.post(encoding_format="bytes", **how)
        told = json.loads(answer.headers["metadata"])
        count = sum(len(server.ids(text)) for text in TEXTS)
        assert (told["id"], told["model"]) == ("embd-mine", "model")
        assert told["usage"]["prompt_tokens"] == told["usage"]["total_tokens"] == count
        for text, one in zip(TEXTS, told["data"], strict=True):
            own = vector(server.ids(text)).astype(ml_dtypes.bfloat16)
            assert one["shape"] == list(own.shape)
            assert (one["embed_dtype"], one["endianness"]) == ("bfloat16", "native")
            assert answer.content[one["start"] : one["end"]] == own.tobytes()
        assert len(answer.content) == told["data"][-1]["end"]


async def test_bytes_of_more_than_a_header_tells(model_folder: Path) -> None:
    async with serving(model_folder, max_queued_requests=999) as server:
        texts = ["a"] * 600
        error = error_of(await server.post(input=texts, encoding_format="bytes"), 400)
        assert error["param"] == "encoding_format"
        assert "bytes_only" in error["message"]
        whole = await server.post(input=texts, encoding_format="bytes_only")
        assert whole.content == vector(server.ids("a")).tobytes() * 600


async def _refused(server: Server, **body: Any) -> dict[str, Any]:
    return error_of(await server.post(input="ab", encoding_format="base64", **body), 400)


async def test_numbers_that_a_type_cannot_hold(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dtype, most in (("float16", 65504.0), ("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)):
        plain = Encoding("base64", dtype)  # type: ignore[arg-type]
        octets = base64.b64decode(plain.told(np.array([most, -1], np.float32)))
        np.testing.assert_array_equal(read(octets, dtype, None), [most, -1])
        with pytest.raises(RequestError, match=f"embed_dtype is {dtype}, and a vector has"):
            plain.told(np.array([1, 2 * most], np.float32))
    async with serving(model_folder, Embedder(normalized=False)) as server:
        monkeypatch.setattr(
            "onnxport.serving.pooling.Pooler.vector", lambda _: np.full(4, 600, np.float32)
        )
        error = await _refused(server, embed_dtype="fp8_e4m3")
        assert error["param"] == "embed_dtype"


def test_a_batch_has_no_bytes() -> None:
    line = {"custom_id": "a", "url": "/v1/embeddings"}
    for form in ("bytes", "bytes_only"):
        body = {"input": "a", "encoding_format": form}
        with pytest.raises(RequestError, match=f"encoding_format {form}; a batch has answers in"):
            read_lines([json.dumps({**line, "body": body}).encode()])
    [one] = read_lines([json.dumps({**line, "body": {"encoding_format": []}}).encode()])
    assert one.custom_id == "a"
