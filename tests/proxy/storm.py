"""Bodies and requests that nobody should send: strategies, and a client that sends bytes as they are.

Bodies start from a valid one of a dialect and are spoilt at any path, or in their encoding; requests are put together
from sound and unsound pieces, and may be cut anywhere.
"""

from __future__ import annotations

import copy
import gzip
import json
import re
import socket
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

TURN = re.compile(rb"(?:chatcmpl-|resp_)([0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12})")
MARK = b"GET /smuggled HTTP/1.1\r\nhost: localhost\r\n\r\n"


@dataclass(frozen=True)
class Wire:
    """One dialect as the storm needs it: where it is below a base URL, and a body that uses most of its fields."""

    path: str
    body: Mapping[str, Any]
    ends: bytes

    def turn_of(self, answer: bytes) -> str | None:
        """The turn that a complete answer, whole or streamed, acknowledges; `ends` is only in complete streams."""
        if not answer.startswith(b"{") and not re.search(self.ends, answer):
            return None
        found = TURN.search(answer)
        return None if found is None else str(uuid.UUID(found.group(1).decode()))


def _call(arguments: str) -> dict[str, Any]:
    return {"id": "call1", "type": "function", "function": {"name": "bash", "arguments": arguments}}


WIRES = {
    "chat": Wire(
        "/chat/completions",
        {
            "model": "policy",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "List the files."}], "name": "me"},
                {"role": "assistant", "content": None, "tool_calls": [_call('{"command": "ls"}')]},
                {"role": "tool", "tool_call_id": "call1", "content": "a b"},
                {"role": "user", "content": "Go on."},
            ],
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "bash",
                        "description": "Run it.",
                        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
                    },
                }
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 8,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 20,
            "stop": ["END"],
            "seed": 1,
            "logprobs": False,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "n": 1,
            "user": "me",
            "metadata": {"a": "b"},
        },
        rb"data: \[DONE\]\n\n$",
    ),
    "responses": Wire(
        "/responses",
        {
            "model": "policy",
            "instructions": "Be brief.",
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
                {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
                {"type": "function_call", "call_id": "call1", "name": "bash", "arguments": '{"command": "ls"}'},
                {"type": "function_call_output", "call_id": "call1", "output": "a b"},
                {"type": "message", "role": "user", "content": "Go on."},
            ],
            "tools": [
                {"type": "function", "name": "bash", "parameters": {"type": "object"}, "strict": False},
                {"type": "custom", "name": "apply_patch", "description": "Patch."},
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"format": {"type": "text"}},
            "include": ["reasoning.encrypted_content"],
            "store": False,
            "max_output_tokens": 16,
            "temperature": 0.7,
            "top_p": 0.9,
            "metadata": {"a": "b"},
        },
        rb"event: response\.(completed|incomplete)\n",
    ),
}


