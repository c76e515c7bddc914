"""The replay client: runs agents against an endpoint and measures every turn."""
