"""The course's ideas written out, one a file; FSDP has a folder, with a file a step.

Each imports torch alone.
"""
