"""Ports for servers that other processes start later."""

import socket


def held_port() -> socket.socket:
    """Returns a socket whose port no other process gets until the socket is closed.

    A server of this test's processes can listen there meanwhile, if it sets SO_REUSEADDR. torch's TCPStore does.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held
