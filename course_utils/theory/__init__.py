"""What theory says: closed formulas with their sources, and the same event by event."""