def nest(depth: int, *, lists: bool) -> Any:
    """A value that nests `depth` levels."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if lists else {"a": value}
    return value


NASTY = st.one_of(
    st.sampled_from([None, True, False, 0, -1, "", [], {}, [[]], [{}], [None], {"": None}]),
    st.sampled_from([2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**40, 10**400]),
    st.sampled_from([float("nan"), float("inf"), float("-inf"), 1e308, -0.0, 5e-324]),
    st.sampled_from(
        ["\ud800", "a\udfffb", "\x00", "\u2028", "\ufeff", "<|im_end|>", "<|endoftext|>", "\U0001f600", "../.."]
    ),
    st.builds(nest, st.sampled_from([3, 90, 99, 101, 300]), lists=st.booleans()),
    st.sampled_from([1_000, 300_000]).map(lambda size: "long " * (size // 5)),
    st.text(max_size=20),
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3), max_leaves=5
    ),
)


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every value inside a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        yield (*at, key)
        yield from paths(one, (*at, key))


def spoil(body: Mapping[str, Any], path: tuple[Any, ...], how: str, nasty: Any) -> dict[str, Any]:
    """`body` with the value at `path` replaced, left out, wrapped in a list, or given a neighbour."""
    made: dict[str, Any] = copy.deepcopy(dict(body))
    place: Any = made
    for key in path[:-1]:
        place = place[key]
    if how == "drop":
        del place[path[-1]]
    elif how == "wrap":
        place[path[-1]] = [place[path[-1]]]
    elif how == "extend" and isinstance(place, list):
        place.append(nasty)
    elif how == "extend":
        place[str(nasty)[:50]] = nasty
    else:
        place[path[-1]] = nasty
    return made


@st.composite
def spoilt(draw: st.DrawFn, wire: Wire) -> tuple[bytes, dict[str, str]]:
    """The bytes and headers of a body that is wrong somewhere, or odd and right."""
    body = dict(wire.body)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(paths(body)) or [("messages",)]))
        how = draw(st.sampled_from(["replace", "replace", "replace", "drop", "wrap", "extend"]))
        body = spoil(body, path, how, draw(NASTY))
    body["stream"] = draw(st.sampled_from([True, False, False, None, "true", 1]))
    text = json.dumps(body, ensure_ascii=True)
    if draw(st.booleans()) and body:
        key = draw(st.sampled_from(sorted(body)))
        text = f"{text[:-1]}, {json.dumps(key)}: {json.dumps(draw(NASTY))}}}"
    return encoded(draw, text.encode())


def encoded(draw: st.DrawFn, raw: bytes) -> tuple[bytes, dict[str, str]]:
    """Bytes of a JSON text as some clients send them."""
    how = draw(
        st.sampled_from(["", "", "", "", "cut", "byte", "gzip", "named", "utf-16", "bom", "type", "twice", "no"])
    )
    cut = draw(st.integers(0, len(raw)))
    match how:
        case "cut":
            return raw[:cut], {}
        case "byte":
            return raw[:cut] + draw(st.sampled_from([b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x00", b"\\"])) + raw[
                cut:
            ], {}
        case "gzip":
            return gzip.compress(raw, 1), {"content-encoding": "gzip"}
        case "named":
            return raw, {"content-encoding": draw(st.sampled_from(["gzip", "br", "identity", "x", ""]))}
        case "utf-16":
            return raw.decode().encode("utf-16"), {"content-type": "application/json; charset=utf-16"}
        case "bom":
            return b"\xef\xbb\xbf" + raw, {}
        case "type":
            kinds = ["text/plain", "multipart/form-data", "application/x-www-form-urlencoded", "image/png", ";;", ""]
            return raw, {"content-type": draw(st.sampled_from(kinds))}
        case "twice":
            return raw + raw, {}
        case "no":
            return b"", {}
    return raw, {}


def chunked(raw: bytes, size: int) -> bytes:
    """A body in chunked encoding."""
    pieces = [raw[at : at + size] for at in range(0, len(raw), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@st.composite
def requests(draw: st.DrawFn, target: str, raw: bytes) -> bytes:
    """Bytes on a connection: one or several requests for `target`, sound or not, whole or cut."""
    line = draw(
        st.sampled_from(
            [
                *([f"POST {target} HTTP/1.1".encode()] * 6),
                f"POST {target} HTTP/1.0".encode(),
                f"POST http://localhost{target} HTTP/1.1".encode(),
                *(f"{method} {target} HTTP/1.1".encode() for method in ("GET", "HEAD", "OPTIONS", "CONNECT", "PRI")),
                *(b"POST", b"POST * HTTP/1.1", b"\x16\x03\x01", b"", f"POST {target}\xff\x00 HTTP/1.1".encode()),
                *(f"POST {target}{end} HTTP/1.1".encode() for end in ("?a=%", "%00", "%ff", "#x", "/..", "//", ";a")),
            ]
        )
    )
    length = len(raw)
    framing = draw(
        st.sampled_from(
            [
                *([(b"content-length: %d" % length, raw)] * 3),
                *([(b"transfer-encoding: chunked", chunked(raw, 100))] * 3),
                (b"content-length: %d\r\ntransfer-encoding: chunked" % length, chunked(raw, 100)),
                (b"content-length: %d\r\ncontent-length: %d" % (length, length - 1), raw),
                *((b"content-length: " + bad, raw) for bad in (b"-1", b"+5", b"0x5", b"5 5", b"9" * 30, b"", b"5,5")),
                (b"content-length: %d" % (length - 3), raw),
                (b"content-length: %d" % (length + 3), raw),
                *(
                    (b"transfer-encoding: " + bad, chunked(raw, 50))
                    for bad in (b"xchunked", b"chunked, identity", b"gzip")
                ),
                *(
                    (b"transfer-encoding: chunked", bad)
                    for bad in (b"zz\r\n", b"-5\r\nabc", b"f" * 40 + b"\r\n", b"5\r\nabcdefg")
                ),
                (b"transfer-encoding: chunked", chunked(raw, 60)[:-2] + b"x-trailer: 1\r\nhost: evil.example\r\n\r\n"),
                (b"x-none: 1", raw),
            ]
        )
    )
    more = draw(
        st.lists(
            st.sampled_from(
                [
                    *(b"expect: 100-continue", b"connection: close", b"connection: keep-alive, x", b"upgrade: h2c"),
                    *(b"x: \xff\xfe", b"x : 1", b" folded", b"x: a\x00b", b"bare: 1\nx: 2", b"host: evil.example"),
                    *(b"content-type: application/json", b"authorization: Bearer", b"authorization: \xe9"),
                    *(b"x-api-key: ", b"x: " + b"y" * 5000),
                ]
            ),
            max_size=3,
        )
    )
    whole = b"\r\n".join([line, b"host: localhost", framing[0], *more]) + b"\r\n\r\n" + framing[1]
    whole = whole * draw(st.sampled_from([1, 1, 1, 2, 3])) + draw(
        st.sampled_from([b"", b"", MARK, b"\r\n\r\n", b"\x00"])
    )
    return whole[: draw(st.integers(0, len(whole)))] if draw(st.booleans()) else whole


def exchange(port: int, data: bytes, *, wait_s: float, pieces: int = 1) -> bytes:
    """Send bytes in some pieces, tell that there are no more, and take whatever comes within `wait_s` of silence."""
    step = max(1, -(-len(data) // pieces))
    taken = b""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.settimeout(wait_s)
        try:
            for at in range(0, len(data), step):
                client.sendall(data[at : at + step])
            while piece := client.recv(65536):
                taken += piece
        except (TimeoutError, ConnectionError):
            pass
    return taken
