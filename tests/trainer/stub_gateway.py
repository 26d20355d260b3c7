"""A stub gateway for trainer tests: the administration wire over real HTTP, groups sampled from a real tiny model.

It keeps leases, acknowledgements and checkpoints the way the wire says (provisional until durable, returned on resume)
and samples each group from the version that is live, recording log-probabilities with transformers' own forward.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from tests.statuses import status
from turngate.proxy import wire
from turngate.proxy.rows import Row

KEY = "tg-admin-test"
POLICY = "policy"


class StubGateway:
    """Hands out `prepared` groups, then samples from `model`. `script` sets the rewards of the n-th group, else even
    token ids are rewarded; `lag` keeps sampling that many versions behind."""

    def __init__(self, model: Path | None, *, group_size: int = 3, completion_tokens: int = 6, lag: int = 0) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = None
        if model is not None:
            self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.prepared: list[wire.LeasedGroup] = []
        self.group_size = group_size
        self.completion_tokens = completion_tokens
        self.lag = lag
        self.script: dict[int, list[float]] = {}
        self.groups: dict[str, wire.LeasedGroup] = {}
        self.state: dict[str, str] = {}
        self.acks: dict[str, tuple[int, wire.GroupAck]] = {}
        self.history: list[tuple[str, str, int]] = []
        self.live_at_ack: dict[str, int] = {}
        self.versions: list[wire.AdapterInfo] = []
        self.durable_steps: list[int] = []
        self.resumed: list[int] = []
        self.beats: Counter[str] = Counter()
        self.failures = 0
        self.fail_publications = 0
        self.engines_away = 0
        self.limit = 10_000
        self._epochs: dict[str, int] = {}
        self._lock = threading.RLock()
        self._random = torch.Generator().manual_seed(1)

    def __enter__(self) -> Self:
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                self.answer(*stub.post(self.path, body, self.headers.get("authorization", "")))

            def do_GET(self) -> None:
                self.answer(*stub.get(self.path))

            def answer(self, status: int, value: Any) -> None:
                data = b"" if value is None else json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def live(self) -> int:
        return self.versions[-1].version if self.versions else 0

    def post(self, path: str, body: bytes, key: str) -> tuple[int, Any]:
        with self._lock:
            if key != f"Bearer {KEY}":
                return 401, {"error": {"message": "wrong administration key"}}
            if self.failures > 0:
                self.failures -= 1
                return 503, {"error": {"message": "starting"}}
            if path == "/leases":
                return 200, self._lease(wire.NewLease.model_validate_json(body)).model_dump()
            if path.startswith("/leases/") and path.endswith("/heartbeat"):
                beat = wire.Heartbeat.model_validate_json(body)
                good = self._epochs.get(path.split("/")[2]) == beat.epoch
                self.beats[path.split("/")[2]] += good
                return (204, None) if good else (409, {"error": {"message": "stale epoch"}})
            if path.startswith("/leases/") and path.endswith("/ack"):
                return self._ack(path.split("/")[2], wire.AckLease.model_validate_json(body))
            if path == "/checkpoints":
                self.durable_steps.append(wire.DurableStep.model_validate_json(body).step)
                return 204, None
            if path == "/resume":
                return 200, self._resume(wire.Resume.model_validate_json(body).step)
            if path == "/adapters" and self.engines_away > 0:
                self.engines_away -= 1
                return 503, {"error": {"message": "no engine answers now"}}
            if path == "/adapters":
                return self._publish(wire.PublishAdapter.model_validate_json(body))
        return 404, {"error": {"message": f"no {path}"}}

    def get(self, path: str) -> tuple[int, Any]:
        with self._lock:
            info = wire.PolicyInfo(policy=POLICY, base_model="tiny", version=self.live, live=self.versions[-2:])
            return 200, (
                status(Counter(self.state.values()), policies=[info]) if path == "/status" else info
            ).model_dump()

    def _lease(self, new: wire.NewLease) -> wire.Lease:
        group = next((g for g, state in self.state.items() if state == "ready"), None)
        if group is None:
            if len(self.groups) >= self.limit:
                return wire.Lease(lease="", epoch=0, groups=[])
            if not self.prepared and self.model is None:
                return wire.Lease(lease="", epoch=0, groups=[])
            made = self.prepared.pop(0) if self.prepared else self._sample_group(len(self.groups))
            self.groups[made.id] = made
            group = made.id
        self.state[group] = "leased"
        lease = f"lease-{group}"
        self._epochs[lease] = self._epochs.get(lease, 0) + 1
        return wire.Lease(lease=lease, epoch=self._epochs[lease], groups=[self.groups[group]])

    def _ack(self, lease: str, ack: wire.AckLease) -> tuple[int, Any]:
        if self._epochs.get(lease) != ack.epoch:
            return 409, {"error": {"message": "stale epoch"}}
        for group in ack.groups:
            self.state[group.group] = group.fate
            self.acks[group.group] = (ack.step, group)
            self.history.append((group.group, group.fate, ack.step))
            self.live_at_ack[group.group] = self.live
        return 204, None

    def _resume(self, step: int) -> dict[str, int]:
        self.resumed.append(step)
        back = [g for g, s in self.state.items() if s == "leased" or (g in self.acks and self.acks[g][0] > step)]
        for group in back:
            self.state[group] = "ready"
            self.acks.pop(group, None)
            self._epochs[f"lease-{group}"] = self._epochs.get(f"lease-{group}", 0) + 1
        return wire.Resumed(returned_groups=len(back)).model_dump()

    def _publish(self, new: wire.PublishAdapter) -> tuple[int, Any]:
        version = self.live + 1
        failed = self.fail_publications > 0
        self.fail_publications -= failed
        info = wire.AdapterInfo(
            policy=new.policy,
            version=version,
            name=f"policy-test-v{version}",
            path=new.path,
            step=new.step,
            state="failed" if failed else "live",
            cause="no room" if failed else None,
            published_at_ns=0,
        )
        if not failed:
            self.versions.append(info)
        return 200, info.model_dump()

    def _sample_group(self, number: int) -> wire.LeasedGroup:
        live = self.versions[: len(self.versions) - self.lag] if self.lag else self.versions
        version = live[-1].version if live else 0
        prompt = [1, 9690, 198, *((number * 37 + i * 11) % 4000 + 100 for i in range(5))]
        sampled = self._sample(prompt, live[-1].path if live else None)
        given = self.script.get(number)
        rollouts = []
        for i, (ids, logprobs) in enumerate(sampled):
            rollout, row = f"r{number}-{i}", None
            reward = given[i] if given is not None else sum(t % 2 == 0 for t in ids) / len(ids) + i * 1e-3
            full = np.asarray([*prompt, *ids], dtype=np.int32)
            mask = np.arange(len(full)) >= len(prompt)
            recorded = np.concatenate([np.zeros(len(prompt)), logprobs]).astype(np.float32)
            row = Row(rollout, (f"t{rollout}",), full, mask, recorded, np.where(mask, version, -1).astype(np.int32))
            rollouts.append(
                wire.LeasedRollout(
                    id=rollout,
                    outcome="scored",
                    cause=None,
                    reward=reward,
                    rewards={},
                    version=version,
                    rows=[wire.WireRow.pack(row)],
                )
            )
        return wire.LeasedGroup(id=f"g{number}", task=f"task{number}", rollouts=rollouts)

    @torch.no_grad()
    def _sample(self, prompt: list[int], adapter: str | None) -> list[tuple[list[int], np.ndarray]]:
        model: Any = self.model
        if adapter is not None:
            from peft import PeftModel

            model = PeftModel.from_pretrained(self.model, adapter)
        out = []
        for _ in range(self.group_size):
            ids = list(prompt)
            logprobs = []
            for _ in range(self.completion_tokens):
                row = model(input_ids=torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
                token = int(torch.multinomial(row.exp(), 1, generator=self._random))
                ids.append(token)
                logprobs.append(float(row[token]))
            out.append((ids[len(prompt) :], np.asarray(logprobs)))
        if adapter is not None:
            self.model = model.unload()
        return out
