"""Connections whose other host may be gone without a word.

Times are seconds.
"""

from __future__ import annotations

import socket


def end_when_cut_off(connection: socket.socket, *, silent_s: int) -> None:
    """Have the kernel end a connection whose other host is silent for so long.

    The kernel answers for a process that is stopped, or busy.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    period_s = silent_s // 6
    for option, value in (
        (socket.TCP_KEEPIDLE, period_s),
        (socket.TCP_KEEPINTVL, period_s),
        (socket.TCP_KEEPCNT, 5),
        (socket.TCP_USER_TIMEOUT, silent_s * 1000),  # for what was sent and not acknowledged
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
