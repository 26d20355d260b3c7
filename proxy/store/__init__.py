"""The durable store: turns, rollouts, groups, leases and adapter versions, in a folder of SQLite files.

Answers an agent saw survive a kill; a second process may read while the gateway writes.
"""
