"""The harness matrix: real agents, scripted answers, and what must come out, written down by hand before a run."""
