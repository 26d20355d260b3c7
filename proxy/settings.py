"""The gateway's settings, read once at start. Each says what it does; `docs/settings.md` is checked against it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from turngate.proxy.logs import LogFormat

TRAINING_SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""What training sessions sample with unless their own policy says otherwise: the model's plain distribution."""


class GatewaySettings(BaseModel):
    """Everything `turngate proxy` can be told."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engines: list[str] = Field(min_length=1, description="base URLs of the vLLM servers, without /v1")
    render: str | None = Field(None, description="base URL of a `vllm launch render` server; default: each engine")
    store: Path = Field(description="folder of the store; made when missing")
    run: str = Field("run", pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="name of the run, part of adapter names")
    policy: str = Field("policy", pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="alias agents ask for")
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8400, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    public_url: str | None = Field(
        None, description="URL put into base_url when agents see another address; with workers > 1 it stands for front"
    )
    workers: int = Field(
        1, ge=1, le=256, description="processes that serve agents, each on its own port; 1: all in one process"
    )
    front: bool = Field(
        False,
        description="with workers > 1: only the main port is used, it relays to the workers; false: base_url names"
        " the worker's port",
    )
    admin_key_file: Path | None = Field(None, description="file of the administration key; default: STORE/admin.key")
    tokenizer: str | None = Field(None, description="folder or hub id of the tokenizer kept with the run")
    durability: Literal["normal", "full"] = Field("normal", description="normal survives a kill, full a power cut")
    mode: Literal["auto", "exact", "transparent"] = Field("auto", description="auto: exact where the engine can")
    max_body_bytes: int = Field(32_000_000, ge=1000, description="largest request body")
    max_sessions: int = Field(10_000, ge=1, description="open sessions at once")
    session_idle_s: float = Field(
        86_400.0,
        ge=0,
        description="an open session without a request for so long is closed as unscorable, cause `session_idle`: its "
        "runner is taken for dead; 0: never",
    )
    max_concurrency: int = Field(2_000, ge=1, description="requests of agents under way at once; more get a 429")
    max_session_concurrency: int = Field(
        64, ge=1, description="the same of one session; its budgets may say less, not more"
    )
    allowed_hosts: list[str] = Field(
        default_factory=list,
        description="more Host names to answer to, * for all; addresses, localhost and public_url's always are",
    )
    max_header_bytes: int = Field(65_536, ge=1_000, description="largest head of a request: its line and headers")
    max_connections: int = Field(8_192, ge=1, description="connections of clients at once; more are closed")
    request_timeout_s: float = Field(60.0, gt=0, description="how long a request may take to arrive whole")
    write_timeout_s: float = Field(300.0, gt=0, description="a client that reads nothing so long is cut off")
    min_free_bytes: int = Field(
        100_000_000, ge=0, description="free disk space below which new turns and rollouts get a 507"
    )
    max_live_versions: int | None = Field(
        None, ge=1, description="adapter versions kept loaded, never above the engine's --max-loras; default: one less"
    )
    keepalive_s: float = Field(
        10.0,
        gt=0,
        description="silence after which a client gets a sign of life: its dialect's own in a stream, blanks before the"
        " JSON of a whole answer, whose status is then 200",
    )
    stream_s: float = Field(
        0.5, ge=0, le=10, description="a streamed answer's tokens are gathered for about so long; 0: each at once"
    )
    reattach_s: float = Field(
        15.0,
        ge=0,
        description="how long a turn outlives its client: the same request, asked again until then, gets its answer;"
        " 0 cancels it at once",
    )
    drain_s: float = Field(
        30.0, ge=0, description="after SIGTERM: how long turns in flight may take to finish; new ones get 503"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="what is logged; info is quiet, debug has a line a turn"
    )
    log_format: LogFormat = Field("json", description="logs on standard error")
    otel: str | None = Field(
        None, description="base URL of an OTLP receiver (HTTP) for spans, a trace a rollout; needs the extra `otel`"
    )
    engine_wait_s: float = Field(600.0, ge=0, description="how long to wait for the engines at start")
    engine_silence_s: float = Field(
        600.0, gt=0, description="silence of an engine in the middle of a turn after which it counts as dead"
    )
    failover_wait_s: float = Field(
        120.0, ge=0, description="how long a turn waits for an engine when none answers; then it fails"
    )
    admission: Literal["wait", "refuse"] = Field(
        "wait", description="what a turn does when its engine is full: wait, or be refused with 429 at once"
    )
    admission_queue: int | None = Field(
        64, ge=1, description="turns that may wait inside one engine; more wait in the gateway"
    )
    admission_kv_usage: float = Field(
        0.95, gt=0, le=1, description="KV cache use of an engine above which only one turn may wait inside it"
    )
    admission_wait_s: float = Field(600.0, gt=0, description="how long a turn waits for a full engine; then 429")
    training_sampling: dict[str, Any] = Field(
        default_factory=lambda: dict(TRAINING_SAMPLING), description="sampling of training sessions by default"
    )

    @property
    def policies(self) -> frozenset[str]:
        """The policies that the gateway serves."""
        return frozenset({self.policy})

    @field_validator("engines", "render", "otel")
    @classmethod
    def _urls(cls, value: list[str] | str | None) -> list[str] | str | None:
        urls = value if isinstance(value, list) else [value] if value is not None else []
        for url in urls:
            if not url.startswith(("http://", "https://")) or url.rstrip("/").endswith("/v1"):
                raise ValueError(
                    f"{url!r} is not the base URL of a server, such as http://127.0.0.1:8000 (without /v1)"
                )
        return value
