"""The course's ideas written out, one a file. Each imports torch alone."""
