"""The engine client: vLLM's wire in, values out. The rest of the gateway imports from here."""

from turngate.proxy.engine.derenderer import AnswerStream, mint_tool_call_id
from turngate.proxy.engine.errors import ContextOverflow, EngineError, EngineFault, EngineRefused, EngineUnavailable
from turngate.proxy.engine.http import EngineHttp
from turngate.proxy.engine.replica import Derender, Replica
from turngate.proxy.engine.replicas import Replicas
from turngate.proxy.engine.types import Capabilities, Chunk, EngineLoad, GenerateCall, Rendered
from turngate.proxy.engine.wire import derender_request

__all__ = [
    "AnswerStream",
    "Capabilities",
    "Chunk",
    "ContextOverflow",
    "Derender",
    "EngineError",
    "EngineFault",
    "EngineHttp",
    "EngineLoad",
    "EngineRefused",
    "EngineUnavailable",
    "GenerateCall",
    "Rendered",
    "Replica",
    "Replicas",
    "derender_request",
    "mint_tool_call_id",
]
