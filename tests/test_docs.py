"""The documentation says what the code does: generated pages are current, and every page linked exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_generated_pages_are_what_the_code_says() -> None:
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_setting_and_metric_has_a_description() -> None:
    text = (ROOT / "docs/settings.md").read_text() + (ROOT / "docs/metrics.md").read_text()
    assert "| None |" not in text


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_links_to_a_place_in_a_page_lead_to_one() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target, place in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
            text = ((page.parent / target) if target else page).read_text()
            heads = [re.sub(r"[^\w\- ]", "", head.lower()) for head in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
            places = [head.strip().replace(" ", "-") for head in heads] + re.findall(r'<a id="([^"]+)"', text)
            assert place in places, f"{page.name} links to {target}#{place}"
