"""GET /v1/models and /v1/models/{id}: what is served and how much context it has."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from freetoken.errors import UnknownModel
from freetoken.server.http import json_response
from freetoken.server.state import STATE
from freetoken.types import ModelCard


async def list_models(request: web.Request) -> web.Response:
    """List the one served model."""
    card = request.app[STATE].ready().engine.card
    return json_response({"object": "list", "data": [_model(card, card.id)]})


async def get_model(request: web.Request) -> web.Response:
    """Describe the served model under the name that was asked for; 404 for any other."""
    name = request.match_info["id"]
    state = request.app[STATE]
    card = state.ready().engine.card
    if name == "default":
        raise UnknownModel(name, card.id)
    return json_response(_model(state.model(name).engine.card, name))


def _model(card: ModelCard, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": card.created,
        "owned_by": "freetoken",
        # Not OpenAI's, but agents read one or the other. The usable context, not the model's claim.
        "context_length": card.context,
        "max_model_len": card.context,
    }
