"""What every part of a request's body is: checked to the letter."""

from __future__ import annotations

from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError


class Strict(BaseModel):
    """No unknown fields, but for nulls, which say nothing; and no conversion between types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_unknown_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        fields = cls.model_fields
        known = {fields[name].alias or name for name in fields}
        return {name: each for name, each in body.items() if each is not None or name in known}


def expect(what: str) -> WrapValidator:
    """Return a validator that tells `what` was expected, instead of one error a union member."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            raise PydanticCustomError("union", "should be {what}", {"what": what}) from error

    return WrapValidator(validate)
