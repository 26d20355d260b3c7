"""The official google-genai SDK on a rollout's base URL, and conversations as its users write them."""

from __future__ import annotations

import random
from typing import Any

from google import genai
from google.genai import types

from tests.gateway_process import GatewayProcess
from turngate.proxy import wire

TOOLS: list[Any] = [
    types.Tool(
        function_declarations=[
            types.FunctionDeclaration(
                name=name,
                description=name,
                parameters=types.Schema(
                    type=types.Type.OBJECT,
                    properties={"path": types.Schema(type=types.Type.STRING, nullable=True)},
                ),
            )
            for name in ("read", "bash")
        ]
    )
]
CONFIG = types.GenerateContentConfig(
    tools=TOOLS,
    system_instruction="Be brief.",
    automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
)


def sdk(base_url: str, key: str = "unused") -> genai.Client:
    """A client as users make it; the SDK adds `/v1beta/models/…`."""
    return genai.Client(api_key=key, http_options=types.HttpOptions(base_url=base_url, timeout=120_000))


def session(gateway: GatewayProcess, **new: object) -> tuple[wire.RolloutCreated, genai.Client]:
    """A new rollout and a client on its base URL as it is."""
    created = gateway.client.create_rollout(wire.NewRollout.model_validate({"task": "test", **new}))
    return created, sdk(created.base_url)


def say(text: str) -> types.Content:
    """A user's content."""
    return types.Content(role="user", parts=[types.Part(text=text)])


def ask(client: genai.Client, contents: Any, *, stream: bool, config: Any = CONFIG) -> tuple[list[types.Content], Any]:
    """The model's contents, one for each event that has parts, and the last response."""
    if stream:
        events = list(client.models.generate_content_stream(model="m", contents=contents, config=config))
    else:
        events = [client.models.generate_content(model="m", contents=contents, config=config)]
    found = [event.candidates[0].content for event in events if event.candidates]
    return [content for content in found if content is not None and content.parts], events[-1]


def calls_of(contents: list[types.Content]) -> list[types.FunctionCall]:
    """The function calls among contents."""
    return [part.function_call for content in contents for part in content.parts or () if part.function_call]


def respond(calls: list[types.FunctionCall], rng: random.Random, *, ids: bool) -> types.Content:
    """Responses to calls: with ids in any order, without them in the order of the calls."""
    parts = []
    for i, call in enumerate(calls):
        response = types.FunctionResponse(name=call.name, response={"output": f"done {i} é"})
        response.id = call.id if ids else None
        parts.append(types.Part(function_response=response))
    if ids:
        rng.shuffle(parts)
    return types.Content(role="user", parts=parts)


def converse(client: genai.Client, text: str, turns: int, rng: random.Random, config: Any = CONFIG) -> None:
    """A conversation whose calls go back with our ids, with the client's own, or without any."""
    contents: list[types.Content] = [say(text)]
    for _turn in range(turns):
        said, _ = ask(client, contents, stream=rng.random() < 0.5, config=config)
        calls, ids = calls_of(said), rng.random() < 0.5
        for number, call in enumerate(calls):
            call.id = f"own-{rng.random()}-{number}" if ids else None
        contents += said
        contents.append(respond(calls, rng, ids=ids) if calls else say("Go on."))
