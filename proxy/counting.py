"""How long a turn's prompt would be: built as the turn's would be, splice included, and then thrown away.

Exact because it is the same code on the same history. It must keep nothing: no turn, no request of a budget.
"""

from __future__ import annotations

from turngate.proxy.ask import Ask
from turngate.proxy.engine.errors import ContextOverflow, EngineError
from turngate.proxy.errors import BadRequest
from turngate.proxy.exchange import engine_refusal
from turngate.proxy.gateway import Gateway
from turngate.proxy.prompting import build_prompt
from turngate.proxy.sessions import Session


async def prompt_tokens(gateway: Gateway, session: Session, ask: Ask) -> int:
    """The number of prompt tokens that a turn with this ask would report now.

    Raises:
        BadRequest: the engine cannot render without sampling, or the prompt is longer than its context.
        GatewayRefusal: the engine refused to render, or is away.
    """
    if not gateway.exact:
        raise BadRequest("tokens cannot be counted: this engine renders no prompts (docs/engines.md says which do)")
    plan = session.index.plan(ask.messages, ask.tools)
    engines = gateway.engines.of(session.id)
    try:
        prompt = await build_prompt(engines, gateway.facts, gateway.stubs, session, ask, plan)
    except ContextOverflow as error:
        limit = gateway.capabilities.max_model_len
        raise BadRequest(f"the prompt is longer than the context of {limit} tokens", code="context_overflow") from error
    except EngineError as error:
        gateway.metrics.engine_error(error)
        raise engine_refusal(error, gateway.replicas.anonymous(str(error))) from error
    return len(prompt.ids)
