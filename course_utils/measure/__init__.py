"""Instruments: what is sent, how long it takes, how much memory it needs; and data."""
