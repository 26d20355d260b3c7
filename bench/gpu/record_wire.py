"""Record what a vLLM server says on every endpoint the gateway uses, as small JSON files for the wire tests.

Plain httpx and the standard library, so that it runs beside any engine version:

    python bench/gpu/record_wire.py http://127.0.0.1:8000 tests/fixtures/wire/vllm-0.32/hermes

Machine names and paths are taken out; ids, numbers and shapes are kept as they came. Prints a JSON summary.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import httpx

TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
MESSAGES = [{"role": "user", "content": "Name three colours."}]
CALL_TEXT = 'Now.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls  é"}}\n</tool_call>'


class Recorder:
    """Sends requests and keeps the exchanges by name."""

    def __init__(self, url: str, out: pathlib.Path) -> None:
        self.http = httpx.Client(base_url=url, timeout=300.0, trust_env=False)
        self.out = out
        self.statuses: dict[str, int] = {}

    def call(self, name: str, method: str, path: str, body: Any = None) -> Any:
        """One exchange; the parsed answer."""
        response = self.http.request(method, path, json=body)
        try:
            value = response.json()
        except ValueError:
            value = response.text
        self._keep(name, method, path, body, response.status_code, {"response": value})
        return value

    def stream(self, name: str, path: str, body: Any) -> list[Any]:
        """One exchange whose answer is a stream; its events, `[DONE]` as a string."""
        events: list[Any] = []
        with self.http.stream("POST", path, json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data:"):
                    data = line[5:].strip()
                    events.append(data if data == "[DONE]" else json.loads(data))
        self._keep(name, "POST", path, body, response.status_code, {"events": events})
        return events

    def _keep(self, name: str, method: str, path: str, body: Any, status: int, answer: dict[str, Any]) -> None:
        self.statuses[name] = status
        exchange = _scrubbed({"method": method, "path": path, "request": body, "status": status, **answer})
        text = json.dumps(exchange, ensure_ascii=False, indent=1)
        (self.out / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def record(url: str, out: pathlib.Path) -> dict[str, Any]:
    """Record everything; a summary of names and statuses."""
    out.mkdir(parents=True, exist_ok=True)
    rec = Recorder(url, out)
    version = rec.call("version", "GET", "/version")
    models = rec.call("models", "GET", "/v1/models")
    model = models["data"][0]["id"]
    rendered = _record_render(rec, model)
    if isinstance(rendered, dict) and "token_ids" in rendered:
        _record_generate(rec, model, rendered)
        _record_derender(rec, model, rendered)
    chat = {
        "model": model,
        "messages": MESSAGES,
        "max_tokens": 4,
        "seed": 1,
        "return_token_ids": True,
        "logprobs": True,
    }
    rec.call("chat", "POST", "/v1/chat/completions", chat)
    rec.stream(
        "chat_stream",
        "/v1/chat/completions",
        chat | {"stream": True, "stream_options": {"include_usage": True}},
    )
    rec.call("unknown_adapter", "POST", "/v1/unload_lora_adapter", {"lora_name": "nobody"})
    return {"version": version, "model": model, "out": out.name, "statuses": rec.statuses}


def _record_render(rec: Recorder, model: str) -> Any:
    body = {"model": model, "messages": MESSAGES, "max_tokens": 4, "temperature": 0.8, "stop": ["zebra"], "seed": 1}
    rendered = rec.call("render", "POST", "/v1/chat/completions/render", body)
    rec.call("render_tools", "POST", "/v1/chat/completions/render", body | {"tools": [TOOL]})
    long = {"model": model, "messages": [{"role": "user", "content": "x y " * 40000}]}
    rec.call("render_overflow", "POST", "/v1/chat/completions/render", long)
    # The request only had to be long.
    file = rec.out / "render_overflow.json"
    exchange = json.loads(file.read_text(encoding="utf-8"))
    exchange["request"]["messages"][0]["content"] = "x y ..."
    file.write_text(json.dumps(exchange, indent=1) + "\n", encoding="utf-8")
    return rendered


def _record_generate(rec: Recorder, model: str, rendered: dict[str, Any]) -> None:
    path = "/inference/v1/generate"
    params = {**rendered["sampling_params"], "logprobs": 0}
    body = {"model": model, "request_id": "fixture", "token_ids": rendered["token_ids"], "sampling_params": params}
    rec.call("generate", "POST", path, body | {"stream": False})
    rec.stream("generate_stream", path, body | {"stream": True, "request_id": "fixture-2"})
    top = body | {"stream": True, "request_id": "fixture-3", "sampling_params": {**params, "logprobs": 3}}
    rec.stream("generate_stream_top", path, top)
    rec.call("generate_unknown_model", "POST", path, body | {"model": "nobody"})


def _record_derender(rec: Recorder, model: str, rendered: dict[str, Any]) -> None:
    path = "/v1/chat/completions/derender"
    tokens = rec.call(
        "tokenize", "POST", "/tokenize", {"model": model, "prompt": CALL_TEXT, "add_special_tokens": False}
    )
    ids = tokens["tokens"]
    state = None
    pieces = [(ids[:3], None), (ids[3 : len(ids) // 2], None), (ids[len(ids) // 2 :], None), ([], "stop")]
    for number, (piece, finish) in enumerate(pieces):
        choice = {"index": 0, "token_ids": piece, "finish_reason": finish, "stop_reason": None}
        body = {
            "stream": True,
            "model": model,
            "generate_chunk": {"request_id": "fixture", "choices": [choice]},
            "stream_state": state,
            "chat_request": {"model": model, "messages": [], "tools": [TOOL]},
            "prompt_token_ids": rendered["token_ids"][-8:],
        }
        answer = rec.call(f"derender_{number}", "POST", path, body)
        state = answer.get("stream_state") if isinstance(answer, dict) else None
    whole = {"request_id": "fixture", "choices": [{"index": 0, "token_ids": ids, "finish_reason": "stop"}]}
    body = {"model": model, "generate_response": whole}
    rec.call("derender_whole_plain", "POST", path, body)
    about = {"model": model, "messages": [], "tools": [TOOL]}
    rec.call("derender_whole", "POST", path, body | {"chat_request": about})


def _scrubbed(value: Any) -> Any:
    """`value` without where the model lies on this machine."""
    if isinstance(value, dict):
        return {key: "MODEL" if key == "root" else _scrubbed(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_scrubbed(one) for one in value]
    return value


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="base URL of the engine")
    parser.add_argument("out", type=pathlib.Path, help="folder for the JSON files")
    args = parser.parse_args()
    print(json.dumps(record(args.url, args.out)))


if __name__ == "__main__":
    main()
