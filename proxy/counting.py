"""How many tokens a prompt would have: built as a turn's is, recorded history included, and not sampled from.

Clients ask before a turn to know whether it fits. Counting leaves no trace: nothing is recorded, nothing is budgeted.
"""

from __future__ import annotations

from turngate.proxy.ask import Ask
from turngate.proxy.engine.errors import EngineError
from turngate.proxy.errors import BadRequest
from turngate.proxy.exchange import engine_refusal
from turngate.proxy.gateway import Gateway
from turngate.proxy.prompting import build_prompt
from turngate.proxy.sessions import Session


async def count_tokens(gateway: Gateway, session: Session, ask: Ask) -> int:
    """The tokens of the prompt that this ask would be sampled from now.

    Raises:
        BadRequest: the engine has no renderer, or refuses the conversation.
        EngineTrouble: no engine answers.
    """
    if not gateway.exact:
        raise BadRequest("this engine has no renderer, so tokens cannot be counted: leave counting out")
    engines = gateway.engines.of(session.id)
    plan = session.index.plan(ask.messages, ask.tools)
    try:
        prompt = await build_prompt(engines, gateway.facts, gateway.stubs, session, ask, plan)
    except EngineError as error:
        raise engine_refusal(error, gateway.replicas.anonymous(str(error))) from error
    return len(prompt.ids)
