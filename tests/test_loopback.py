"""``bind_stores_to_loopback``: stores on loopback listen there, and nowhere else.

Each test asks the system for the listening sockets of a process of its own, because
the change is for good: a process cannot take it back.
"""

import json
import re
import subprocess
import sys
import textwrap

import pytest

from course_utils import ROOT

PRELUDE = """
import json, os, socket, sys
from datetime import timedelta
import psutil
import torch.distributed as dist
from torch.distributed import TCPStore  # a name that was imported before the change
from course_utils.ranks.loopback import bind_stores_to_loopback

SHORT = timedelta(seconds=1)

def listening():
    connections = psutil.Process().net_connections()
    sockets = [c.laddr for c in connections if c.status == psutil.CONN_LISTEN]
    return sorted([address.ip, address.port] for address in sockets)

def attempt(*args, **kwargs):
    try:
        TCPStore(*args, **kwargs)
    except Exception as error:
        return [type(error).__name__, str(error).splitlines()[0]]

report = {}
"""


def in_a_process(code: str) -> dict:
    """What ``code`` has put into ``report``, run in a fresh Python."""
    source = PRELUDE + textwrap.dedent(code) + "\nprint(json.dumps(report))"
    done = subprocess.run(
        [sys.executable, "-c", source],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def unchanged() -> dict:
    """PyTorch as it is: what the other tests compare with."""
    return in_a_process(
        """
        store = TCPStore("127.0.0.1", 0, 1, True, SHORT)
        report["listening"] = listening()
        report["taken"] = attempt("127.0.0.1", store.port, 1, True, SHORT)
        report["no port"] = attempt("127.0.0.1", 99_999, 1, True, SHORT)
        report["alone"] = attempt("127.0.0.1", 0, 2, True, SHORT)
        """
    )


@pytest.fixture(scope="module")
def changed() -> dict:
    return in_a_process(
        """
        bind_stores_to_loopback()
        bind_stores_to_loopback()

        for host in ("127.0.0.1", "localhost", "127.3.2.1", "::1"):
            try:
                store = TCPStore(host, 0, 1, True, SHORT)
            except dist.DistNetworkError as error:
                assert host == "::1", error  # a machine without IPv6
                continue
            client = TCPStore(host, store.port, 1, False, SHORT)
            client.set("key", "value")
            report[host] = [listening(), store.port, store.get("key").decode()]
            del store, client
        report["after"] = listening()

        store = TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=True)
        port = store.port
        again = TCPStore("127.0.0.1", port, is_master=True, multi_tenant=True)
        report["shared"] = [listening(), port]
        report["taken"] = attempt("127.0.0.1", port, 1, True, SHORT)
        report["no port"] = attempt("127.0.0.1", 99_999, 1, True, SHORT)
        report["alone"] = attempt("127.0.0.1", 0, 2, True, SHORT)
        del store, again
        report["wrong type"] = attempt("127.0.0.1", port, 1, True, 2)
        report["after errors"] = listening()

        store = TCPStore("0.0.0.0", 0, 1, True, SHORT)
        report["every interface"] = listening()
        del store

        mine = socket.create_server(("127.0.0.1", 0))
        given = mine.getsockname()[1]
        store = TCPStore("127.0.0.1", given, 1, True, SHORT,
                         master_listen_fd=mine.detach())
        report["given socket"] = [store.port == given, listening()]
        del store

        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
        os.environ.update(RANK="0", WORLD_SIZE="1")
        urls = ("env://", f"tcp://127.0.0.1:{port}?rank=0&world_size=1")
        for url in urls * 2:  # the same port again, as when a group is made anew
            dist.init_process_group("gloo", init_method=url)
            report[url.partition(":")[0]] = listening()
            dist.destroy_process_group()
        report["at the end"] = listening()
        """
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.3.2.1", "::1"])
def test_a_store_on_loopback_listens_there_only_and_works(changed, unchanged, host):
    # If this fails, PyTorch has changed and loopback.py may be superfluous.
    assert [address for address, _ in unchanged["listening"]] == ["::"]
    if host not in changed:
        pytest.skip(f"this machine has no {host}")
    sockets, port, value = changed[host]
    address = "127.0.0.1" if host == "localhost" else host
    assert sockets == [[address, port]]
    assert value == "value"
    assert changed["after"] == []
    sockets, port = changed["shared"]  # as before, where they ask for it
    assert sockets == [["127.0.0.1", port]]


def test_errors_are_pytorchs_own_and_leave_no_socket(changed, unchanged):
    def without_port(error):
        return [error[0], re.sub(r"port: \d+", "port: N", error[1])]

    assert "EADDRINUSE" in changed["taken"][1]
    for mistake in ("taken", "no port", "alone"):
        assert without_port(changed[mistake]) == without_port(unchanged[mistake])
    assert changed["wrong type"][0] == "TypeError"
    assert changed["after errors"] == []


def test_other_hosts_and_given_sockets_are_left_to_pytorch(changed):
    assert [address for address, _ in changed["every interface"]] == ["::"]
    worked, sockets = changed["given socket"]
    assert worked
    assert [address for address, _ in sockets] == ["127.0.0.1"]


@pytest.mark.parametrize("method", ["env", "tcp"])
def test_a_process_group_listens_on_loopback_only(changed, method):
    assert changed[method]
    assert {address for address, _ in changed[method]} == {"127.0.0.1"}
    assert changed["at the end"] == []
