"""Validate replies and events of /v1/messages, one per line of stdin, with the types of the package anthropic."""

from __future__ import annotations

import json
import sys

from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from pydantic import TypeAdapter, ValidationError

EVENT, REPLY, COUNT = (TypeAdapter(kind) for kind in (RawMessageStreamEvent, Message, MessageTokensCount))

for line in sys.stdin:
    value = json.loads(line)
    kind = REPLY if value.get("type") == "message" else EVENT if "type" in value else COUNT
    # Pings and errors have no type of their own in the package.
    if value.get("type") in ("ping", "error"):
        continue
    try:
        kind.validate_json(line, strict=True)
    except ValidationError as error:
        print(json.dumps(f"{value.get('type')}: {error}"))
