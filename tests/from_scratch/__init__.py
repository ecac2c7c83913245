"""The references in ``course_utils/from_scratch``: against one process, and torch."""
