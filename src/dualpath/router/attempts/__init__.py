"""The scheduler's half of an attempt: look-up, placement, slots, reads, what is given back."""
