"""The course's command line: ``python3 -m course_utils COMMAND``.

Runs on a bare Python, before anything is installed. Every Python since 3.6 must be
able to read this file, or an old one would show a SyntaxError instead of the reason.
"""

import importlib
import os
import sys

OLDEST = (3, 10)

HELP = """\
usage: python3 -m course_utils COMMAND [options]

  start             set the course up if need be, and open it in JupyterLab
  progress          show what you have done and what comes next
  doctor            look at this machine: what is real, what is virtual, what is wrong
                    (with --room: try all of it, before a workshop)
  test              run all tests of the course
  wheels            download all packages into a folder, for a room without network
  cohort            a table of many learners: who is stuck where (for instructors)
  build-exercises   write exercises/ anew from solutions/ (for authors)

New here? python3 -m course_utils start
Options of one command: python3 -m course_utils COMMAND --help
"""
COMMANDS = {  # the module whose `main` runs it
    "start": "course_utils.setup.lab",
    "test": "course_utils.setup.testing",
    "wheels": "course_utils.setup.wheels",
    "doctor": "course_utils.setup.doctor",
    "progress": "course_utils.notebook.progress",
    "cohort": "course_utils.notebook.cohort",
    "build-exercises": "course_utils.notebook.exercises",
}
GO_ON = ("start", "test", "wheels")  # after a Ctrl-C; the others begin anew


def main(argv=None):
    """Run one command and return its exit code: 0 is success, 130 is Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if sys.version_info < OLDEST:
        return fail(too_old())
    if not argv or argv[0] in ("-h", "--help", "help"):
        sys.stdout.write(HELP)
        return 0
    command = argv[0]
    if command not in COMMANDS:
        return fail(unknown(command), code=2)

    import signal

    from course_utils.setup.environment import SetupError, enter

    # A shell script starts its background commands deaf to Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if command == "build-exercises":
            enter(argv, dev=True)  # it needs the authors' packages
        code = importlib.import_module(COMMANDS[command]).main(argv[1:])
        sys.stdout.flush()
        return code
    except SetupError as error:
        return fail(str(error))
    except BrokenPipeError:
        # Whoever read our output, such as `head`, has enough of it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except KeyboardInterrupt:
        again = "; run the same command again to go on" if command in GO_ON else ""
        return fail("stopped" + again, code=130)


def fail(message, code=1):
    """Print one line on standard error and return the exit code."""
    sys.stdout.flush()
    sys.stderr.write(message + "\n")
    return code


def unknown(command):
    import difflib

    close = difflib.get_close_matches(command, COMMANDS, n=1)
    return "no command '%s'. %s" % (
        command,
        "Did you mean '%s'?" % close[0] if close else "Try: " + ", ".join(COMMANDS),
    )


def too_old():
    newer = newest_python()
    return "Python %d.%d or newer is needed, this is %d.%d.%d (%s). %s" % (
        OLDEST
        + tuple(sys.version_info[:3])
        + (
            sys.executable,
            "Run: %s -m course_utils start" % newer
            if newer
            else "Install a newer Python, then run the same command with it.",
        )
    )


def newest_python():
    """Return the name of a Python on the PATH that is new enough, or ''."""
    import subprocess

    with open(os.devnull, "w") as quiet:
        for minor in range(20, OLDEST[1] - 1, -1):
            name = "python3.%d" % minor
            try:
                # A version manager's stand-in may be there and yet refuse to run.
                if not subprocess.call([name, "-V"], stdout=quiet, stderr=quiet):
                    return name
            except OSError:
                pass
    return ""


if __name__ == "__main__":
    sys.exit(main())
