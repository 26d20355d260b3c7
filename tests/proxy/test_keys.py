"""Secrets are compared in constant time by construction: looked up by hash, or by `compare_digest`, never by `==`.

What a caller can time is a look-up of SHA-256 of what it sent; how much of that agrees with a stored hash says nothing
about a secret. The same two statements serve an unknown secret and a closed session.
"""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

import httpx

import turngate.proxy
from tests.proxy.conftest import Gate
from turngate.proxy import wire
from turngate.proxy.keys import secret_digest

PACKAGE = Path(turngate.proxy.__file__).parent
SECRET_WORDS = {"secret", "api_key", "admin_key", "internal_key", "key_header"}
TAKERS = {
    "keys.py",
    "sessions.py",
    "agent_routes.py",
    "workers/front.py",
    "rollouts.py",
    "admin.py",
    "workers/internal.py",
}


def named(node: ast.expr) -> str:
    """The last word of a name or attribute."""
    if isinstance(node, ast.Call):
        return named(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def comparisons(file: Path) -> list[ast.Compare]:
    """Comparisons of a secret with something that is no constant."""
    return [
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Compare)
        and any(isinstance(how, ast.Eq | ast.NotEq | ast.In | ast.NotIn) for how in node.ops)
        and SECRET_WORDS & {named(one) for one in (node.left, *node.comparators)}
        and not any(isinstance(one, ast.Constant) for one in (node.left, *node.comparators))
    ]


def test_no_code_compares_a_secret_with_anything() -> None:
    files = {file.relative_to(PACKAGE).as_posix(): file for file in PACKAGE.rglob("*.py")}
    assert files.keys() >= TAKERS
    assert {
        name: [ast.unparse(one) for one in comparisons(file)] for name, file in files.items() if comparisons(file)
    } == {}
    for name in ("admin.py", "workers/internal.py"):
        assert "hmac.compare_digest(" in files[name].read_text()


def test_a_comparison_would_be_found(tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    for code in ("x = request.secret == session.secret", "if key in self.secrets and secret not in known: pass"):
        file.write_text(code)
        assert comparisons(file)


def test_a_session_is_known_by_the_hash_of_its_secret_alone() -> None:
    assert secret_digest("tg-é\udcff".encode(errors="surrogateescape").decode("latin-1")) is not None
    assert secret_digest("tg-1") == hashlib.sha256(b"tg-1").digest()
    source = (PACKAGE / "sessions.py").read_text()
    by_secret = source[source.index("def by_secret") : source.index("async def close")]
    assert by_secret.count("secret_digest(secret)") == 1
    body = ast.parse("class S:\n    " + by_secret.rstrip()).body[0]
    uses = [node for node in ast.walk(body) if isinstance(node, ast.Name) and node.id == "secret"]
    assert len(uses) == 1, "besides being hashed the secret is used nowhere"


def test_unknown_is_404_and_closed_410_whatever_the_way(gate: Gate) -> None:
    gateway = gate.says(["Hello."])
    created, _ = gateway.session()
    gateway.client.finish_rollout(created.id, wire.FinishRollout(outcome="cancelled", cause="test_over"))
    near = created.api_key[:-1] + ("0" if created.api_key[-1] != "0" else "1")
    for secret, status in ((created.api_key, 410), (near, 404), ("x", 404), ("tg-" + "0" * 48, 404), ("é", 404)):
        ways = [(f"/s/{secret}/v1", {}), ("/v1", {"x-api-key": secret.encode()})]
        ways.append(("/v1", {"authorization": b"Bearer " + secret.encode()}))
        for way, headers in ways:
            for method, path in (("POST", "/chat/completions"), ("GET", "/models")):
                answer = httpx.request(method, f"{gateway.url}{way}{path}", headers=headers, json={})  # type: ignore[arg-type]
                assert answer.status_code == status, (secret, way, path)
                assert secret not in answer.text or secret == "x"
