"""Agents under test: how each is installed and started, the sandboxes they run in, and the runner that drives them.

The gateway is reached over HTTP only (`turngate.proxy.client`); nothing here may import server code.
"""
