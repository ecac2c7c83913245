"""What a lesson calls: check, hint, solution."""
