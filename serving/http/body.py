"""What every body of a request is: its fields are obeyed, or neutral, or unknown and refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import model_validator

from onnxport.serving.http.fields import check_json, check_neutral
from onnxport.serving.http.strict import Strict


class Body(Strict):
    """A body of JSON, checked whole before its fields are.

    Attributes:
        neutral: fields that are accepted with values that change nothing, and then dropped.
    """

    neutral: ClassVar[Mapping[str, Any]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        check_json(body)
        check_neutral(body, cls.neutral)
        return {name: value for name, value in cls.means(body).items() if name not in cls.neutral}

    @classmethod
    def means(cls, body: dict[str, Any]) -> dict[str, Any]:
        """Return a body as it was sent by the names that the fields have here."""
        return body
