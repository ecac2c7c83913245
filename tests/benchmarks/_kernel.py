"""A real Jupyter kernel, driven as a notebook drives it, with a watch in hand."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from jupyter_client import KernelManager
from jupyter_client.kernelspec import KernelSpecManager

from course_utils import ROOT

START_SECONDS = 60.0
CELL_SECONDS = 90.0  # longer than the limit that a cell on the ranks has by itself
POLL_SECONDS = 1.0  # how often to look whether the kernel still lives
END_SECONDS = 5.0  # for everything that a kernel has started to end after it


def code_cells(notebook: Path) -> list[str]:
    """The sources of the code cells of a notebook, in order."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]


def memory_of(pid: int) -> int:
    """Bytes of a process, on Linux with its part of what several share (PSS)."""
    found = psutil.Process(pid).memory_full_info()
    return getattr(found, "pss", found.uss)


@dataclass(frozen=True)
class Reply:
    """What came of a cell.

    Attributes:
        seconds: from sending the cell until the kernel said that it is idle again.
        ok: no exception reached the notebook.
        text: what it printed, and the traceback if there is one.
        expressions: what came of the expressions sent along with it.
    """

    seconds: float
    ok: bool
    text: str
    expressions: dict[str, Any] = field(default_factory=dict)


class Kernel:
    """A fresh ipykernel of this Python, in a process of its own.

    Its settings and history live in a temporary folder. Use it in a ``with``
    statement: the end of it makes sure that no process is left.

    Attributes:
        start_seconds: from the start of the process until it answered.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="benchmark-kernel-")
        folder = Path(self._folder.name)
        self._log = (folder / "log").open("w+")
        # A port that is free now may be taken before the kernel listens there.
        files = {"transport": "ipc", "ip": str(folder / "socket")}
        address = {} if os.name == "nt" else files
        # No folders to look in: a kernel named python3 of another Python can't win.
        self._manager = KernelManager(
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
            connection_file=str(folder / "connection.json"),
            **address,
        )
        self._sent: dict[str, float] = {}
        started = time.perf_counter()
        try:
            self._manager.start_kernel(
                cwd=str(ROOT),
                env=self._environment(folder),
                stdout=self._log,
                stderr=subprocess.STDOUT,
            )
            self.pid: int = self._manager.provisioner.pid
            self._client = self._manager.client()
            self._client.start_channels()
            self._client.wait_for_ready(timeout=START_SECONDS)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # it was never started
                self._manager.shutdown_kernel(now=True)
            print(self._end_log(), file=sys.stderr)
            raise
        self.start_seconds = time.perf_counter() - started

    @staticmethod
    def _environment(folder: Path) -> dict[str, str]:
        environment = dict(
            os.environ,
            IPYTHONDIR=str(folder / "ipython"),
            JUPYTER_RUNTIME_DIR=str(folder / "runtime"),
            COURSE_STATE=str(folder / "state"),
            RANKS_OUTPUT="stream",  # as in JupyterLab, also when CI is set
        )
        others = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), others]))
        return environment

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def send(self, code: str, **expressions: str) -> str:
        """Send a cell and do not wait; :meth:`receive` takes what this returns.

        Args:
            code: the text of the cell.
            expressions: Python expressions to evaluate after it, by name.
        """
        sent = time.perf_counter()
        message_id = self._client.execute(code, user_expressions=expressions)
        self._sent[message_id] = sent
        return message_id

    def receive(self, message_id: str) -> Reply:
        """Wait for the end of a cell.

        Raises:
            RuntimeError: the kernel died.
            TimeoutError: it is still not idle after :data:`CELL_SECONDS`.
        """
        sent = self._sent.pop(message_id)
        texts: list[str] = []
        idle = 0.0
        answer: dict[str, Any] = {}
        while not (answer and idle):
            # The channels themselves: the client's async wrappers take time.
            channel = self._client.shell_channel if idle else self._client.iopub_channel
            message = self._next(channel, sent)
            if message["parent_header"].get("msg_id") != message_id:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                idle = time.perf_counter()
            elif kind == "stream":
                texts.append(content["text"])
            elif kind == "error":
                texts += content["traceback"]
            elif kind == "execute_reply":
                answer = content
        return Reply(
            seconds=idle - sent,
            ok=answer["status"] == "ok",
            text="\n".join(texts),
            expressions=answer.get("user_expressions", {}),
        )

    def _next(self, channel: Any, since: float) -> dict[str, Any]:
        while True:
            try:
                return channel.get_msg(timeout=POLL_SECONDS)
            except queue.Empty:
                if not self._manager.is_alive():
                    raise RuntimeError("the kernel died") from None
                if time.perf_counter() - since > CELL_SECONDS:
                    raise TimeoutError(
                        f"the cell did not end within {CELL_SECONDS:g} s"
                    ) from None

    def run(self, code: str) -> Reply:
        """Run a cell and wait for its end."""
        return self.receive(self.send(code))

    def run_well(self, code: str) -> Reply:
        """Run a cell that must work.

        Raises:
            RuntimeError: it did not; the text is what the notebook would show.
        """
        reply = self.run(code)
        if not reply.ok:
            raise RuntimeError(f"this cell failed:\n{code}\n\n{reply.text}")
        return reply

    def value(self, expression: str) -> Any:
        """What a Python expression is in the kernel: numbers, text, lists, ...

        Raises:
            RuntimeError: the expression raised an exception.
        """
        found = self.receive(self.send("", it=expression)).expressions["it"]
        if found["status"] != "ok":
            raise RuntimeError(f"{expression}: {found['ename']}: {found['evalue']}")
        return ast.literal_eval(found["data"]["text/plain"])

    def interrupt(self) -> None:
        """What the stop button does."""
        self._manager.interrupt_kernel()

    def close(self) -> None:
        """Shut the kernel down, and see that everything it has started ends.

        Raises:
            RuntimeError: a process was left behind (it is killed).
        """
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):  # it died
            family = psutil.Process(self.pid).children(recursive=True)
        try:
            self._client.stop_channels()
            # A dead kernel cannot be asked; without ``now`` it would be waited for.
            self._manager.shutdown_kernel(now=not self._manager.is_alive())
        finally:
            _, left = psutil.wait_procs(family, timeout=END_SECONDS)
            for process in left:
                process.kill()
            self._end_log()
        if left:
            raise RuntimeError(f"left behind by the kernel, and killed now: {left}")

    def _end_log(self) -> str:
        """What the kernel process has printed; its folder is gone after this."""
        self._log.seek(0)
        text = self._log.read()
        self._log.close()
        self._folder.cleanup()
        return text
