"""The viewer's web application: a handful of read-only pages over a `StoreReader`.

Server-rendered so that every page reads without a script and opens at once. Text in a store was written by models and
agents, so everything is escaped, no inline script runs (CSP), and only known Host names are answered.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from turngate.proxy.hosts import is_allowed
from turngate.proxy.store.errors import StoreError
from turngate.proxy.viewer import charts, pages
from turngate.proxy.viewer.format import FILTERS
from turngate.proxy.viewer.index import IndexCache, advantages, duration_ns, facets, outcome_word, select
from turngate.proxy.viewer.messages import pretty
from turngate.proxy.viewer.query import ListQuery
from turngate.proxy.viewer.reader import StoreReader, ViewerError
from turngate.proxy.viewer.rollout_pages import rollout_context, rows_context, turn_context
from turngate.proxy.viewer.text import TokenText

HERE = Path(__file__).parent
SECURITY_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def create_app(reader: StoreReader, *, hosts: Collection[str] = ()) -> Starlette:
    """The application. `hosts` are further Host names it answers, by the rules of `turngate.proxy.hosts`."""
    site = Site(reader)
    routes = [
        Route("/", site.page(site.overview)),
        Route("/state", site.state),
        Route("/groups/{group:path}", site.page(site.group)),
        Route("/rollouts/{rollout}", site.page(site.rollout)),
        Route("/rollouts/{rollout}/rows", site.page(site.rows)),
        Route("/rollouts/{rollout}/turns/{seq:int}", site.page(site.turn)),
        Mount("/static", StaticFiles(directory=HERE / "static")),
    ]
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(Guard, hosts=frozenset(hosts)),
            Middleware(GZipMiddleware, minimum_size=20_000, compresslevel=3),
        ],
        exception_handlers={404: site.missing, StoreError: site.unreadable, ViewerError: site.unreadable},
    )


class Guard:
    """Answers only known Host names (a page of another site must not read the store by DNS rebinding)."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse an unknown host with 421; add the security headers to every answer."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in _HEADERS)]
            await send(message)

        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
        if is_allowed(host, self.hosts):
            await self.app(scope, receive, send_guarded)
            return
        refusal = PlainTextResponse(
            f"This viewer does not answer to the host {host!r}. Open it by the printed address, or start it with"
            " --allow-host NAME.\n",
            status_code=421,
        )
        await refusal(scope, receive, send_guarded)


_HEADERS = tuple(SECURITY_HEADERS.items())


class Site:
    """Pages over one reader: each method gives a template's name and context, or None for not found."""

    def __init__(self, reader: StoreReader) -> None:
        self.reader, self.name = reader, reader.name
        self.index = IndexCache(reader, time.monotonic)
        self.environment = make_environment()
        self._text: TokenText | None = None

    @property
    def text(self) -> TokenText:
        """Token text; the tokenizer is looked for until it is there, since a live run may write it late."""
        if self._text is None or not self._text.known:
            self._text = TokenText(self.reader.tokenizer_file)
        return self._text

    def page(self, view: Callable[[Request], tuple[str, dict[str, Any]] | None]) -> Callable[..., Awaitable[Response]]:
        """An endpoint that renders `view` in a thread, off the event loop."""

        async def endpoint(request: Request) -> Response:
            made = await run_in_threadpool(lambda: self._render(view, request))
            return made if made is not None else self.missing(request, None)

        return endpoint

    def missing(self, request: Request, _: Exception | None) -> Response:
        """The page for what is not there."""
        words = {"title": "Nothing here", "words": "This run has no such page, rollout, group or turn."}
        return HTMLResponse(self.environment.get_template("words.html").render(self._common() | words), 404)

    def unreadable(self, request: Request, error: Exception) -> Response:
        """The page for a store that cannot be read."""
        words = {"title": "This cannot be read", "words": str(error)}
        return HTMLResponse(self.environment.get_template("words.html").render(self._common() | words), 500)

    def state(self, request: Request) -> Response:
        """A word that changes when something was written."""
        return PlainTextResponse(self.index.state_now(), headers={"cache-control": "no-store"})

    def overview(self, request: Request) -> tuple[str, dict[str, Any]]:
        """The run's summary and the list of rollouts."""
        index = self.index.get()
        query = ListQuery.parse(request.query_params)
        chosen = select(index, query.filters, query.sort, query.descending)
        line = charts.reward_line(index.rollouts, [version.info for version in index.versions])
        return "overview.html", {
            "live": self.index.state_shown(),
            "summary": index.summary,
            "reward_scale": max([1.0, *(line.reward_mean or 0.0 for line in index.versions)]),
            "policies": len({line.policy for line in index.versions}),
            "versions": index.versions,
            "line": line,
            "query": query,
            "facets": facets(index),
            "page": query.cut(chosen),
        }

    def group(self, request: Request) -> tuple[str, dict[str, Any]] | None:
        """All rollouts of a group side by side."""
        index = self.index.get()
        name = request.path_params["group"]
        members = index.groups.get(name)
        if not members:
            return None
        lanes = [(info, pages.cards(self.reader.turns(info.id)), self._answer(info.id)) for info in members]
        return "group.html", {"group": name, "lanes": lanes, "advantages": advantages(members)}

    def rollout(self, request: Request) -> tuple[str, dict[str, Any]] | None:
        """One rollout: timeline and conversation."""
        context = rollout_context(self.index.get(), self.reader, request.path_params["rollout"])
        if context is None:
            return None
        live = self.index.state_shown() if context["info"].state == "open" else ""
        return "rollout.html", context | {"live": live}

    def rows(self, request: Request) -> tuple[str, dict[str, Any]] | None:
        """One rollout as the trainer sees it."""
        context = rows_context(
            self.index.get(), self.reader, self.text, request.path_params["rollout"], whole=_whole(request)
        )
        return None if context is None else ("rows.html", context)

    def turn(self, request: Request) -> tuple[str, dict[str, Any]] | None:
        """One turn, token by token."""
        rollout, seq = request.path_params["rollout"], request.path_params["seq"]
        context = turn_context(self.index.get(), self.reader, self.text, rollout, seq, whole=_whole(request))
        return None if context is None else ("turn.html", context)

    def _answer(self, rollout: str) -> str:
        main = [turn for turn in self.reader.turns(rollout) if turn.label == "main"]
        content = main[-1].response.get("content") if main else ""
        return content if isinstance(content, str) else pretty(content)

    def _render(
        self, view: Callable[[Request], tuple[str, dict[str, Any]] | None], request: Request
    ) -> HTMLResponse | None:
        made = view(request)
        if made is None:
            return None
        name, context = made
        return HTMLResponse(self.environment.get_template(name).render(self._common() | context))

    def _common(self) -> dict[str, Any]:
        return {"run": self.name, "live": ""}


def make_environment() -> Environment:
    """Templates with escaping on and undefined names as errors."""
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(FILTERS)
    environment.filters.update(outcome=outcome_word, duration_ns=duration_ns, pretty=pretty, path=_quoted)
    environment.filters.update(query=urlencode, asdict=asdict)
    return environment


def _whole(request: Request) -> bool:
    return request.query_params.get("tokens") == "all"


def _quoted(value: str) -> str:
    return quote(value, safe="/")
