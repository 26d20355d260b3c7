"""A fake vLLM: its wire, a real tokenizer and template, a scripted policy, its own pace. For tests and load."""

from tests.fake_engine.runner import FakeEngine
from tests.fake_engine.script import Script
from tests.fake_engine.settings import FakeSettings, Fault

__all__ = ["FakeEngine", "FakeSettings", "Fault", "Script"]
