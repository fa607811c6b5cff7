"""JSON schema validation. `jsonschema.validate` checks the whole schema each time, which takes longer than a body."""

from __future__ import annotations

from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match


def validate(instance: Any, schema: Any) -> None:
    """Raise `jsonschema.ValidationError` if the instance does not match the schema. The schema is not checked."""
    error = best_match(Draft202012Validator(schema).iter_errors(instance))
    if error is not None:
        raise error
