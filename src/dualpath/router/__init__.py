"""The central scheduler's process: drives ``policy.RequestScheduler`` and the life of requests."""
