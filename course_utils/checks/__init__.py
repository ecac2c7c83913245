"""The tasks of lessons that have not moved to `tasks/` yet, and what runs them."""
