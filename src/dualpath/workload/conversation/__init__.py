"""Conversations: an agent's prompts turn by turn, from recorded turns and generated answers."""
