"""Conversations: what an agent sends, turn by turn, from what was recorded and what came back."""
