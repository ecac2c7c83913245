"""How ranks of this machine meet: nobody else can join, and nobody leaves too early.

Rank 0 of a process group serves a ``TCPStore``: a small key-value server where the
ranks find each other. PyTorch makes it listen on every network interface, also when its
address is 127.0.0.1, so everybody on the same network can talk to it.
:func:`bind_stores_to_loopback` makes such a server listen on the loopback interface
only, where nobody but this machine can reach it.

``init_process_group`` with gloo returns when this rank has its connections. Others may
still be making theirs; if this one then ends, or leaves the group, theirs fail
("connection closed by peer"). :func:`end_init_together` makes it wait for them.
"""

import errno
import functools
import ipaddress
import os
import socket
import sys
from datetime import timedelta

from torch.distributed import DistNetworkError, TCPStore, distributed_c10d

_listeners: dict[int, int] = {}  # port -> descriptor of the server's socket
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_listeners.clear)  # its parent serves them


def bind_stores_to_loopback() -> None:
    """Make the stores that this process serves on loopback listen there only.

    It concerns every ``TCPStore(..., is_master=True)`` whose host is a loopback
    address (127.0.0.0/8, ``::1``, ``localhost`` or another name for one), whoever
    makes it: ``init_process_group`` with ``env://`` or ``tcp://``, or the user. A store
    for another host is left to PyTorch, and so are servers that exist already. Calling
    it twice changes nothing more. On Windows it does nothing, because PyTorch cannot
    take over a socket there.

    Afterwards a server raises what it did before where it cannot listen:
    ``torch.distributed.DistNetworkError`` with the name of the error, such as
    EADDRINUSE for a port that is taken.

    The constructor is replaced, not the class: whoever has imported ``TCPStore``
    before is served too, and ``isinstance`` goes on working.
    """
    if sys.platform == "win32" or hasattr(TCPStore.__init__, "__wrapped__"):
        return
    pytorch_init = TCPStore.__init__

    @functools.wraps(pytorch_init)
    def __init__(
        self: TCPStore,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = timedelta(seconds=300),
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
    ) -> None:
        def make(port=port, listen_fd=master_listen_fd):
            pytorch_init(
                self,
                host_name,
                port,
                world_size,
                is_master,
                timeout,
                wait_for_workers,
                multi_tenant,
                listen_fd,
                use_libuv,
            )

        address = loopback_address(host_name) if is_master else None
        if address is None or master_listen_fd is not None:
            return make()
        try:
            listener = _listen(address, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and multi_tenant and _is_served(port):
                return make()  # PyTorch shares the server this process has there
            raise DistNetworkError(_why_not(error, port)) from None
        except (OverflowError, TypeError):
            return make()  # not a port: PyTorch has the words for that too
        port, descriptor = listener.getsockname()[1], listener.fileno()
        try:
            make(port, listen_fd=descriptor)
        except TypeError:  # a wrong argument: PyTorch has not taken the socket over
            listener.close()
            raise
        finally:
            listener.detach()  # it is the store's now, which closes it at its end
        _listeners[port] = descriptor

    TCPStore.__init__ = __init__


def end_init_together() -> None:
    """Let ``init_process_group`` return on no rank before all are through it.

    PyTorch has that, for those who set TORCH_DIST_INIT_BARRIER=1 in the environment;
    but ``new_group`` then waits too, also for ranks that have no part in the group.
    Calling it twice changes nothing more. It costs a question to the store or two: 3 ms
    for 4 ranks.
    """
    pytorchs = distributed_c10d._is_barrier_after_init
    if hasattr(pytorchs, "__wrapped__"):
        return

    @functools.wraps(pytorchs)
    def is_barrier_after_init() -> int:
        caller = sys._getframe(1).f_code.co_name
        return 1 if caller == "init_process_group" else pytorchs()

    distributed_c10d._is_barrier_after_init = is_barrier_after_init


def loopback_address(host: str) -> str | None:
    """The loopback address that ``host`` means, or None if it means another machine.

    A name with several addresses counts only if all of them are loopback; IPv4 is
    preferred, because a client that tries ``::1`` first goes on to 127.0.0.1.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None  # an unknown name: PyTorch has the words for that
    addresses = sorted({info[4][0] for info in found}, key=lambda a: ":" in a)
    if all(ipaddress.ip_address(address).is_loopback for address in addresses):
        return addresses[0]
    return None


def _listen(address: str, port: int) -> socket.socket:
    """A socket that listens on ``address``; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # As PyTorch does: a port whose last connections are still closing is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(socket.SOMAXCONN)
    except BaseException:
        listener.close()
        raise
    return listener


def _is_served(port: int) -> bool:
    """Whether a store of this process still listens on ``port``."""
    try:
        # Ask the descriptor: the store closes it without telling us.
        with socket.socket(fileno=os.dup(_listeners[port])) as listener:
            return listener.getsockname()[1] == port
    except (KeyError, OSError):
        return False


def _why_not(error: OSError, port: int) -> str:
    """The error in PyTorch's own words, which people search for and tests match."""
    name = errno.errorcode.get(error.errno, "unknown")
    return (
        "The server socket has failed to listen on any local network address. "
        f"port: {port}, useIpv6: false, code: -{error.errno}, name: {name}, "
        f"message: {os.strerror(error.errno).lower()}"
    )
