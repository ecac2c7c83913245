"""The template of a lesson is no test: the copies of its files are."""

collect_ignore_glob = ["*"]
