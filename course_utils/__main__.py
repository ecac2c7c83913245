"""The course's command line: ``python3 -m course_utils COMMAND``.

Runs on a bare Python, before anything is installed. Every Python since 3.6 must be
able to read this file, or an old one would show a SyntaxError instead of the reason.
"""

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


def main(argv=None):
    """Run one command and return its exit code: 0 is success, 130 is Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if sys.version_info < OLDEST:
        return fail(too_old())
    if not argv or argv[0] in ("-h", "--help", "help"):
        sys.stdout.write(HELP)
        return 0
    command, rest = argv[0], argv[1:]
    if command not in COMMANDS:
        return fail(unknown(command), code=2)

    import signal

    from course_utils.setup.environment import SetupError

    # A shell script starts its background commands deaf to Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = COMMANDS[command](rest)
        sys.stdout.flush()
        return code
    except SetupError as error:
        return fail(str(error))
    except BrokenPipeError:
        # Whoever read our output, such as `head`, has enough of it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except KeyboardInterrupt:
        goes_on = command in (
            "start",
            "test",
            "wheels",
        )  # a set-up; the others begin anew
        again = "; run the same command again to go on" if goes_on else ""
        return fail("stopped" + again, code=130)


def start(argv):
    from course_utils.setup import lab

    return lab.main(argv)


def test(argv):
    from course_utils.setup import testing

    return testing.main(argv)


def wheels(argv):
    from course_utils.setup import wheels

    return wheels.main(argv)


def doctor(argv):
    from course_utils.setup import doctor

    return doctor.main(argv)


def progress(argv):
    # Whoever sends in a progress file may have no environment in this terminal.
    from course_utils.notebook import progress

    return progress.main(argv)


def cohort(argv):
    from course_utils.notebook import cohort

    return cohort.main(argv)


def build_exercises(argv):
    from course_utils.setup import environment

    # It needs the authors' packages: from here on it runs in the environment with them.
    environment.enter(["build-exercises"] + argv, dev=True)

    from course_utils.notebook import exercises

    return exercises.main(argv)


COMMANDS = {
    "start": start,
    "test": test,
    "wheels": wheels,
    "doctor": doctor,
    "progress": progress,
    "cohort": cohort,
    "build-exercises": build_exercises,
}


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
