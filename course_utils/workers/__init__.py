"""Scripts for ``torchrun``, and what they share. ``course_utils.launch`` runs them."""
