"""Task formats, reward reading and the sample task sets.

Values only: nothing here starts a process or knows a harness or the gateway.
"""
