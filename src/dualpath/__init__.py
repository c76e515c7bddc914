"""Dual-path KV-cache loading for agentic LLM inference (SIGCOMM 2026, arXiv 2602.21548)."""

__version__ = "0.1.0"
