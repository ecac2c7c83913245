"""``python3 -m course_utils wheels FOLDER``: all packages, for a room without network.

There, ``start --wheels FOLDER`` installs from the folder. It may serve several systems
and versions of Python: run the command once for each.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from course_utils import ROOT
from course_utils.setup.environment import SetupError, last_line, say
from course_utils.setup.installer import (
    LOCAL,
    PYTHON,
    UV,
    ensure,
    explain,
    requirements,
    told_to_pip,
    tool_environment,
    torch_index,
)

# uv's name of a system: Python's name of it, and the tags of wheels that run on it
# (https://packaging.python.org/en/latest/specifications/platform-compatibility-tags/).
_LINUX = [f"manylinux_2_{n}_x86_64" for n in range(35, 4, -1)]
PLATFORMS = {
    "linux": ("linux", [*_LINUX, *(f"manylinux{n}_x86_64" for n in (2014, 2010, 1))]),
    "macos": ("darwin", ["macosx_14_0_arm64", "macosx_11_0_universal2"]),
    "windows": ("win32", ["win_amd64"]),
}
HERE = next((n for n in PLATFORMS if PLATFORMS[n][0] == sys.platform), "linux")


def main(argv: Sequence[str], root: Path = ROOT) -> int:
    """Fill the folder. Raises SetupError with the reason in one line."""
    parser = argparse.ArgumentParser(
        prog="python3 -m course_utils wheels",
        description="Download all packages of the course into FOLDER, such as a USB "
        "stick. There: python3 -m course_utils start --wheels FOLDER",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("--python", default=PYTHON, help="its version")
    parser.add_argument(
        "--platform", choices=PLATFORMS, default=HERE, help="the system"
    )
    parser.add_argument("--torch", choices=LOCAL, default="cpu", help="PyTorch's build")
    options = parser.parse_args(argv)
    python, system = ensure(root), PLATFORMS[options.platform]
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)

    env = tool_environment(root)
    env.update(told_to_pip(python, env), MACOSX_DEPLOYMENT_TARGET="14.0")
    where = f"Python {options.python} on {options.platform}"
    say(f"Looking up the packages for {where}.")
    # All that they need there: pip would ask for what they need on this computer.
    uv = ["uv", "pip", "compile", "-", "--quiet", "--no-header", "--no-annotate"]
    uv += ["--python-version", options.python, "--python-platform", options.platform]
    wanted = f"{requirements(root)}\nuv=={UV}\nsetuptools\n".replace("-e .", "")
    index, everything = torch_index(options.torch, system[0]), ""
    if index:
        local = rf"\1+{LOCAL[options.torch]}"
        exact = re.sub(r"(?m)^(torch(?:vision)?==[\w.]+)", local, wanted)
        from_index = ["--index", index, "--index-strategy", "unsafe-best-match"]
        try:
            everything = _run([python, "-m", *uv, *from_index], env, where, exact)
        except SetupError:
            say(f"{index} does not give that build. PyPI's takes its place.")
            index = ""
    everything = everything or _run([python, "-m", *uv], env, where, wanted)
    (folder / "requirements.txt").write_text(everything)
    say(f"Downloading {len(everything.split())} packages into {folder}.")
    pip = ["pip", "download", "--no-deps", "--only-binary=:all:", "--dest", folder]
    pip += ["--python-version", options.python, "--implementation", "cp"]
    pip += [word for tag in system[1] for word in ("--platform", tag)]
    pip += ["--extra-index-url", index] * bool(index)
    _run([python, "-m", *pip, "-r", folder / "requirements.txt"], env, where)
    size = sum(file.stat().st_size for file in folder.glob("*.whl")) / 1e9
    say(f"Done: {size:.2f} GB. python3 -m course_utils start --wheels {folder}")
    return 0


def _run(command: list[str | Path], env: dict, where: str, given: str = "") -> str:
    Path(env["TMPDIR"]).mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        command, input=given, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = done.stderr or done.stdout
        raise SetupError(explain(said, where=where) or last_line(said))
    return done.stdout
